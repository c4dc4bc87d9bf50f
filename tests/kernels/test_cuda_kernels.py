"""The CUDA kernels against the reference: right at odd shapes, contained, and independent of what shares the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_cases import (
    INTERPRETED,
    JUST_BELOW_ONE,
    Case,
    attend,
    conv_state,
    dense,
    draw,
    empty_cache,
    filtered,
    is_settled,
    logits_of,
    make_case,
    normal,
    rotary_table,
)
from tiny_model import ragged_input, random_requests, solo, tiny_model, tokens_of
from torch import Tensor
from torch.nn import functional
from triton_device import HAS_GPU, OnDevice

from batchgen.core.records import SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.kernels.cuda import attention as attention_kernels
from batchgen.kernels.interface import Heads, SamplingRows
from batchgen.kernels.quantize import quantize
from batchgen.kernels.reference import ReferenceKernels
from batchgen.kernels.select import select

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = INTERPRETED


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A few last places of results near one."""
    return {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 2e-6}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 1030])
def test_rms_norm_and_swiglu_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    x, weight = normal(3, width, seed=0, dtype=dtype), 1 + normal(width, seed=1, dtype=dtype)
    for scale in (1e-4, 1.0, 1e4):
        for residual in (None, normal(3, width, seed=3, dtype=dtype)):
            expected = REFERENCE.rms_norm(scale * x, weight, 1e-5, residual)
            got = OnDevice().rms_norm(scale * x, weight, 1e-5, residual)
            torch.testing.assert_close(got, expected, **tolerance(dtype))
    gate_up = 8 * normal(3, 2 * width, seed=2, dtype=dtype)
    torch.testing.assert_close(OnDevice().swiglu(gate_up), REFERENCE.swiglu(gate_up), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 100, 8192, 20_000])
def test_argmax_and_logsumexp_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    logits = 3 * normal(9, width, seed=width, dtype=dtype)
    logits[1] = torch.nan
    logits[2, width // 2] = torch.nan
    logits[3, width // 3] = torch.inf
    logits[4] = -torch.inf
    logits[5] = 2.0
    logits[6, : width // 2] = -torch.inf
    logits[7, [width // 4, width - 1]] = 50.0
    assert torch.equal(OnDevice().argmax(logits), REFERENCE.argmax(logits))
    usable = [0, 5, 6, 7, 8]
    sums = OnDevice().logsumexp(logits)
    torch.testing.assert_close(sums[usable], REFERENCE.logsumexp(logits)[usable], rtol=1e-6, atol=1e-6)
    assert not sums[[1, 2, 3, 4]].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((3, 3, 16), 16), ((5, 1, 8), 3), ((4, 2, 24), 24), ((4, 2, 12), 1), ((2, 2, 64), 32)],
    ids=str,
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["normed", "plain"])
def test_rope_and_cache_equals_the_reference(
    is_plain: bool, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    inputs, num_blocks = ragged_input([(0, 1), (300, 1), (0, 5), (31, 3)], block_size)
    gates = num_heads if is_plain else 0  # columns behind the values, which are not read
    qkv = normal(inputs.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + gates, seed=1, dtype=dtype)
    weights = [None if is_plain else 1 + normal(head_dim, seed=s, dtype=dtype) for s in (2, 3)]
    shape = Heads(num_heads, head_dim, weights[0], weights[1], 1e-5)
    results = []
    for kernels in (OnDevice(), REFERENCE):
        cache = empty_cache(inputs, num_blocks, block_size, num_kv_heads, head_dim, dtype)
        q = kernels.rope_and_cache(qkv, shape, rotary_table(400, head_dim), inputs, cache)
        assert q.dtype == torch.float32
        results.append((q, cache.keys, cache.values))
    (q, keys, values), (expected_q, expected_keys, expected_values) = results
    most = 2**-7 if dtype == torch.bfloat16 else 1e-6
    assert relative_error(q, expected_q) < most
    assert not q[..., head_dim:].any(), "what pads a head is zero"
    written = expected_keys != 77.0
    assert torch.equal(keys != 77.0, written), "only the tokens' own slots are written"
    assert relative_error(keys[written], expected_keys[written]) < most
    assert torch.equal(values, expected_values), "values are copied as they are"


# Single tokens and chunks; in the first span of a context, across its end, and on a later one.
PIECES = [(0, 1), (0, 7), (5, 1), (40, 1), (127, 1), (128, 1), (60, 9), (130, 3), (0, 70)]
HEADS = [(3, 3, 16), (6, 2, 24), (12, 1, 16)]


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 64 positions, so that contexts the interpreter can cope with have several."""
    monkeypatch.setattr(attention_kernels, "SPAN", 64)


def assert_attends(case: Case, block_size: int) -> None:
    is_bfloat16 = case.keys[0].dtype == torch.bfloat16
    close = {"rtol": 2**-6, "atol": 2**-6} if is_bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for got, expected in zip(attend(OnDevice(), case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, **close)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "block_size"), list(zip(HEADS, [16, 3, 32], strict=True)), ids=str)
def test_paged_attention_equals_dense_attention(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    assert_attends(make_case(PIECES, heads, dtype, seed=block_size), block_size)


def test_attention_equals_dense_attention_over_full_spans() -> None:
    assert_attends(make_case([(511, 1), (512, 1), (500, 20)], (4, 2, 64), torch.bfloat16, seed=0), 32)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_has_the_same_bits_whatever_shares_the_batch(dtype: torch.dtype) -> None:
    case = make_case([(100, 1), (20, 5), (63, 1), (64, 2)], (4, 2, 16), dtype, 2)
    together = attend(OnDevice(), case, 16)
    assert all(map(torch.equal, attend(OnDevice(), case, 32, seed=1), together)), "other blocks, other block size"
    for row, expected in enumerate(together):
        assert torch.equal(attend(OnDevice(), case.only(row), 16)[0], expected)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_invariant_attention_has_the_same_bits_however_a_prompt_is_cut(dtype: torch.dtype) -> None:
    whole = make_case([(0, 80)], (4, 2, 16), dtype, 3)
    expected = attend(OnDevice(batch_invariant=True), whole, 16)[0]
    got, past = [], 0
    for count in (63, 1, 1, 10, 1, 4):
        got += attend(OnDevice(batch_invariant=True), whole.chunk(past, count), 16)
        past += count
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "heads", "block_size"), [(3, (6, 2, 24), 3), (100, (4, 1, 16), 32)], ids=str)
def test_attention_over_a_window_with_gates_equals_dense_attention(
    window: int, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    pieces = [(0, 1), (0, 7), (127, 1), (128, 1), (200, 1), (125, 9)]
    assert_attends(make_case(pieces, heads, dtype, window, window=window, is_gated=True), block_size)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [3, 50])
def test_attention_over_a_window_has_the_same_bits_however_a_prompt_is_cut(window: int, dtype: torch.dtype) -> None:
    whole = make_case([(0, 140)], (2, 1, 16), dtype, 3, window=window, is_gated=True)
    expected = attend(OnDevice(batch_invariant=True), whole, 16)[0]
    starts = [0, 63, 64, 65, 128, 129, 136, 140]
    cuts = [whole.chunk(start, end - start) for start, end in pairwise(starts)]
    assert torch.equal(torch.cat([attend(OnDevice(batch_invariant=True), cut, 32)[0] for cut in cuts]), expected)


CONV_PIECES = {
    "one token each": [(0, 1), (1, 1), (15, 1), (40, 1)],
    "chunks": [(0, 1), (0, 2), (0, 40), (1, 1), (2, 17), (15, 1), (31, 20)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pieces", CONV_PIECES)
@pytest.mark.parametrize(("width", "taps"), [(16, 3), (300, 3), (7, 7)])
def test_short_conv_equals_the_reference(width: int, taps: int, pieces: str, dtype: torch.dtype) -> None:
    weight, bias = normal(taps, width, seed=1), normal(width, seed=2)
    inputs, num_blocks = ragged_input(CONV_PIECES[pieces], 16)
    bcx = normal(inputs.num_tokens, 3 * width, seed=3, dtype=dtype)
    results = []
    for kernels in (OnDevice(), REFERENCE):
        slots = normal(inputs.num_seqs + 2, taps - 1, width, seed=4, dtype=dtype)
        slots[[i for i, (past, _) in enumerate(CONV_PIECES[pieces]) if not past]] = torch.nan  # an earlier sequence's
        state = conv_state(slots, num_blocks, 16)
        results.append((kernels.short_conv(bcx, weight, bias, state, inputs), state.slots, state.blocks))
    (out, slots, blocks), (expected, expected_slots, expected_blocks) = results
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert torch.equal(slots, expected_slots), "the last inputs are kept as they are, and only for these sequences"
    torch.testing.assert_close(blocks, expected_blocks, rtol=0, atol=0, equal_nan=True)


FILTERS = [
    {},
    {"temperature": 0.3, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.8},
    {"min_p": 0.05, "top_k": 12, "top_p": 0.9},
    {"top_p": 1e-9},
    {"temperature": 3e38},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_filtered_probabilities(params: dict[str, float]) -> None:
    logits = logits_of(17, seed=3)
    full = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0, **params}
    expected = filtered(logits, **full)
    cumulative = expected.cumsum(0)
    allowed = expected.nonzero().flatten().tolist()
    middles = (cumulative - expected / 2)[allowed].tolist()
    assert draw("cuda", logits, middles, **params) == allowed
    assert set(draw("cuda", logits, [0.0, JUST_BELOW_ONE], **params)) <= set(allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_equals_the_reference_over_several_blocks_of_a_row(dtype: torch.dtype) -> None:
    n, width = 6, 9000
    logits = 3 * normal(n, width, seed=0, dtype=dtype)
    rows = SamplingRows(
        temperature=torch.tensor([0.3, 1.0, 1.0, 2.0, 1.0, 0.7]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.01, 0.001]),
        top_k=torch.tensor([0, 40, 0, 5000, 0, 100]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0, 0.95], dtype=torch.float64),
        uniform=torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.999], dtype=torch.float64),
    )
    settled = is_settled(logits, rows)
    assert settled.sum() >= n - 1
    assert torch.equal(OnDevice().sample(logits, rows)[settled], REFERENCE.sample(logits, rows)[settled])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_equals_torch(dtype: torch.dtype, batch_invariant: bool) -> None:
    x, weight = normal(70, 100, seed=0, dtype=dtype), normal(130, 100, seed=1, dtype=dtype)
    bias, residual = normal(130, seed=2, dtype=dtype), normal(70, 130, seed=3, dtype=dtype)
    for b in (None, bias):
        linear = OnDevice(batch_invariant=batch_invariant).linear(weight, b)
        expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
        most = 2**-7 if dtype == torch.bfloat16 else 1e-6
        assert relative_error(linear(x), expected) < most
        assert relative_error(linear(x, residual), expected + residual) < most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_invariant_linear_has_the_same_bits_for_a_row_in_any_batch(dtype: torch.dtype) -> None:
    linear = OnDevice(batch_invariant=True).linear(normal(70, 100, seed=1, dtype=dtype))
    x = normal(130, 100, seed=0, dtype=dtype)
    whole = linear(x)
    for rows in (slice(0, 1), slice(5, 9), slice(60, 129)):
        assert torch.equal(linear(x[rows]), whole[rows])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_in_8_bits_are_multiplied_as_the_numbers_that_they_stand_for(
    dtype: torch.dtype, batch_invariant: bool
) -> None:
    weight, x = normal(33, 80, seed=1, dtype=dtype), normal(5, 80, seed=0, dtype=dtype)
    numbers = quantize(weight).dequantize(dtype)
    expected = OnDevice(batch_invariant=batch_invariant).linear(numbers)(x)
    assert torch.equal(OnDevice(batch_invariant=batch_invariant, weights="int8").linear(weight)(x), expected)
    assert not torch.equal(numbers, weight)


def test_a_cuda_device_gets_these_kernels_and_the_reference_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = torch.device("cuda", 3)
    assert select(device, torch.bfloat16).name == "cuda"
    assert current == [device], "Triton launches on the current device"
    monkeypatch.setattr("batchgen.kernels.select.find_spec", lambda _: None)
    assert select(device, torch.bfloat16).name == "reference"


@pytest.mark.skipif(HAS_GPU, reason="this is for a model whose weights are on the CPU; test_cuda_device has the other")
@pytest.mark.parametrize(
    "shape",
    [
        {"num_hidden_layers": 2, "full_attn_idxs": [1]},
        pytest.param({"model_type": "lfm3", "sliding_window": 6}, marks=pytest.mark.slow),
    ],
    ids=["lfm2", "lfm3"],
)
def test_a_model_generates_what_the_reference_generates(shape: dict[str, Any]) -> None:
    greedy = random_requests(3, seed=1, prompt=(1, 20), output=(2, 4))
    drawn = random_requests(2, seed=2, prompt=(3, 9), output=(3, 3), params=SamplingParams(temperature=0.8, top_k=20))
    requests = [*greedy, *(replace(r, key=10 + r.key) for r in drawn)]
    model = tiny_model(kernels=OnDevice().kernels, **shape)
    engine = Engine(model, EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, block_size=8, kv_memory=1 << 20))
    reference = tiny_model(kernels=REFERENCE, **shape)
    assert tokens_of(engine.run(requests)) == solo(reference, requests)
