"""Reasoning: which markers a model has, and where an answer is split by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import DATED, THINKING
from hypothesis import given
from hypothesis import strategies as st
from input_helpers import ids_of, write_tokenizer

from batchgen.text.reasoning import Reasoning, Thoughts, text_behind
from batchgen.text.tokenizer import Tokenizer

MARKERS = ("<think>", "</think>")


def tokenizer_with(folder: Path, special: bool | None = None, template: str = THINKING) -> Tokenizer:
    """A tokenizer of bytes; the markers are tokens of their own, special or not, or (None) no tokens."""
    added = {} if special is None else dict.fromkeys(MARKERS, special)
    return Tokenizer.load(write_tokenizer(folder, added, chat_template=template))


@pytest.fixture(scope="module", params=[None, False, True], ids=["text", "token", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"), request.param)


def split(tokenizer: Tokenizer, answer: str, *, is_open: bool = False) -> tuple[str | None, str]:
    ids = ids_of(tokenizer, answer + "<|im_end|>")
    return Reasoning(tokenizer).split(ids, tokenizer.decode(ids), is_open=is_open)


@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        ("<think>\nA, é.\n</think>\n\n  Yes.\n", "A, é.", "  Yes.\n"),
        ("<think>A</think>B", "A", "B"),
        (" \n<think>A</think>B", "A", "B"),
        ("<think></think>B", "", "B"),
        ("<think>\n\n</think>\n\n", "", ""),
        ("<think>\nA and", "A and", ""),
        ("<think>", "", ""),
        ("<think>A</think>B</think>C<think>", "A", "B</think>C<think>"),
        ("<think>A <think> B</think>C", "A <think> B", "C"),
    ],
)
def test_an_answer_that_begins_with_reasoning_is_split_after_it(
    tokenizer: Tokenizer, answer: str, reasoning: str, text: str
) -> None:
    is_special = bool({tokenizer.token_id(marker) for marker in MARKERS} & tokenizer.silent_token_ids)
    if is_special:  # decoding leaves the later ones out
        reasoning, text = (part.replace("<think>", "").replace("</think>", "") for part in (reasoning, text))
    for is_open in (False, True):  # some models write the marker that the prompt has given them
        assert split(tokenizer, answer, is_open=is_open) == (reasoning, text)


@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        ("\nA\n</think>\n\nB\n", "A", "B\n"),
        ("</think>B", "", "B"),
        ("A", "A", ""),
        ("", "", ""),
        ("A</think>", "A", ""),
    ],
)
def test_an_answer_whose_prompt_opened_the_reasoning_begins_inside(
    tokenizer: Tokenizer, answer: str, reasoning: str, text: str
) -> None:
    assert split(tokenizer, answer, is_open=True) == (reasoning, text)


@pytest.mark.parametrize("answer", ["", "\n\nB\n", "B", "Use <b> and <i>.", "A thinks: B"])
def test_an_answer_without_reasoning_is_left_as_it_stands(tokenizer: Tokenizer, answer: str) -> None:
    assert split(tokenizer, answer) == (None, answer)


def test_a_marker_that_a_text_quotes_splits_nothing(tmp_path: Path) -> None:
    for special in (None, False):
        loaded = tokenizer_with(tmp_path, special)
        for answer in ("Write <think>so</think> to think.", "B</think>C"):
            assert split(loaded, answer) == (None, answer)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think> is a tag", False),
    ],
)
def test_whether_a_prompt_opens_reasoning_is_read_at_its_end(tokenizer: Tokenizer, prompt: str, is_open: bool) -> None:
    ids = ids_of(tokenizer, "x" * 99 + prompt)
    assert Reasoning(tokenizer).is_open(ids) == Reasoning(tokenizer).is_open(ids[-50:]) == is_open


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        (THINKING, *MARKERS),
        (DATED, *MARKERS),  # which names none
        ("{{ x.split('[/THINK]') }}", "[THINK]", "[/THINK]"),
        ("{{ x }}<|START_THINKING|>{{ y }}<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("{{ x.split('</seed:think>') }}", "<seed:think>", "</seed:think>"),
        ("<reasoning>{{ y }}</reasoning>", "<reasoning>", "</reasoning>"),
        ("</thought>{{ x.split('</think>') }}", *MARKERS),
        ("</b>{{ think }}</i>", *MARKERS),
        ("</" + "a" * 100_000 + "{{ x }}" + "</" * 100_000, *MARKERS),
    ],
)
def test_the_markers_are_those_the_template_names(tmp_path: Path, template: str, opening: str, closing: str) -> None:
    found = Reasoning(tokenizer_with(tmp_path, template=template))
    assert (found.opening, found.closing) == (opening, closing)


@given(
    st.text(st.characters(codec="utf-8"), max_size=8), st.text(st.characters(codec="utf-8"), max_size=8), st.booleans()
)
def test_both_parts_come_back_whatever_is_in_them(
    tokenizer: Tokenizer, reasoning: str, text: str, is_open: bool
) -> None:
    opening = "" if is_open else "<think>"
    expected = (reasoning.strip("\n"), text.lstrip("\n"))
    assert split(tokenizer, f"{opening}{reasoning}</think>{text}", is_open=is_open) == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "rest"),
    [
        ("Hi", "Wait.</think>{}", "{}"),
        ("Hi", "Wait.</think>{}</think>", "{}</think>"),
        ("Hi", "é</thi</think>\n{}", "\n{}"),
        ("Hi", "Wait.", ""),
        ("Hi<think></think>\n\n", "{}</think>{}", "{}</think>{}"),
    ],
)
def test_what_follows_a_marker_is_behind_its_first(tokenizer: Tokenizer, prompt: str, answer: str, rest: str) -> None:
    prompt_ids, ids = ids_of(tokenizer, prompt), ids_of(tokenizer, answer)
    found = text_behind(tokenizer, "</think>", prompt_ids, ids, tokenizer.decode(ids))
    assert found == tokenizer.decode(ids_of(tokenizer, rest))


def followed(tokenizer: Tokenizer, answer: str, budget: int, *, is_open: bool = False) -> tuple[str, int, bool]:
    """An answer with what is forced in it, its tokens of thought, and whether these are over."""
    markers = Reasoning(tokenizer)
    thoughts, ids = Thoughts(markers, budget, is_open=is_open), list[int]()
    for token_id in ids_of(tokenizer, answer):
        while (forced := thoughts.forced) is not None:
            ids.append(forced)
            thoughts.push(forced)
        ids.append(token_id)
        thoughts.push(token_id)
    return markers.shown.decode(ids), thoughts.num_tokens, thoughts.is_over


@pytest.mark.parametrize("budget", range(9))
def test_thoughts_end_after_exactly_their_budget(tokenizer: Tokenizer, budget: int) -> None:
    """A token of this tokenizer is a byte."""
    thought = "abcdefgh" + "x" * 20
    for opening, is_open in (("<think>", False), (" \n<think>", False), ("", True)):
        expected = f"{opening}{thought[:budget]}</think>{thought[budget:]}"
        assert followed(tokenizer, opening + thought, budget, is_open=is_open) == (expected, budget, True)


def test_thoughts_that_end_earlier_are_left_alone_and_counted_without_their_markers(tokenizer: Tokenizer) -> None:
    is_token = tokenizer.token_id("</think>") is not None
    for budget in (3 if is_token else 10, 50):  # a marker of several tokens counts until it is whole
        for answer in ("<think>ab</think>so", "\n<think>ab</think>so <think>again, and on", "<think>ab</think>"):
            assert followed(tokenizer, answer, budget) == (answer, 2, True)
        assert followed(tokenizer, "</think>so", budget, is_open=True) == ("</think>so", 0, True)


def test_an_answer_without_thoughts_has_none_to_end(tokenizer: Tokenizer) -> None:
    for answer in ("so", "  \n so <think>a</think>", "<b>so</b>", "</think>so", "<thin>k"):
        assert followed(tokenizer, answer, 1) == (answer, 0, True)
    assert followed(tokenizer, " \n ", 1) == (" \n ", 0, False)


def test_markers_are_known_by_the_template_or_as_tokens(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert Reasoning(tokenizer_with(tmp_path / "template")).has_markers
    assert Reasoning(tokenizer_with(tmp_path / "token", False, plain)).has_markers
    assert not Reasoning(tokenizer_with(tmp_path / "neither", None, plain)).has_markers
    assert Reasoning(tokenizer_with(tmp_path / "other", None, plain + "[/THINK]")).has_markers


def test_thoughts_that_a_prompt_has_begun_go_on_in_the_answer(tokenizer: Tokenizer) -> None:
    """As a final message that is continued has them; a text that only mentions the marker, in an earlier turn, not."""
    markers = Reasoning(tokenizer)
    for prompt, is_open in (
        ("<|im_start|>assistant\n<think>\nLet me see: ", True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>Let <think> me", True),
        ("<|im_start|>assistant\nIt is <think> me", False),
        ("<|im_start|>assistant\n<think>\nLet me see</think> so", False),
        ("<|im_start|>user\nUse <think> here", False),
        ("Use <think> here", False),
        ("<|im_start|>Explain <think> tags", False),  # as where the tokenizer begins a text with a special token
        ("<|im_end|>Use <think> to open", False),  # as where a template writes no header
        ("<|im_end|>\n\n<think>Let me", True),
        ("<|im_start|>user\nUse <think> here.<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nUse <think> here.<|im_end|>\n<|im_start|>assistant\nIt is", False),
    ):
        assert markers.is_open(ids_of(tokenizer, prompt)) is is_open, prompt
