"""The tokens of a row do not depend on what shared its batch, on chunks, blocks, preemption, order or threads.

Held against every request run by itself with its prompt in one piece; float32 and bfloat16, greedy and sampled; on
a tiny random LFM2 and on the trained sample model, with weights as they are and as integers. The budgets are so tight
that chunks are cut and sequences are preempted, and each test asserts that they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EOS, RAW
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import slow
from tiny_model import (
    CPU,
    DTYPES,
    checked_run,
    engine_for,
    prefix_logits,
    random_requests,
    solo,
    tiny_model,
    tokens_of,
)
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine
from batchgen.engine.schedule import Schedule
from batchgen.kernels.reference import ReferenceKernels
from batchgen.kernels.select import select
from batchgen.model.decoder import Decoder
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint

TRAINED = Path(__file__).resolve().parents[2] / "sample_data" / "tiny-lfm2"
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=17),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=5),
}
SHAPES: dict[str, dict[str, Any]] = {
    "even": {},
    "odd": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "conv_L_cache": 4,
        "conv_bias": True,
        "full_attn_idxs": [1],  # two convolutions follow it
    },
}
FAMILIES = [family for family in RAW if family != "lfm2"]
SHAPES |= {family: {"model_type": family} for family in FAMILIES}
INTEGERS = {
    "": {},
    "int8": {"weights": "int8"},
    "int8 by int8": {"weights": "int8", "activations": "int8"},
}
NUM_REQUESTS = 18


@cache
def model_of(name: str, dtype: str) -> Decoder:
    """A random model of one of ``SHAPES``, or the trained sample model; a second word is one of ``INTEGERS``."""
    shape, _, integers = name.partition(" ")
    kernels = select(CPU, DTYPES[dtype], **INTEGERS[integers])
    if shape != "trained":
        return tiny_model(DTYPES[dtype], kernels, **SHAPES[shape])
    with torch.inference_mode():
        source = Checkpoint(TRAINED, DTYPES[dtype], CPU)
        return Decoder(read_config(TRAINED), source, kernels)


@cache
def requests_of(params: str) -> tuple[Request, ...]:
    """Requests of mixed lengths; the same in every test, so that they are run alone only once."""
    return tuple(random_requests(NUM_REQUESTS, seed=23, prompt=(1, 50), output=(1, 24), params=PARAMS[params]))


@cache
def expected(name: str, dtype: str, params: str) -> dict[int, tuple[int, ...]]:
    return solo(model_of(name, dtype), requests_of(params))


def batched(engine: Engine, requests: Iterable[Request]) -> dict[int, tuple[int, ...]]:
    return tokens_of(checked_run(engine, requests))


class Watched:
    """An engine that notes how many schedules cut a debt short."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_cut = 0
        plain = engine.scheduler.schedule

        def schedule() -> Schedule:
            made = plain()
            self.num_cut += sum(count < sequence.num_owed for sequence, count in made.entries)
            return made

        engine.scheduler.schedule = schedule  # type: ignore[method-assign]


EVERY_MODEL = [*SHAPES, "trained", *(f"odd {integers}" for integers in INTEGERS if integers)]
every_model = pytest.mark.parametrize("name", EVERY_MODEL)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_params = pytest.mark.parametrize("params", PARAMS)


@every_model
@every_dtype
@pytest.mark.parametrize("params", list(PARAMS), ids=str)
def test_batched_equals_solo(name: str, dtype: str, params: str) -> None:
    engine = engine_for(
        model_of(name, dtype), num_blocks=400, block_size=16, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=1000
    )
    assert batched(engine, requests_of(params)) == expected(name, dtype, params)
    assert engine.stats.max_running == NUM_REQUESTS
    assert engine.stats.num_preemptions == 0


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *(("even", budget) for budget in (1, 2, 5, 16, 17, 100)),
        *((name, 17) for name in FAMILIES),
        *(slow(name, 2) for name in FAMILIES),
    ],
    ids=str,
)
@pytest.mark.parametrize(("params", "dtype"), list(product(["greedy", "filtered"], DTYPES)), ids=str)
def test_chunked_equals_whole(name: str, budget: int, params: str, dtype: str) -> None:
    watched = Watched(
        engine_for(model_of(name, dtype), num_blocks=400, block_size=16, max_num_batched_tokens=budget, max_num_seqs=7)
    )
    # Half of them where a step has room for one or two tokens: steps are what takes time.
    asked = requests_of(params)[: NUM_REQUESTS // 2 if budget <= 2 else None]
    tokens = expected(name, dtype, params)
    assert batched(watched.engine, asked) == {request.key: tokens[request.key] for request in asked}
    assert watched.num_cut > (10 if budget < 100 else 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 24, 31, 32, 100], ids=str)
@pytest.mark.parametrize(("params", "dtype"), list(product(["greedy", "sampled"], DTYPES)), ids=str)
def test_any_block_size_gives_the_same(block_size: int, params: str, dtype: str) -> None:
    engine = engine_for(
        model_of("odd", dtype),
        num_blocks=8 * -(-74 // block_size),
        block_size=block_size,
        max_num_batched_tokens=48,
        max_num_seqs=8,
    )
    assert batched(engine, requests_of(params)) == expected("odd", dtype, params)


@every_model
@every_dtype
@pytest.mark.parametrize(
    ("params", "block_size", "num_blocks"),
    [(params, *pool) for params in ("greedy", "filtered") for pool in ((1, 80), (3, 28), (5, 17))],
    ids=str,
)
def test_preempted_equals_undisturbed(name: str, dtype: str, params: str, block_size: int, num_blocks: int) -> None:
    watched = Watched(
        engine_for(
            model_of(name, dtype),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=20,
            max_num_seqs=12,
        )
    )
    assert batched(watched.engine, requests_of(params)) == expected(name, dtype, params)
    assert watched.engine.stats.num_preemptions > 0
    assert watched.num_cut > 0


@pytest.mark.parametrize("seed", range(4))
@every_dtype
def test_any_order_of_arrival_gives_the_same(seed: int, dtype: str) -> None:
    requests = list(requests_of("sampled"))
    random.Random(seed).shuffle(requests)
    engine = engine_for(
        model_of("even", dtype),
        num_blocks=40,
        block_size=5,
        max_num_batched_tokens=13,
        max_num_seqs=6,
        look_ahead=1 + seed,
    )
    assert batched(engine, requests) == expected("even", dtype, "sampled")


@pytest.mark.parametrize(
    ("name", "params"), [("odd", "filtered"), ("trained", "greedy"), *((name, "greedy") for name in FAMILIES)]
)
@every_dtype
def test_two_threads_give_the_same_as_one(name: str, dtype: str, params: str) -> None:
    reference = expected(name, dtype, params)  # on one thread
    torch.set_num_threads(2)
    engine = engine_for(model_of(name, dtype), num_blocks=60, block_size=4, max_num_batched_tokens=30, max_num_seqs=6)
    assert batched(engine, requests_of(params)) == reference


@every_dtype
def test_a_copy_of_a_request_under_another_key_draws_other_tokens(dtype: str) -> None:
    """Randomness is keyed by the row: equal prompts must not give equal samples."""
    one = requests_of("sampled")[0]
    copies = [replace(one, key=key, params=replace(one.params, max_tokens=20, ignore_eos=True)) for key in range(6)]
    engine = engine_for(model_of("even", dtype), num_blocks=100, block_size=16)
    assert len(set(batched(engine, copies).values())) == 6


def logits_of_every_token(engine: Engine, requests: Iterable[Request]) -> dict[tuple[int, int], Tensor]:
    """The logits behind every generated token, by request key and position."""
    seen: dict[tuple[int, int], Tensor] = {}
    plain = engine.sampler.sample

    def sample(logits: Tensor, sequences: list[Any], *args: Any) -> Tensor:
        for row, sequence in zip(logits, sequences, strict=True):
            seen[sequence.request.key, sequence.num_output_tokens] = row.clone()
        return plain(logits, sequences, *args)

    engine.sampler.sample = sample  # type: ignore[method-assign]
    tokens_of(checked_run(engine, requests))
    return seen


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        *(
            ("even", 1),
            ("odd", 2),
            ("odd int8", 2),
            ("trained", 1),
            ("trained int8", 1),
            ("trained int8 by int8", 2),
        ),
        *((name, 2) for name in FAMILIES),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_logits_are_the_same_bit_for_bit(name: str, dtype: str, threads: int) -> None:
    """Chunked, preempted, in blocks of 3 and on two threads, against whole prefixes alone."""
    model = model_of(name, dtype)
    torch.set_num_threads(threads)
    engine = engine_for(model, num_blocks=28, block_size=3, max_num_batched_tokens=20, max_num_seqs=12)
    seen = logits_of_every_token(engine, requests_of("greedy"))
    assert engine.stats.num_preemptions > 0
    torch.set_num_threads(1)
    tokens = expected(name, dtype, "greedy")
    for request in requests_of("greedy"):
        whole = [*request.prompt_token_ids, *tokens[request.key]][:-1]
        rows = prefix_logits(model, whole)[len(request.prompt_token_ids) - 1 :]
        for position, row in enumerate(rows):
            assert torch.equal(seen[request.key, position], row), (request.key, position)


@pytest.mark.parametrize("name", ["even", *FAMILIES], ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_contexts_beyond_one_attention_tile_stay_the_same(name: str, dtype: str) -> None:
    """Contexts of 240 to 560 tokens cross the CPU kernel's tile of 256 once or twice, some while decoding."""
    model = model_of(name, dtype)
    requests = random_requests(8, seed=4, prompt=(240, 500), output=(20, 60))
    engine = engine_for(model, num_blocks=380, block_size=2, max_num_batched_tokens=50, max_num_seqs=5)
    assert batched(engine, requests) == solo(model, requests)
    assert engine.stats.num_preemptions > 0


@every_params
def test_the_reference_kernels_batch_as_they_run_alone_in_float32(params: str) -> None:
    """Plain torch promises no equal bits, but on a tiny model its tokens must not change either."""
    model = tiny_model(kernels=ReferenceKernels())
    requests = requests_of(params)[:8]
    engine = engine_for(model, num_blocks=28, block_size=3, max_num_batched_tokens=20, max_num_seqs=6)
    assert (
        batched(engine, requests)
        == solo(model, requests)
        == {k: expected("even", "float32", params)[k] for k in range(8)}
    )


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, int]:
    """Sizes of any kind; the pool holds the longest request (73 tokens of state) and often little more."""
    block_size = draw(st.integers(1, 40))
    least = -(-73 // block_size)
    return {
        "block_size": block_size,
        "num_blocks": least + draw(st.integers(0, 2 * least)),
        "max_num_batched_tokens": draw(st.integers(1, 120)),
        "max_num_seqs": draw(st.integers(1, NUM_REQUESTS)),
        "look_ahead": draw(st.integers(1, NUM_REQUESTS)),
    }


def check_knobs(name: str, dtype: str, params: str, sizes: dict[str, int], order: list[int], threads: int) -> None:
    torch.set_num_threads(threads)
    requests = [requests_of(params)[i] for i in order]
    tokens = batched(engine_for(model_of(name, dtype), **sizes), requests)
    torch.set_num_threads(1)
    assert tokens == {key: expected(name, dtype, params)[key] for key in order}


ORDERS = st.lists(st.integers(0, NUM_REQUESTS - 1), unique=True, min_size=1)


@settings(max_examples=16)  # more of them, and other models, in the slow test below
@given(dtype=st.sampled_from(list(DTYPES)), params=st.sampled_from(list(PARAMS)), sizes=knobs(), order=ORDERS)
def test_no_setting_changes_a_token(dtype: str, params: str, sizes: dict[str, int], order: list[int]) -> None:
    check_knobs("odd", dtype, params, sizes, order, 1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([f"{shape} {integers}".strip() for shape in (*SHAPES, "trained") for integers in INTEGERS]),
    dtype=st.sampled_from(list(DTYPES)),
    params=st.sampled_from(list(PARAMS)),
    sizes=knobs(),
    order=ORDERS,
    threads=st.sampled_from([1, 2]),
)
def test_no_setting_changes_a_token_of_any_model(
    name: str, dtype: str, params: str, sizes: dict[str, int], order: list[int], threads: int
) -> None:
    check_knobs(name, dtype, params, sizes, order, threads)


def test_end_tokens_really_end_some_of_these_requests() -> None:
    """Otherwise every sequence would end at max_tokens and the tests above would miss early leavers."""
    for name in SHAPES:
        tokens = (t for params in PARAMS for t in expected(name, "float32", params).values())
        assert any(t[-1] == EOS for t in tokens), name
