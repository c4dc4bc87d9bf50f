"""Thinking models with ``after``: free text up to a marker, then the grammar; in the engine, and in whole runs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import THINKING
from input_helpers import ids_of, write_tokenizer
from tiny_model import tiny_model
from torch import Tensor

from batchgen.config.job import InputSpec
from batchgen.core.records import Cursor, FinishReason, Request, Result, Row, SamplingParams
from batchgen.core.structured import canonical
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.generation import TextTools
from batchgen.engine.sampler import Sampler
from batchgen.engine.sequence import Sequence
from batchgen.input.requests import RequestBuilder
from batchgen.text.grammar import Grammars
from batchgen.text.stop_strings import StopStrings
from batchgen.text.tokenizer import Tokenizer

VOCAB_SIZE = 640  # more than the tokenizer has
MARKER = "</think>"
ANSWER = r"[a-c]{3}\d{3}"
# Whole in one token, its end and more in one, its end and the wrong thing in one; the last is special.
MERGED = {"k>": 264, "k>a": 265, "k>\n\n": 266, "k>x": 267}
SPECIAL = 269


def write_merged(folder: Path) -> Path:
    """The tokenizer of bytes, with tokens in which the marker ends and something else begins."""
    path = write_tokenizer(folder, chat_template=THINKING) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    pieces = {text.replace("\n", "Ċ"): token_id for text, token_id in MERGED.items()} | {"ĊĊ": 268}
    content["model"]["vocab"] |= pieces
    content["model"]["merges"] += [["k", ">"], ["Ċ", "Ċ"], ["k>", "a"], ["k>", "ĊĊ"], ["k>", "x"]]
    special = {"id": SPECIAL, "content": "<|answer|>", "special": True}
    content["added_tokens"].append(
        {**special, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    )
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_merged(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The tokens that the model begins the answer of each request with, whatever its logits; then it goes on freely."""
    script: dict[int, list[int]] = {}
    sample = Sampler.sample

    def scripted(self: Sampler, logits: Tensor, sequences: list[Sequence], *rest: Any) -> Tensor:
        token_ids = sample(self, logits, sequences, *rest).clone()
        for row, sequence in enumerate(sequences):
            begins = script.get(sequence.request.key, [])
            if sequence.num_output_tokens < len(begins):
                token_ids[row] = begins[sequence.num_output_tokens]
        return token_ids

    monkeypatch.setattr(Sampler, "sample", scripted)
    return script


def engine_of(grammars: Grammars) -> Engine:
    tokenizer = grammars.tokenizer
    return Engine(
        tiny_model(vocab_size=VOCAB_SIZE),
        EngineConfig(kv_cache_memory=4 << 20),
        eos_token_ids=tokenizer.eos_token_ids,
        text=TextTools(partial(StopStrings, tokenizer), grammars),
    )


def answer(grammars: Grammars, *prompt_token_ids: int, after: str = MARKER, **params: Any) -> Result:
    asked = canonical({"regex": ANSWER, "after": after})
    sampling = SamplingParams(**{"max_tokens": 60, "structured_outputs": asked} | params)
    [result] = engine_of(grammars).run([Request(0, prompt_token_ids or (1, 30, 40), sampling)])
    return result


def text_of(grammars: Grammars, result: Result) -> str:
    return grammars.tokenizer.decode(result.first.token_ids)


BYTES = "I think, é.\n</think>"


@pytest.mark.parametrize(
    ("thought", "between"),
    [
        (BYTES, ""),  # several tokens
        ("</thin", MERGED["k>"]),
        ("ab</thin", MERGED["k>\n\n"]),
        ("</think" * 2, ">"),
        (MARKER + MARKER, ""),  # only the first one counts
    ],
)
def test_what_is_written_before_the_marker_is_free_and_what_follows_fits(
    grammars: Grammars, said: dict[int, list[int]], thought: str, between: str | int
) -> None:
    ids = partial(ids_of, grammars.tokenizer)
    said[0] = [token for char in thought for token in ids(char)]
    said[0] += ids(between) if isinstance(between, str) else [between]
    if thought == MARKER + MARKER:
        said[0] = said[0][: len(MARKER)]
    result = answer(grammars)
    assert result.error is None
    assert re.fullmatch(rf"(?s).*?{MARKER}\s*{ANSWER}", text_of(grammars, result))
    assert (result.first.is_complete, result.first.finish_reason) == (True, FinishReason.STOP)
    assert list(result.first.token_ids[: len(said[0])]) == said[0]


def test_a_token_may_end_the_marker_and_begin_the_answer(grammars: Grammars, said: dict[int, list[int]]) -> None:
    said[0] = [*ids_of(grammars.tokenizer, "</thin"), MERGED["k>a"]]
    result = answer(grammars)
    assert re.fullmatch(rf"{MARKER}{ANSWER}", text_of(grammars, result)) and result.first.is_complete


def test_a_token_that_ends_the_marker_and_begins_something_else_fails_the_row(
    grammars: Grammars, said: dict[int, list[int]]
) -> None:
    said[0] = [*ids_of(grammars.tokenizer, "</thin"), MERGED["k>x"]]
    result = answer(grammars)
    assert result.error is not None and result.error.code == "bad_param"
    assert result.error.message == (
        "structured_outputs: the token that ends the marker continues with 'x', which does not fit"
    )


def test_the_marker_may_be_a_special_token(grammars: Grammars, said: dict[int, list[int]]) -> None:
    said[0] = [*ids_of(grammars.tokenizer, "so"), SPECIAL]
    result = answer(grammars, after="<|answer|>")
    assert re.fullmatch(rf"so{ANSWER}", text_of(grammars, result)) and result.first.is_complete


@pytest.mark.parametrize("thought", ["<think>so\n", "</thin"])
def test_without_the_marker_nothing_is_restricted_and_the_row_is_not_complete(
    grammars: Grammars, said: dict[int, list[int]], thought: str
) -> None:
    free = answer(grammars, structured_outputs="", max_tokens=12)
    said[0] = ids_of(grammars.tokenizer, thought)
    result = answer(grammars, max_tokens=12)
    assert (result.first.is_complete, result.first.finish_reason) == (False, FinishReason.LENGTH)
    assert len(result.first.token_ids) == 12 and free.first.is_complete is None
    said[0] = [*said[0][:3], 7]  # the end token
    result = answer(grammars)
    assert (result.first.is_complete, result.first.finish_reason, len(result.first.token_ids)) == (
        False,
        FinishReason.STOP,
        4,
    )


def test_a_stop_string_ends_a_row_before_and_behind_the_marker(grammars: Grammars, said: dict[int, list[int]]) -> None:
    said[0] = ids_of(grammars.tokenizer, "halt! and so on")
    result = answer(grammars, stop=("halt!",))
    assert (result.first.is_complete, result.first.stop, len(result.first.token_ids)) == (False, "halt!", 5)
    said[0] = ids_of(grammars.tokenizer, f"so{MARKER}")
    whole = text_of(grammars, answer(grammars))
    result = answer(grammars, stop=(whole[-2],))
    assert (result.first.is_complete, result.first.finish_reason) == (False, FinishReason.STOP)


@pytest.mark.parametrize("ending", [MARKER, f"{MARKER}\n\n", "x" * 100 + MARKER, f"{MARKER} no"])
@pytest.mark.parametrize("after", [MARKER, f"{'é' * 40}{MARKER}", "<|answer|>", f"{MARKER}\n"])
def test_a_prompt_that_ends_in_the_marker_has_passed_it(grammars: Grammars, ending: str, after: str) -> None:
    prompt = f"<think>\n{ending}".replace(MARKER, after)
    ids = ids_of(grammars.tokenizer, prompt)
    result = answer(grammars, 1, *ids, after=after, max_tokens=20)
    if ending.endswith("no"):
        free = answer(grammars, 1, *ids, structured_outputs="", max_tokens=1)
        assert result.first.token_ids[0] == free.first.token_ids[0]
    else:
        assert re.fullmatch(ANSWER, text_of(grammars, result)) and result.first.is_complete


def test_a_chat_template_that_closes_the_thoughts_itself_begins_with_the_answer(grammars: Grammars) -> None:
    sampling = SamplingParams(max_tokens=20, structured_outputs=canonical({"regex": ANSWER, "after": MARKER}))
    sizes = {"max_model_len": 1000, "vocab_size": VOCAB_SIZE}
    builder = RequestBuilder(InputSpec(), sampling, grammars.tokenizer, grammars=grammars, **sizes)
    rows = [{"prompt": "Hi"}, {"prompt": "Hi", "chat_template_kwargs": {"enable_thinking": False}}]
    built = builder.build([Row(i, "f", i + 1, row, Cursor(0, 0, i, i)) for i, row in enumerate(rows)])
    requests = [request for _, request in built if request]
    opened, closed = sorted(engine_of(grammars).run(requests), key=lambda result: result.key)
    assert not opened.first.is_complete and len(opened.first.token_ids) == 20
    assert re.fullmatch(ANSWER, text_of(grammars, closed)) and closed.first.is_complete
