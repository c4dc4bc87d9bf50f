"""Plain torch over all sequences at once: the reference's numbers and tokens, and how often the host must wait.

The tests of every back end take it too; here is what is its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from families import RAW
from kernel_cases import DTYPES, attend_over, conv_state, make_case, normal, poisoned_cache
from late_device import Again, Operations
from reference_kernels import ReferenceKernels
from repeats import nightly, slow
from tiny_model import (
    CPU,
    engine_for,
    ragged_input,
    random_requests,
    random_state,
    solo,
    state_tensors,
    tiny_model,
    tokens_of,
)
from torch import Tensor

from batchgen.core.records import Request
from batchgen.engine.graphs import CudaGraphs, PaddingSlot
from batchgen.kernels import plain
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.select import select
from batchgen.model import state
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.weights import RandomTensors

REFERENCE = ReferenceKernels()
SHAPES = [(4, 2, 16), (6, 2, 24), (3, 3, 16), (8, 1, 32), (16, 8, 64)]
Pieces = list[tuple[int, int]]


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def random_pieces(rng: random.Random) -> Pieces:
    """Up to six sequences, of prompts, single tokens or both."""
    share = rng.choice((0, 0.7, 1))
    pasts = (rng.choice((0, rng.randrange(700))) for _ in range(rng.randrange(1, 7)))
    return [(past, 1 if rng.random() < share else rng.randrange(1, 300)) for past in pasts]


def compare_attention(rng: random.Random, pieces: Pieces, seed: int, *, is_causal: bool) -> None:
    heads, block_size = rng.choice(SHAPES), rng.choice((1, 3, 16, 32, 64))
    window = rng.choice((0, 0, 1, 5, 100, 400))
    dtype, kv_cache_dtype = rng.choice(DTYPES)
    case = make_case(pieces, heads, dtype, seed, kv_cache_dtype, window, rng.random() < 0.5)
    inputs, num_blocks = ragged_input(pieces, block_size, seed, is_causal=is_causal)
    cache = poisoned_cache(case, inputs, num_blocks, block_size)
    kernels = PlainKernels(may_wait=rng.random() < 0.5)
    got, expected = (torch.cat(attend_over(each, case, inputs, cache)) for each in (kernels, REFERENCE))
    assert error(got, expected) < (2**-7 if dtype == torch.bfloat16 else 1e-5), (seed, pieces, heads, window)


def compare_convolution(rng: random.Random, pieces: Pieces, seed: int, *, is_causal: bool) -> None:
    width, taps = rng.choice((8, 64, 100)), rng.choice((2, 3, 4, 5) if is_causal else (3, 5))
    dtype, block_size = rng.choice((torch.float32, torch.bfloat16)), rng.choice((1, 3, 16, 64))
    inputs, num_blocks = ragged_input(pieces, block_size, seed, is_causal=is_causal)
    bcx = normal(inputs.num_tokens, 3 * width, seed=seed, dtype=dtype)
    weight, bias = normal(taps, width, seed=seed + 1), normal(width, seed=seed + 2)
    slots = normal(len(pieces), taps - 1, width, seed=seed + 3, dtype=dtype)
    found = []
    for kernels in (PlainKernels(may_wait=rng.random() < 0.5), REFERENCE):
        conv = conv_state(slots.clone(), num_blocks, block_size)
        found.append((kernels.short_conv(bcx, weight, bias, conv, inputs), conv))
    (got, own), (expected, wanted) = found
    assert torch.equal(own.slots, wanted.slots), (seed, pieces)
    torch.testing.assert_close(own.blocks, wanted.blocks, rtol=0, atol=0, equal_nan=True)
    assert error(got, expected) < (2**-6 if dtype == torch.bfloat16 else 1e-5), (seed, pieces, taps)


@pytest.mark.parametrize("seeds", [range(12), slow(range(12, 162)), nightly(range(162, 1000))], ids=str)
def test_a_random_ragged_batch_gives_the_numbers_of_the_reference(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        pieces = random_pieces(rng)
        whole = [(0, count) for _, count in pieces]  # of texts whose tokens see all of it
        for compare in (compare_attention, compare_convolution):
            compare(rng, pieces, seed, is_causal=True)
            compare(rng, whole, seed, is_causal=False)


@cache
def requests_and_tokens(family: str) -> tuple[list[Request], Mapping[Any, Any]]:
    """Requests, greedy and drawn, and the reference's tokens for each by itself."""
    requests = random_requests(24, seed=5, prompt=(1, 60), output=(1, 30))
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    requests += [replace(r, key=100 + r.key, params=replace(r.params, **drawn)) for r in requests[:6]]
    return requests, solo(tiny_model(kernels=ReferenceKernels(), model_type=family), requests)


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("family", RAW)
def test_an_engine_of_every_family_gives_the_tokens_of_the_reference(family: str, may_wait: bool) -> None:
    requests, expected = requests_and_tokens(family)
    model = tiny_model(kernels=PlainKernels(may_wait=may_wait), model_type=family)
    engine = engine_for(model, num_blocks=12, block_size=16, max_num_seqs=9, max_num_batched_tokens=37)
    assert tokens_of(engine.run(requests)) == expected
    assert engine.stats.max_running > 2


def test_rows_beyond_the_memory_of_one_product_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(pieces := [(40, 1)] * 5 + [(3, 20)] * 3, (4, 2, 16), torch.float32, 0, None, 0, is_gated=True)
    inputs, num_blocks = ragged_input(pieces, 16)
    cache = poisoned_cache(case, inputs, num_blocks, 16)
    expected = attend_over(REFERENCE, case, inputs, cache)
    for most in (1, 5000):
        monkeypatch.setitem(plain._MAX_NUMBERS, "cpu", most)
        torch.testing.assert_close(attend_over(PlainKernels(), case, inputs, cache), expected)


class Launches(Operations):
    """Counts those for which the host would wait, too."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        chosen = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_wait = any(i is not None and i.dtype is torch.bool for i in chosen)
        self.waits[name] += is_wait or name in ("_local_scalar_dense", "nonzero")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often positions were fetched from the device, which on the CPU is no operation."""
    counts: Counter[str] = Counter()
    fetch = plain._on_host

    def counted(*tensors: Tensor) -> list[Any]:
        counts["reads"] += 1
        return fetch(*tensors)

    monkeypatch.setattr(plain, "_on_host", counted)
    return counts


@pytest.mark.parametrize(
    ("pieces", "most_launches", "reads"),
    [
        ([(100, 1)], 1400, 0),
        ([(100 + past, 1) for past in range(100)], 1400, 0),
        ([(100 + past, 1) for past in range(100)] + [(0, 60)] * 2, 1900, 1),
    ],
    ids=["one row", "100 rows", "100 rows and 2 prompts"],
)
def test_a_step_is_launched_without_a_wait_whose_number_grows(
    pieces: Pieces, most_launches: int, reads: int, num_reads: Counter[str]
) -> None:
    """16 layers as in LFM2-350M; the reference launches 33,000 operations for 100 rows and waits 1,600 times."""
    attention = {2, 5, 8, 10, 12, 14}
    kinds = ["full_attention" if layer in attention else "conv" for layer in range(16)]
    config = parse_config(
        {**RAW["lfm2"], "num_hidden_layers": 16, "layer_types": kinds, "full_attn_idxs": None}, "tiny"
    )
    model = Decoder(config, RandomTensors(torch.bfloat16, CPU), PlainKernels(may_wait=False))
    inputs, num_blocks = ragged_input(pieces, 64)
    sizes = {"num_blocks": num_blocks, "block_size": 64, "num_slots": inputs.num_seqs}
    zeros = state.allocate(config, **sizes, dtype=torch.bfloat16, device=CPU)
    last = int(inputs.positions.max())
    with Launches() as counted:
        model.forward(inputs, zeros, last)
    assert counted.found.total() < most_launches
    assert (+counted.waits, num_reads["reads"]) == (Counter(), reads)


def test_a_recorded_step_equals_a_launched_one() -> None:
    model = tiny_model(kernels=PlainKernels(may_wait=False))
    recorded, launched = (random_state(model, num_blocks=60, block_size=4, num_slots=5) for _ in range(2))
    graphs = CudaGraphs(model, recorded, Again(), PaddingSlot(60, 5, 4), max_model_len=200)
    for seed, pasts in enumerate([(3, 0, 20), (7, 30, 11, 2, 40), (8, 31, 12, 3, 41)]):
        inputs, _ = ragged_input([(past, 1) for past in pasts], 4, seed)
        expected = model.forward(inputs, launched, max(pasts))
        torch.testing.assert_close(graphs.run(inputs).logits, expected)
        for got, wanted in zip(state_tensors(recorded), state_tensors(launched), strict=True):
            torch.testing.assert_close(got[:5], wanted[:5], rtol=1e-4, atol=1e-4)


def test_the_fast_back_end_is_chosen_where_it_runs() -> None:
    assert isinstance(select(CPU, torch.bfloat16), CpuKernels)
    assert isinstance(select(CPU, torch.float32), CpuKernels)
    assert isinstance(select(torch.device("meta"), torch.bfloat16), PlainKernels)
