"""Answers are found and compared as lm-evaluation-harness does; numbers are equal however they are written."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.answers import check_rule, find_answer, is_right, normal

STRICT = r"#### (\-?[0-9\.\,]+)"


def filtered(text: str, pattern: str, place: int) -> str:
    """What the harness' regex filter takes from a text (its task gsm8k: strict-match takes 0, flexible-extract -1)."""
    if not (found := re.findall(pattern, text)):
        return "[invalid]"
    chosen = found[place]
    if isinstance(chosen, tuple):
        chosen = next(part for part in chosen if part)
    return str(chosen).strip()


def scored(prediction: str, reference: str) -> bool:
    """The harness' exact_match of that task: ignore_case and regexes_to_ignore."""
    texts = []
    for whole in (prediction, reference):
        text = whole
        for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
            text = re.sub(ignored, "", text)
        texts.append(text.lower())
    return texts[0] == texts[1]


def solution(rng: random.Random) -> tuple[str, str]:
    """A text as a model writes one, and the dataset's solution."""
    number = rng.choice([rng.randrange(20), rng.randrange(-99, 10**6)])
    wrong = number + rng.choice([0, 0, 0, 1, 10])
    written = rng.choice(
        [str(wrong), f"{wrong:,}", f"${wrong:,}", f"${wrong}.00", f"{wrong}.", f"{wrong}.0", f"{wrong}%"]
    )
    ends = [
        "",
        ".",
        "...",
        " dollars.",
        "\n",
        " eggs, i.e. half of 12",
        ", so yes",
        "!",
        " (x = 3)",
        "\n#### " + str(wrong),
    ]
    begins = ["", "2 + 3 = 5. ", "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n", "- first, $1.50;\n", "No number: "]
    text = rng.choice(begins) + rng.choice(["The answer is ", "= ", "#### ", "**"]) + written + rng.choice(ends)
    if rng.random() < 0.05:
        text = rng.choice(["I do not know", "", "Well... so.", "twelve", "$", "-"])
    return text, f"He pays 3*4=<<3*4=12>>12 dollars.\n#### {number:,}"


@pytest.mark.parametrize(("rule", "pattern", "place"), [
    ("last_number", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    (STRICT, STRICT, 0),
])  # fmt: skip
def test_a_thousand_solutions_are_scored_as_the_harness_does(rule: str, pattern: str, place: int) -> None:
    rng = random.Random(11)
    num_right = num_rows = 0
    while num_rows < 1000:
        text, reference = solution(rng)
        if text.count("####") > 1:
            continue  # the harness' strict filter takes the first of several, this one the last
        num_rows += 1
        theirs = scored(filtered(text, pattern, place), reference)
        assert is_right(rule, find_answer(rule, text), reference) == theirs, text
        num_right += theirs
    assert 50 < num_right < 950


@pytest.mark.parametrize("text", ["1234", " 1,234\n", "$1,234.", "$ 1,234"])
def test_ways_to_write_a_number_are_one(text: str) -> None:
    assert normal(text) == "1234"
    assert is_right("last_number", find_answer("last_number", "It is 1,234."), text)
    assert is_right("last_number", "1234", 1234)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1234", "1234.0"), ("1234", "12340"), ("0.1", "0.01"), ("-1", "1"), ("1.2.3", "1.23"), ("x1", "1"), ("", "0")],
)
def test_other_texts_are_others(one: str, other: str) -> None:
    assert not is_right("last_number", one, other)


def test_the_last_match_of_a_regular_expression_counts_and_the_expected_text_may_need_none() -> None:
    rule = r"<a>(.*?)</a>"
    assert find_answer(rule, "<a>x</a> no, <a> Paris </a>") == "Paris"
    assert find_answer(rule, "<a>x") is None
    assert is_right(rule, "Paris", " PARIS. ") and is_right(rule, "Paris", "see <a>paris</a>")
    assert find_answer(r"(x)?y", "y") is None
    assert find_answer(r"(?P<number>\d+) (?P<unit>\w+)", "42 eggs, 43 hens") == "43"


@pytest.mark.parametrize("rule", ["last-number", "(", "choice", "parsed.n", "(?:a)", r"(?<=a)(b)", r"(a)\1"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match=r"must be last_number|is not a regular expression"):
        check_rule(rule)


@pytest.mark.parametrize(
    "rule", ["last_number", r"((?:a+)+)$", r"((a|aa)+)$", r"Answer:\s*((?:\w+\s?)+)\.", r"((?s).*)7"]
)
def test_no_text_takes_long(rule: str) -> None:
    began = time.process_time()
    for text in ("0" * 10**6 + "x", "1." * 10**5, "1" + " " * 10**6 + "x", "-" * 10**6, f"Answer: {'a' * 10**6}!"):
        is_right(rule, find_answer(rule, text), text)
    assert time.process_time() - began < 60  # seconds; quadratic work would take hours


@given(st.text("ab1 \n\ue000\ue001"), st.sampled_from([r"(\d+)", r"a(b*)", r"(?s)(.*1)", r"(?m)^(\S+)$", r"(a+?)b"]))
def test_the_answer_is_the_last_match_of_python(text: str, rule: str) -> None:
    found = re.findall(rule, text)
    assert find_answer(rule, text) == ((found[-1].strip() or None) if found else None)


@pytest.mark.parametrize("text", ["\ud800 7", "é\u2028\n7", '"7', "\x00 7"])
def test_any_text_can_be_searched(text: str) -> None:
    assert find_answer(r"(?s)(.*7)", text) == text.replace("\ud800", "?")


def test_a_rule_that_names_a_replacement_is_refused_for_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"is not a regular expression.*missing \)"):
        check_rule("(replacement")
