"""Tokens that nothing depends on are left out behind the last attention; nobody can tell from what comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import BACK_ENDS, DTYPES, ragged_input, random_state, state_tensors, tiny_model

from batchgen.kernels.inputs import QUERY_BLOCK, LogitsSubset, ModelInput, build_subset

TAILS: dict[str, dict[str, Any]] = {  # convolutions behind the last attention
    "none": {"full_attn_idxs": [1, 3]},
    "one": {"full_attn_idxs": [0, 2]},
    "two": {"full_attn_idxs": [1]},
    "one of 7 taps": {"model_type": "lfm3"},
    "two of 7 taps": {
        "model_type": "lfm3",
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv", "conv"],
        "num_hidden_layers": 5,
    },
}
EXACT = {"rtol": 0, "atol": 0}
NEAR = {"rtol": 5e-2, "atol": 5e-2}  # torch's products round otherwise for other numbers of rows


@st.composite
def steps(draw: st.DrawFn) -> tuple[ModelInput, int, int]:
    """A ragged step that asks for the logits of any tokens, its block size, and how many blocks there are."""
    lengths = st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 3, 5, 17, 40, 70]))
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32]))
    inputs, num_blocks = ragged_input(draw(st.lists(lengths, min_size=1, max_size=4)), block_size)
    few = st.sets(st.integers(0, inputs.num_tokens - 1), max_size=3)
    if draw(st.booleans()):
        inputs = replace(inputs, logits_indices=torch.tensor(sorted(draw(few)), dtype=torch.int64))
    return inputs, block_size, num_blocks


def needed(inputs: ModelInput, block_size: int, taps: int, convolutions: int) -> set[int]:
    """Which tokens of the step the layers need at their entrance, followed back layer by layer."""
    bounds = inputs.cu_seqlens.tolist()
    begins = [start for start, end in pairwise(bounds) for _ in range(start, end)]
    positions = inputs.positions.tolist()
    states = {t for t, position in enumerate(positions) if (position + 1) % block_size == 0}
    states |= {end - 1 for end in bounds[1:]}
    wanted = set(inputs.logits_indices.tolist())
    for _ in range(convolutions):
        seen = {t - back for t in wanted for back in range(taps) if t - back >= begins[t]}
        kept = {t - back for t in states for back in range(taps - 1) if t - back >= begins[t]}
        wanted |= seen | kept
    return wanted | {end - 1 for end in bounds[1:]}


@settings(max_examples=80, deadline=None)
@given(steps(), st.sampled_from([2, 3, 4, 7]), st.integers(0, 3))
def test_what_is_kept_is_what_others_depend_on(step: tuple[ModelInput, int, int], taps: int, convolutions: int) -> None:
    inputs, block_size, _ = step
    expected = sorted(needed(inputs, block_size, taps, convolutions))
    subset = build_subset(inputs, block_size, convolutions * (taps - 1))
    assert (list(range(inputs.num_tokens)) if subset is None else subset.rows.tolist()) == expected
    if subset is not None:
        check_inputs_of_the_rows(inputs, subset)


@st.composite
def whole_texts(draw: st.DrawFn) -> tuple[ModelInput, int, int]:
    """As ``steps``, of texts that are seen whole, each asked for its first, its last or all tokens."""
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 5, 17, 70]), min_size=1, max_size=4))
    inputs, num_blocks = ragged_input([(0, count) for count in counts], 8, is_causal=False)
    asked: list[int] = []
    for start, end in pairwise(inputs.cu_seqlens.tolist()):
        asked += draw(st.sampled_from([[start], [end - 1], range(start, end)]))
    return replace(inputs, logits_indices=torch.tensor(asked)), 8, num_blocks


@settings(max_examples=80, deadline=None)
@given(whole_texts(), st.sampled_from([3, 7]), st.integers(0, 3))
def test_of_texts_seen_whole_neighbours_on_both_sides_are_kept(
    step: tuple[ModelInput, int, int], taps: int, convolutions: int
) -> None:
    inputs, reach = step[0], convolutions * (taps // 2)
    expected: set[int] = set()
    for start, end in pairwise(inputs.cu_seqlens.tolist()):
        asked = [t for t in inputs.logits_indices.tolist() if start <= t < end]
        expected |= {t for t in range(start, end) if min(abs(t - other) for other in asked) <= reach}
    subset = build_subset(inputs, 8, reach)
    assert ([*range(inputs.num_tokens)] if subset is None else subset.rows.tolist()) == sorted(expected)
    if subset is not None:
        check_inputs_of_the_rows(inputs, subset)
        lengths = np.diff(inputs.cu_seqlens.numpy())
        assert all(reach == lengths[sequence] for sequence, *_, reach in subset.inputs.query_blocks.tolist())


def check_inputs_of_the_rows(inputs: ModelInput, subset: LogitsSubset) -> None:
    """The narrowed inputs say of each row what the whole ones say of its token, in what kernels read."""
    rows, few = subset.rows.numpy(), subset.inputs
    assert few.subset is None
    for name in ("token_ids", "positions", "slot_mapping"):
        assert getattr(few, name).tolist() == getattr(inputs, name)[subset.rows].tolist(), name
    assert rows[few.logits_indices.numpy()].tolist() == inputs.logits_indices.tolist()
    sequence_of = np.repeat(np.arange(inputs.num_seqs), np.diff(inputs.cu_seqlens.numpy()))
    counts = np.diff(few.cu_seqlens.numpy())
    assert counts.min() >= 1
    assert np.repeat(np.arange(inputs.num_seqs), counts).tolist() == sequence_of[rows].tolist()
    covered = []
    for sequence, first, count, *_ in few.query_blocks.tolist():
        piece = range(first, first + count)
        covered += piece
        assert 1 <= count <= QUERY_BLOCK
        assert {sequence_of[rows[t]] for t in piece} == {sequence}
        assert rows[first + count - 1] - rows[first] == count - 1, "a piece has a gap"
    assert covered == list(range(len(rows)))
    for name in ModelInput.__slots__:
        if name not in ("subset", "is_causal", "unseen", "num_alone", "pending"):
            assert getattr(few, name).dtype == getattr(inputs, name).dtype, name
            assert getattr(few, name).is_contiguous(), name


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layers", "is_causal"), [*((layers, True) for layers in TAILS), *((n, False) for n in ("none", "one", "two"))]
)
def test_logits_and_states_are_those_of_computing_everything(
    layers: str, is_causal: bool, dtype: str, back_end: str
) -> None:
    kind = {} if is_causal else {"architectures": ["Lfm2BidirectionalModel"]}
    model = tiny_model(DTYPES[dtype], BACK_ENDS[back_end](), **kind, **TAILS[layers])
    num_kept = []

    @settings(max_examples=15, deadline=None)
    @given(steps() if is_causal else whole_texts())
    def check(step: tuple[ModelInput, int, int]) -> None:
        inputs, block_size, num_blocks = step
        found = []
        for subset in (None, build_subset(inputs, block_size, model.config.tail_reach)):
            state = random_state(model, num_blocks=num_blocks, block_size=block_size, num_slots=inputs.num_seqs)
            logits = model.forward(replace(inputs, subset=subset), state, int(inputs.positions.max()))
            found.append([logits, *(state_tensors(state) if is_causal else [])])
            num_kept.append(inputs.num_tokens if subset is None else len(subset.rows))
        for whole, narrowed in zip(*found, strict=True):
            torch.testing.assert_close(narrowed, whole, **EXACT if back_end == "cpu" else NEAR)

    check()
    assert sum(num_kept[1::2]) < sum(num_kept[::2]), "nothing was ever left out"
