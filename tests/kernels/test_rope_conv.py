"""Rotary embedding with the cache write, and the short convolution: right, chunk by chunk the same, and contained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY_BACK_END, EVERY_NAME, INTERPRETED, Shape, conv_state, empty_cache, normal, rotary_table
from reference_kernels import ReferenceKernels, key_columns
from tiny_model import BACK_ENDS, ragged_input
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.inputs import KVCache, ModelInput
from batchgen.kernels.interface import Heads, Kernels
from batchgen.kernels.torch_kernels import to_int8

DTYPES = [torch.float32, torch.bfloat16]
PIECES = [(0, 1), (0, 2), (0, 9), (1, 1), (2, 1), (3, 40), (300, 5), (31, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((3, 3, 16), 16), ((5, 1, 8), 3), ((4, 2, 24), 24), ((2, 2, 64), 256), ((4, 2, 12), 1)],
    ids=str,
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["normed", "plain"])
@pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "reference"])
def test_rope_and_cache_equals_the_reference(
    name: str, is_plain: bool, heads: Shape, block_size: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    inputs, num_blocks = ragged_input(PIECES[2::2] if name == "cuda" else PIECES, block_size)
    gates = num_heads if is_plain else 0  # columns behind the values, which are not read
    qkv = normal(inputs.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + gates, seed=1, dtype=dtype)
    weights = [None if is_plain else 1 + normal(head_dim, seed=s, dtype=dtype) for s in (2, 3)]
    shape = Heads(num_heads, head_dim, weights[0], weights[1], 1e-5)
    results = []
    for kernels in (EVERY_BACK_END[name](), ReferenceKernels()):
        cache = empty_cache(inputs, num_blocks, block_size, num_kv_heads, head_dim, dtype)
        q = kernels.rope_and_cache(qkv, shape, rotary_table(400, head_dim), inputs, cache)
        assert q.dtype == torch.float32
        assert not q[..., head_dim:].any(), "what pads a head is zero"
        results.append((q, cache.keys, cache.values))
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, **tolerance)
        assert torch.equal(fast == 77.0, slow == 77.0), "only the tokens' own slots are written"
    assert torch.equal(results[0][2], results[1][2]), "values are copied as they are"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_and_cache_has_the_same_bits_for_a_token_in_any_batch(dtype: torch.dtype) -> None:
    heads, kv, dim = 4, 2, 24
    shape = Heads(heads, dim, *(1 + normal(dim, seed=s, dtype=dtype) for s in (2, 3)), 1e-5)
    rotary = rotary_table(64, dim)
    qkv = normal(40, (heads + 2 * kv) * dim, seed=1, dtype=dtype)
    whole, _ = ragged_input([(0, 40)], 16, spare_blocks=0)

    def rows(inputs: ModelInput, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        cache = empty_cache(inputs, 3, 16, kv, dim, dtype)
        q = CpuKernels().rope_and_cache(x, shape, rotary, inputs, cache)
        keys = (
            key_columns(cache, inputs.block_tables[0].long()).permute(0, 3, 1, 2).flatten(0, 1)
        )  # [positions, kv, width]
        return q, keys[:positions]

    torch.set_num_threads(1)
    q, keys = rows(whole, qkv, 40)
    torch.set_num_threads(2)
    for past in (0, 1, 17, 39):
        part, _ = ragged_input([(past, 1)], 16, spare_blocks=0)
        got_q, got_keys = rows(part, qkv[past : past + 1], past + 1)
        assert torch.equal(got_q[0], q[past])
        assert torch.equal(got_keys[past], keys[past])


def cached_heads(cache: KVCache, inputs: ModelInput, head_dim: int) -> list[Tensor]:
    """A step's keys and values as the cache has them, [num_tokens, num_kv_heads, head_dim], then scales if any."""
    block, offset = inputs.slot_mapping // cache.block_size, inputs.slot_mapping % cache.block_size
    keys = key_columns(cache, block)[torch.arange(len(block)), :, :head_dim, offset]
    found = [keys, cache.values[block, :, offset, :head_dim]]
    return found if cache.scales is None else [*found, *cache.scales[block, :, :, offset].unbind(2)]


def same_heads(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A qkv whose queries are its keys, so that the queries that come back say what the keys were before rounding."""
    k, v = (normal(num_tokens, heads * head_dim, seed=seed + i).to(dtype) for i in (0, 1))
    return torch.cat((k, k, v), 1)


@settings(max_examples=30)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 256]),  # the root of each is a power of two: queries are keys times that, exactly
    block_size=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    kv_cache_dtype=st.sampled_from([torch.bfloat16, torch.int8]),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_cached_is_what_was_computed_rounded_once(
    pieces: list[tuple[int, int]],
    heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    seed: int,
) -> None:
    inputs, num_blocks = ragged_input(pieces, block_size)
    qkv = same_heads(inputs.num_tokens, heads, head_dim, dtype, seed)
    weight = 1 + normal(head_dim, seed=seed, dtype=dtype)
    for kernels in BACK_ENDS.values():
        cache = empty_cache(inputs, num_blocks, block_size, heads, head_dim, kv_cache_dtype)
        shape = Heads(heads, head_dim, weight, weight, 1e-5)
        q = kernels().rope_and_cache(qkv, shape, rotary_table(64, head_dim), inputs, cache)
        k, v = q[..., :head_dim] * head_dim**0.5, qkv[:, 2 * heads * head_dim :].view(-1, heads, head_dim).float()
        if kv_cache_dtype is torch.int8:
            (k, key_scales), (v, value_scales) = to_int8(k), to_int8(v)
            expected = [k, v, key_scales, value_scales]
        else:
            expected = [k.to(kv_cache_dtype), v.to(kv_cache_dtype)]
        assert all(map(torch.equal, cached_heads(cache, inputs, head_dim), expected))
        untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
        untouched[inputs.slot_mapping] = False
        assert (cache.values.transpose(1, 2).flatten(0, 1)[untouched] == 77).all()
        if cache.scales is not None:
            assert (cache.scales[..., :block_size].permute(0, 3, 1, 2).flatten(0, 1)[untouched] == 77).all()


EXTREMES = {
    "zero": [0.0],
    "one outlier": [1e30, 1.0, -1.0],
    "huge": [3.4e38, -3.4e38],
    "the smallest": [1e-45, -1e-45, 3e-45],
    "just above the smallest scale": [127 * 1e-45, -60 * 1e-45],
    "the smallest normal": [2.0**-126, -(2.0**-127)],
    "halves": [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5],
    "NaN": [torch.nan, 1.0],
    "infinities": [1.0, -torch.inf],
}


@INTERPRETED
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values_become_the_integers_of_the_definition(name: str) -> None:
    head_dim, some = 16, torch.tensor(EXTREMES[name])
    inputs, num_blocks = ragged_input([(0, 1)], 16)
    value = some.repeat(head_dim)[:head_dim]
    qkv = torch.cat((torch.ones(2 * head_dim), value))[None]
    shape = Heads(1, head_dim, torch.ones(head_dim), torch.ones(head_dim), 1e-5)
    for kernels in EVERY_BACK_END.values():
        cache = empty_cache(inputs, num_blocks, 16, 1, head_dim, torch.int8)
        kernels().rope_and_cache(qkv, shape, rotary_table(8, head_dim), inputs, cache)
        _, integers, key_scale, scale = cached_heads(cache, inputs, head_dim)
        if not value.isfinite().all():
            assert key_scale.isnan().all()
            assert scale[0, 0] == 0
            continue
        expected, expected_scale = to_int8(value)
        assert torch.equal(integers[0, 0], expected)
        assert scale[0, 0] == expected_scale
        used = integers[0, 0] * scale[0, 0]
        assert ((used.double() - value.double()).abs() <= scale.double() * 0.50001 + 1.5e-45 * 64).all()


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("kv_cache_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_finite_reaches_those_who_attend_to_it_and_no_other(
    part: str, kv_cache_dtype: torch.dtype, name: str
) -> None:
    if (name, kv_cache_dtype) == ("cuda", torch.bfloat16):
        pytest.skip("a GPU keeps float32 keys and values as they are computed")
    kernels, head_dim, at, window = EVERY_BACK_END[name](), 16, 7, 4
    inputs, num_blocks = ragged_input([(0, 20)], 16)
    shape = Heads(2, head_dim, None, None, 1e-5)
    qkv = normal(20, 6 * head_dim, seed=3)
    dirty = qkv.clone()
    spoilt = 2 * head_dim + (2 * head_dim if part == "value" else 0)  # of the first KV head
    dirty[at, spoilt + 5] = 3.4e38 if (kv_cache_dtype, part) == (torch.bfloat16, "value") else -torch.inf
    found = {}
    for x in (qkv, dirty):
        for seen in (0, window):
            cache = empty_cache(inputs, num_blocks, 16, 2, head_dim, kv_cache_dtype)
            q = kernels.rope_and_cache(x, shape, rotary_table(32, head_dim), inputs, cache)
            out = kernels.attention(q, x, replace(shape, window=seen), inputs, cache)
            found[x is dirty, seen] = out.view(20, 2, head_dim)
    for seen in (0, window):
        attends = torch.zeros(20, 2, dtype=torch.bool)
        attends[at : at + seen if seen else None, 0] = True
        assert torch.equal(found[True, seen][~attends], found[False, seen][~attends])
        if part == "value":
            assert found[True, seen][attends].isnan().all()


def convolve(
    kernels: Kernels,
    columns: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
) -> list[Tensor]:
    """Run whole sequences of bcx through steps; ``cuts[i]`` are the chunks of sequence i, one per step.

    Slot numbers are those of the sequences in the step's order, so sequences all take part until they end together.
    """
    done = [0] * len(columns)
    out: list[list[Tensor]] = [[] for _ in columns]
    for step in range(len(cuts[0])):
        pieces = [(past, cut[step]) for past, cut in zip(done, cuts, strict=True)]
        inputs, num_blocks = ragged_input(pieces, 16)
        bcx = torch.cat([c[past : past + count] for c, (past, count) in zip(columns, pieces, strict=True)])
        conv = conv_state(state, num_blocks, 16)
        got = kernels.short_conv(bcx, weight, bias, conv, inputs).split([count for _, count in pieces])
        for i, (part, (past, count)) in enumerate(zip(got, pieces, strict=True)):
            out[i].append(part)
            done[i] = past + count
    return [torch.cat(parts) for parts in out]


def whole_convolution(bcx: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """C * conv1d(B * x) over one whole sequence, the convolution in float64."""
    b, c, x = bcx.chunk(3, -1)
    u = functional.pad((b * x).double().T, (len(weight) - 1, 0))
    mixed = functional.conv1d(u, weight.double().T[:, None], bias.double(), groups=u.shape[0])
    return c * mixed.T.to(bcx.dtype)


CONV_CUTS = {
    "chunks": [[1, 2, 1, 30], [3, 1, 5, 1], [17, 1, 1, 1], [2, 2, 2, 2]],
    "whole": [[150], [1], [2], [33]],
    "one by one": [[1] * 20, [1] * 20],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", CONV_CUTS)
@pytest.mark.parametrize("name", EVERY_NAME)
def test_chunks_of_a_convolution_equal_the_whole(name: str, cuts: str, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    shapes = (
        [(300, 3) if cuts == "whole" else (7, 7)]
        if name == "cuda"
        else [(16, 3), (40, 4), (24, 7), (100, 3), (300, 3), (5, 5)]
    )
    for width, taps in shapes:
        weight, bias = normal(taps, width, seed=1), normal(width, seed=2)
        columns = [normal(sum(c), 3 * width, seed=3 + i, dtype=dtype) for i, c in enumerate(CONV_CUTS[cuts])]
        state = torch.full((len(columns), taps - 1, width), torch.nan, dtype=dtype)  # what an earlier sequence left
        got = convolve(EVERY_BACK_END[name](), columns, CONV_CUTS[cuts], weight, bias, state)
        for column, out in zip(columns, got, strict=True):
            torch.testing.assert_close(out, whole_convolution(column, weight, bias), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "taps"), [(16, 3), (300, 3), (40, 7), (7, 2)])
def test_convolution_has_the_same_bits_however_a_sequence_is_cut(width: int, taps: int, dtype: torch.dtype) -> None:
    weight, bias = normal(taps, width, seed=1), normal(width, seed=2)
    columns = [normal(20, 3 * width, seed=3 + i, dtype=dtype) for i in range(3)]

    def run(cuts: list[list[int]], columns: list[Tensor], threads: int) -> tuple[list[Tensor], Tensor]:
        torch.set_num_threads(threads)
        state = torch.full((len(columns), taps - 1, width), torch.inf, dtype=dtype)
        return convolve(CpuKernels(), columns, cuts, weight, bias, state), state

    whole, whole_state = run([[20]] * 3, columns, 1)
    for cuts in ([[1] * 20] * 3, [[2, 18], [19, 1], [1, 19]], [[7, 1, 12], [1, 1, 18], [3, 3, 14]]):
        for threads in (1, 2):
            parts, state = run(cuts, columns, threads)
            assert all(map(torch.equal, parts, whole))
            assert torch.equal(state, whole_state)
    alone, _ = run([[4, 16]], columns[1:2], 2)
    assert torch.equal(alone[0], whole[1])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_convolution_touches_only_the_slots_of_its_sequences(name: str) -> None:
    state = torch.full((5, 2, 24), 5.0)
    inputs, num_blocks = ragged_input([(0, 4), (0, 1)], 16)
    conv = conv_state(state, num_blocks, 16)
    EVERY_BACK_END[name]().short_conv(normal(5, 72, seed=0), normal(3, 24, seed=1), torch.zeros(24), conv, inputs)
    assert torch.equal(state[2:], torch.full((3, 2, 24), 5.0))
    assert not (state[:2] == 5.0).any()
    assert torch.equal(state[1, 0], torch.zeros(24)), "the state of a single token starts with the zero before it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "taps"), [(3, 5), (1, 2), (16, 3), (40, 5)])
@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_filled_block_keeps_the_state_at_its_end(name: str, block_size: int, taps: int, dtype: torch.dtype) -> None:
    pieces, width = [(0, 60), (7, 1), (block_size - 1, 1), (50, 31)], 24
    inputs, num_blocks = ragged_input(pieces, block_size)
    bcx = normal(93, 3 * width, seed=1, dtype=dtype)
    before = normal(len(pieces), taps - 1, width, seed=2, dtype=dtype)
    for row, (past, _) in enumerate(pieces):
        before[row, : max(0, taps - 1 - past)] = 0  # before the start
    conv = conv_state(before.clone(), num_blocks, block_size)
    EVERY_BACK_END[name]().short_conv(bcx, normal(taps, width, seed=3), torch.zeros(width), conv, inputs)
    u = (bcx[:, :width] * bcx[:, 2 * width :]).split([count for _, count in pieces])
    written = set()
    for row, (past, count) in enumerate(pieces):
        column = torch.cat((before[row], u[row]))
        for t in range(count):
            if (past + t + 1) % block_size == 0:
                block = int(inputs.block_tables[row, (past + t) // block_size])
                assert torch.equal(conv.blocks[block], column[t + 1 : t + taps])
                written.add(block)
    assert written
    assert all(conv.blocks[block].isnan().all() for block in set(range(num_blocks)) - written)
