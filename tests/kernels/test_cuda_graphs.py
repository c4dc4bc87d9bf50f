"""Recorded decode steps: padded = unpadded to the bit, and nothing but the spare state is touched for the padding.

A stand-in that calls again takes the place of CUDA graphs, so what is shown is all that happens around them: buckets,
padding, keys, and that recording disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_device import Again
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

from batchgen.engine import graphs as graphs_module
from batchgen.engine import replay
from batchgen.engine.graphs import CaptureFailed, CudaGraphs, PaddingSlot, StaticInput, StepSize, bucket
from batchgen.kernels.inputs import ModelInput
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

BLOCK_SIZE = 4
MAX_SEQS = 11
LONGEST = 2500  # more than a rotary table holds unless asked


def state_for(model: Decoder, num_blocks: int) -> tuple[StateCache, PaddingSlot]:
    """Random state of ``num_blocks`` blocks and ``MAX_SEQS`` slots, and one more of each."""
    state = random_state(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=MAX_SEQS)
    return state, PaddingSlot(num_blocks, MAX_SEQS, BLOCK_SIZE)


def copied(state: StateCache) -> StateCache:
    return StateCache(
        tuple(replace(cache, keys=cache.keys.clone(), values=cache.values.clone()) for cache in state.kv),
        tuple(replace(conv, slots=conv.slots.clone(), blocks=conv.blocks.clone()) for conv in state.conv),
    )


def graphs_for(model: Decoder, state: StateCache, spare: PaddingSlot) -> tuple[CudaGraphs, Again]:
    recorder = Again()
    graphs = CudaGraphs(model, state, recorder, spare, max_model_len=LONGEST)
    return graphs, recorder


def decode_input(num_seqs: int, seed: int, longest: int = 40) -> tuple[ModelInput, int]:
    """One token for each of some sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    pasts = torch.randint(0, longest, (num_seqs,), generator=generator).tolist()
    return ragged_input([(past, 1) for past in pasts], BLOCK_SIZE, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replayed_step_equals_the_plain_one_to_the_bit_and_touches_no_other_state(dtype: torch.dtype) -> None:
    model = tiny_model(dtype)
    most_blocks = 40 * MAX_SEQS
    state, spare = state_for(model, most_blocks)
    plain = copied(state)
    graphs, _ = graphs_for(model, state, spare)
    for step, num_seqs in enumerate([1, 3, 9, 2, 11, 9, 10, 1]):
        inputs, _ = decode_input(num_seqs, seed=step)
        expected = model.forward(inputs, plain, int(inputs.positions.max()))
        assert torch.equal(graphs.run(inputs).logits, expected)
        for got, untouched in zip(state_tensors(state), state_tensors(plain), strict=True):
            rows = slice(0, spare.slot if len(got) == spare.slot + 1 else spare.block)
            assert torch.equal(got[rows], untouched[rows])


def test_rows_left_over_are_first_tokens_in_the_spare_state_whatever_was_there_before() -> None:
    spare = PaddingSlot(block=99, slot=50, block_size=BLOCK_SIZE)
    static = StaticInput(StepSize(4, 16), spare, CPU)
    static.fill(ragged_input([(past, 1) for past in (40, 50, 60, 30)], BLOCK_SIZE)[0])
    inputs, _ = ragged_input([(5, 1), (2, 1)], BLOCK_SIZE)
    static.fill(inputs)
    filled = static.inputs
    assert filled.token_ids.tolist() == [*inputs.token_ids.tolist(), 0, 0]
    assert filled.positions.tolist() == [5, 2, 0, 0]
    assert filled.slot_mapping.tolist() == [*inputs.slot_mapping.tolist(), 99 * BLOCK_SIZE, 99 * BLOCK_SIZE]
    assert filled.conv_slots.tolist() == [*inputs.conv_slots.tolist(), 50, 50]
    assert filled.block_tables[:2, :2].equal(inputs.block_tables)
    assert filled.block_tables[2:, 0].tolist() == [99, 99]
    assert not filled.block_tables[:, 2:].any() and not filled.block_tables[2:, 1].any()
    assert filled.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert filled.query_blocks.tolist() == [[i, i, 1, 0, 0, 0] for i in range(4)]
    assert filled.logits_indices.tolist() == [0, 1, 2, 3]
    assert filled.subset is None
    for name in filled.__slots__:
        if name not in ("subset", "is_causal", "unseen", "num_alone", "pending"):
            assert getattr(filled, name).dtype == getattr(inputs, name).dtype, name


def on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*sizes: Any, device: object = None, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        return make(*sizes, **others)

    return made


def test_the_step_behind_one_that_runs_is_uploaded_without_a_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a device that has not begun yet: an upload that is waited for would never be done."""
    waited: list[int] = []

    class Event:
        is_recorded = False

        def synchronize(self) -> None:
            waited.append(1) if self.is_recorded else None

        def record(self, stream: str) -> None:
            self.is_recorded = stream == "that of the device"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "that of the device")
    for name in ("zeros", "arange"):
        monkeypatch.setattr(torch, name, on_host(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    padding = PaddingSlot(block=99, slot=50, block_size=BLOCK_SIZE)
    static = StaticInput(StepSize(4, 16), padding, torch.device("cuda", 0))
    filled = []
    for step in range(3):
        static.fill(ragged_input([(5 + step, 1)], BLOCK_SIZE)[0])
        filled.append(static.inputs.positions[0].item())
    assert not waited
    assert filled == [5, 6, 7]
    static.fill(None)
    static.fill(None)
    assert waited, "memory is not written again before it was read"


def test_all_sizes_are_recorded_at_once_the_largest_first_and_only_long_contexts_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs_module, "_USUAL_TOKENS", 40)
    model = tiny_model()
    state, spare = state_for(model, 60 * MAX_SEQS)
    graphs, recorder = graphs_for(model, state, spare)
    graphs.record_all()
    assert [(size.num_seqs, size.max_blocks) for size in graphs.recorded] == [(n, 10) for n in (11, 8, 4, 2, 1)]
    steps = [(1, 39, 5), (9, 30, 5), (11, 39, 5), (1, 40, 6), (2, 44, 7), (1, 159, 7), (1, 160, 8), (1, LONGEST - 1, 9)]
    for num_seqs, past, recorded in steps:
        inputs, _ = ragged_input([(past, 1)] * num_seqs if past < 50 else [(past, 1)], BLOCK_SIZE)
        expected = model.forward(inputs, copied(state), past)
        assert torch.equal(graphs.run(inputs).logits, expected)
        assert recorder.num_recorded == recorded, past
    assert max(size.max_blocks for size in graphs.recorded) == LONGEST / BLOCK_SIZE


class FailsAt(Again):
    """Cannot record from some recording on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        if self.num_recorded == self.first:
            raise CaptureFailed("operation not permitted")
        return super().record(work)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_an_engine_that_cannot_record_launches_steps_and_says_so(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(graphs_module, "_USUAL_TOKENS", 16)
    monkeypatch.setattr(replay, "has_graphs", lambda _: True)
    monkeypatch.setattr(replay, "CudaRecorder", lambda _: FailsAt(first))
    requests = random_requests(9, seed=0, prompt=(1, 20), output=(1, 24))
    model = tiny_model()
    engine = engine_for(model, num_blocks=60, block_size=BLOCK_SIZE, max_num_seqs=5, max_num_batched_tokens=16)
    assert (engine.runner.replays is not None) == (first == 4), "5, 4, 2, 1, and then a long context"
    assert tokens_of(engine.run(requests)) == solo(model, requests)
    assert engine.runner.replays is None
    (note,) = engine.runner.notes
    assert note.endswith("take longer: operation not permitted")


def test_the_rotary_table_stays_where_recordings_found_it() -> None:
    model = tiny_model()
    state, spare = state_for(model, LONGEST // BLOCK_SIZE + 2)
    graphs, _ = graphs_for(model, state, spare)
    table = model.rotary.upto(0)
    graphs.run(ragged_input([(LONGEST - 1, 1)], BLOCK_SIZE)[0])
    model.forward(ragged_input([(LONGEST - 9, 9)], BLOCK_SIZE)[0], state, LONGEST - 1)
    assert model.rotary.upto(0) is table


def test_only_steps_of_one_token_each_with_all_logits_are_taken() -> None:
    one_each, _ = decode_input(3, 0)
    assert one_each.is_decode
    assert not ragged_input([(0, 1), (3, 2)], BLOCK_SIZE)[0].is_decode
    assert not replace(one_each, is_causal=False).is_decode
    assert not replace(one_each, logits_indices=torch.tensor([0, 2])).is_decode
    assert not replace(one_each, logits_indices=torch.tensor([0, 2, 1])).is_decode


def test_buckets_are_few_and_hold_every_size_with_at_most_a_quarter_of_padding_where_rows_cost_time() -> None:
    for most, num_sizes in ((1, 1), (5, 4), (100, 11), (512, 20), (1000, 24), (1024, 24)):
        sizes = [bucket(n, most) for n in range(1, most + 1)]
        assert all(n <= size <= min(most, max(2 * n, 32), max(1.25 * n, n + 15)) for n, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes) and len(set(sizes)) == num_sizes
        assert all(bucket(size, most) == size for size in sizes)
