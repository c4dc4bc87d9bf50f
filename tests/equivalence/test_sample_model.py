"""The trained sample model answers as well whatever is switched on or off, alone and together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from repeats import slow

from batchgen.config.job import InputSpec
from batchgen.core.records import Cursor, Request, Result, Row, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.generation import TextTools
from batchgen.input.requests import RequestBuilder
from batchgen.kernels.processor import multiplies_bfloat16
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model
from batchgen.text.stop_strings import StopStrings, cut_text
from batchgen.text.tokenizer import Tokenizer

SAMPLE_DATA = Path(__file__).resolve().parents[2] / "sample_data"
MODEL = SAMPLE_DATA / "tiny-lfm2"
START = Cursor(0, 0, 0, 0)
POLICIES = ("prefix_caching", "share_duplicates", "longest_first", "forecast_memory")


@cache
def model(dtype: str = "auto", quantization: str = "none") -> Decoder:
    return load_model(str(MODEL), dtype=dtype, quantization=quantization)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@cache
def rows() -> tuple[dict[str, Any], ...]:
    lines = (SAMPLE_DATA / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines[:100])


def answers(params: SamplingParams, form: Decoder | None = None, **settings: Any) -> list[Result]:
    """A result per row of the sample questions, by the model or another form of it."""
    torch.set_num_threads(1)
    spec = InputSpec(path=("questions.jsonl",), prompt="{question}")
    builder = RequestBuilder(spec, params, tokenizer(), max_model_len=512, vocab_size=model().config.vocab_size)
    built = builder.build([Row(i, "questions.jsonl", i + 1, row, START) for i, row in enumerate(rows())])
    requests = [request for _, request in built if request]
    assert len(requests) == len(rows())
    config = EngineConfig(kv_cache_memory=16 << 20, max_num_seqs=64, **settings)
    engine = Engine(
        form or model(),
        config,
        eos_token_ids=tokenizer().eos_token_ids,
        text=TextTools(partial(StopStrings, tokenizer())),
    )
    results = {result.key: result for result in engine.run(r for r in requests if isinstance(r, Request))}
    return [results[i] for i in range(len(rows()))]


@cache
def plain() -> tuple[str, ...]:
    """The answers with every policy off and one row after the other."""
    off = dict.fromkeys(POLICIES, False)
    return tuple(text(result) for result in answers(SamplingParams(max_tokens=64), **off))


def text(result: Result) -> str:
    assert result.error is None
    return tokenizer().decode(result.first.token_ids)


def accuracy(texts: tuple[str, ...] | list[str]) -> float:
    return sum(row["answer"] == found for row, found in zip(rows(), texts, strict=True)) / len(rows())


def test_the_sample_model_knows_its_answers() -> None:
    assert accuracy(plain()) >= 0.95


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_integers_answer_as_well(dtype: str) -> None:
    """Any change of the last bits flips some near ties, in bfloat16 more than in float32."""
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("products of bfloat16 are slow here")
    greedy = SamplingParams(max_tokens=64)
    as_stored = [text(result) for result in answers(greedy, model(dtype))]
    for quantization in ("w8a16", "w8a8"):
        found = [text(result) for result in answers(greedy, model(dtype, quantization))]
        assert accuracy(found) >= accuracy(as_stored) - 2 / 100
        assert sum(map(str.__ne__, found, as_stored)) <= 5


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("auto", "int8"), slow("float32", "int8"), slow("float32", "bfloat16")]
)
def test_keys_and_values_of_fewer_bits_answer_as_well(dtype: str, kv_cache_dtype: str) -> None:
    found = [
        text(result) for result in answers(SamplingParams(max_tokens=64), model(dtype), kv_cache_dtype=kv_cache_dtype)
    ]
    assert accuracy(found) >= accuracy(plain()) - 2 / 100
    assert sum(map(str.__ne__, found, plain())) <= 5


@pytest.mark.parametrize("policy", [*map(slow, POLICIES), "all"])
def test_policies_change_no_answer(policy: str) -> None:
    on = {name: policy in (name, "all") for name in POLICIES}
    assert tuple(map(text, answers(SamplingParams(max_tokens=64), **on))) == plain()


def first_of_three(result: Result) -> str:
    assert len({sample.token_ids for sample in result.samples}) == 1
    assert len(result.samples) == 3
    return text(result)


FEATURES: dict[str, tuple[dict[str, Any], Callable[[Result], str]]] = {
    "samples": ({"n": 3}, first_of_three),
    "log-probabilities": ({"logprobs": 3, "prompt_logprobs": 0}, text),
    "a stop string that never comes": ({"stop": ("\u2603",)}, text),
    "loops": ({"max_repeats": 8}, text),
    "penalties of nothing": ({"repetition_penalty": 1.0 + 1e-7}, text),
    "together": ({"n": 3, "logprobs": 1, "stop": ("\u2603",), "max_repeats": 8, "seed": 9}, first_of_three),
}


@pytest.mark.parametrize("feature", [name if name == "together" else slow(name) for name in FEATURES])
def test_features_change_no_answer(feature: str) -> None:
    params, read = FEATURES[feature]
    found = answers(replace(SamplingParams(max_tokens=64), **params))
    assert tuple(map(read, found)) == plain()


def test_a_stop_string_ends_an_answer_where_its_text_has_it() -> None:
    stop = (" ",)
    found = answers(SamplingParams(max_tokens=64, stop=stop))
    for result, whole in zip(found, plain(), strict=True):
        expected = whole.split(" ", 1)[0] if " " in whole else whole
        got = (
            cut_text(tokenizer().decode, result.first.token_ids, result.first.stop)
            if result.first.stop
            else text(result)
        )
        assert got == expected


def test_the_right_answer_is_the_likeliest_label() -> None:
    """Each row's own answer against those of other rows, as a labelling job would ask."""
    spec = InputSpec(path=("questions.jsonl",), prompt="{question}")
    sizes = {"max_model_len": 512, "vocab_size": 65536}
    builder = RequestBuilder(spec, SamplingParams(labels=("a", "b")), tokenizer(), **sizes)
    some = rows()[:60]
    asked = [
        {"question": row["question"], "sampling": {"labels": [other["answer"], row["answer"]]}}
        for row, other in zip(some, some[7:] + some[:7], strict=True)
        if other["answer"] != row["answer"]
    ]
    records = [Row(i, "", i + 1, row, START) for i, row in enumerate(asked)]
    requests = [request for _, request in builder.build(records) if request]
    assert len(requests) == len(records) > 40
    engine = Engine(model(), EngineConfig(kv_cache_memory=16 << 20))
    right = [
        tokenizer().decode(result.first.token_ids) == some[result.key]["answer"] for result in engine.run(requests)
    ]
    assert sum(right) / len(right) > 0.95
