"""Regexes for llguidance: what fits them, fits what was written, as Python reads it."""

from __future__ import annotations

import re

import pytest
from guides import complete_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import nightly

from batchgen.core.structured import canonical
from batchgen.text.grammar import Grammars
from batchgen.text.grammar_source import GrammarError
from batchgen.text.regexes import portable, white_space

CLASSES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"]


def sets() -> st.SearchStrategy[str]:
    parts = st.lists(
        st.sampled_from([*CLASSES, "a", "é", "0-9", "_", r"\]", r"\n", "[", "&&", "~~"]), min_size=1, max_size=3
    )
    return st.tuples(st.sampled_from(["[", "[^"]), parts).map(lambda pair: pair[0] + "".join(pair[1]) + "]")


def regexes() -> st.SearchStrategy[str]:
    atoms = (
        st.sampled_from([*CLASSES, ".", "a", "Zé", r"\.", r"\[", "}", "(?s:.)", r"\x41", "(?i:straße)", "-", "#"])
        | sets()
    )

    def compound(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "{1,2}?"])
        return (
            st.lists(parts, min_size=1, max_size=3).map("".join)
            | st.lists(parts, min_size=2, max_size=3).map(lambda items: f"(?:{'|'.join(items)})")
            | st.tuples(st.sampled_from(["(", "(?:", "(?P<x>"]), parts, quantifiers).map(
                lambda x: f"{x[0]}{x[1]}){x[2]}"
            )
        )

    whole = st.recursive(atoms, compound, max_leaves=6).filter(lambda regex: regex.count("?P<x>") < 2)
    return st.tuples(st.sampled_from(["", "^", r"\A"]), whole, st.sampled_from(["", "$", r"\Z"])).map(
        lambda ends: f"{ends[0]}(?:{ends[1]}){ends[2]}"
    )


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("count", [60, nightly(500)])
def test_complete_texts_match_in_python(grammars: Grammars, count: int) -> None:
    texts: list[str] = []
    refused: list[str] = []

    @settings(max_examples=count)
    @given(regexes())
    def check(regex: str) -> None:
        try:
            found = complete_texts(grammars, {"regex": regex}, range(4))
        except GrammarError as error:  # nothing fits [^\s\S]
            assert "no text fits it" in str(error), (regex, error)
            refused.append(regex)
            return
        assert [text for text in found if not re.fullmatch(regex, text)] == [], regex
        texts.extend(found)

    check()
    assert len(texts) > 3 * (count - len(refused))
    assert len(refused) < count // 5


@pytest.mark.parametrize(
    ("written", "ready"),
    [
        (r"\d+", "[0-9]+"),
        (r"\\d", r"\\d"),
        (r"[\w.-]", r"[[0-9A-Za-z_].-]"),
        (r"[\w-.]", r"[[0-9A-Za-z_]-.]"),
        (r"[^\d]", r"[^[\p{Nd}]]"),
        (r"\s\S", r"[ \t\n\r\f\v][^\s\x1c-\x1f\u{feff}]"),
        (r"\W", r"[^\p{L}\p{N}\p{M}\p{Pc}\u{200c}\u{200d}]"),
        (r"\Aa\Z", "^a$"),
        (r"[\s\S]*", "(?s:.)*"),
        (r"[[:alpha:]]", "[[:alpha:]]"),
        (r"[[(]", r"[\[(]"),
        (r"\p{Lu}\u{e9}+", r"\p{Lu}\u{e9}+"),
    ],
)
def test_what_dialects_read_differently_is_spelled_out(written: str, ready: str) -> None:
    assert portable(written) == ready


@pytest.mark.parametrize(
    ("regex", "message"),
    [("a++", "possessive"), ("(?:ab){2}+", "possessive"), ("a" * 5000, "5,000 characters; at most 4,096")],
)
def test_what_would_be_read_otherwise_is_refused(regex: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        portable(regex)


@pytest.mark.parametrize("regex", ["(?=a)a", "(?<!a)b", r"(a)\1", r"\bfoo", "(a", "(?P=x)", r"\Ga", "(?m)^a$"])
def test_what_the_library_does_not_know_is_refused(grammars: Grammars, regex: str) -> None:
    with pytest.raises(GrammarError):
        grammars.check(canonical({"regex": regex}))


def test_white_space_is_that_of_json() -> None:
    assert white_space(r"\s?") == r"[ \t\n\r]?"
    assert white_space(r"(?:[\n ]|\x20\t){0,12}") == r"(?:[\n ]|\x20\t){0,12}"
    for pattern in ("[a-z]*", "[ 0]", r"[^\n]", ".", r"\S", "1", r"\x41", ",", r"\v"):
        with pytest.raises(ValueError, match="whitespace_pattern may only hold"):
            white_space(pattern)
