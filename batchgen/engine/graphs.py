"""Decode steps as CUDA graphs: recorded once for a size, replayed with one copy and one launch.

A step in which every sequence has one token does the same work on the same tensors as any other of its size, so
the host need not launch its few hundred kernels again. Sizes are rounded up to a few buckets; the rows added work on
a block and a slot that belong to nobody. What a recording depends on beyond the contents of its tensors is in its
``GraphKey``; what is the same for all keys (weights, state, the rotary table) is fixed before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.batch import Feed
from batchgen.model.cache import StateCache
from batchgen.model.inputs import ModelInput
from batchgen.model.lfm2 import Lfm2Model

_LEAST_BLOCKS = 16
_ALIGNMENT = 64  # bytes: what vector loads want, and cache lines of their own

Replay = Callable[[], Tensor]


class Buffers(Protocol):
    """Memory that a step's inputs cross in."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory for ``upload``, uint8."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy a ``buffer`` to the device, in order with the replays."""
        ...

    def wait(self) -> None:
        """Return once the last upload has read its source."""
        ...


class Recorder(Buffers, Protocol):
    """What records and replays: CUDA graphs, or in tests a stand-in that calls again."""

    def record(self, work: Callable[[], Tensor]) -> Replay:
        """A way to repeat ``work`` on the tensors it uses now; ``work`` may be run several times meanwhile.

        The result of a replay is valid until the next.
        """
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory, so that they cost what the largest needs and not their sum."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def record(self, work: Callable[[], Tensor]) -> Replay:
        """See ``Recorder``; ``work`` runs once before, which compiles kernels and sets up cuBLAS for the stream."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # likewise
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def buffer(self, num_bytes: int) -> Tensor:
        """See ``Recorder``; pinned, so that copying it does not hold up the host."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """See ``Recorder``."""
        target.copy_(source, non_blocking=True)
        self.uploaded.record()

    def wait(self) -> None:
        """See ``Recorder``."""
        self.uploaded.synchronize()


@dataclass(frozen=True, slots=True)
class GraphKey:
    """All that a recording holds fixed: rows, width of the block tables, and the type computed in."""

    num_seqs: int
    max_blocks: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Spare:
    """A KV block and a convolution slot that no sequence is ever given: those after all others."""

    block: int
    slot: int
    block_size: int


def bucket(num_seqs: int, most: int) -> int:
    """The rows that ``num_seqs`` are padded to: a power of two in at most four steps to the next, at most ``most``."""
    step = 1 << max(0, (num_seqs - 1).bit_length() - 3)
    return min(-(-num_seqs // step) * step, most)


def table_width(max_blocks: int) -> int:
    """The columns that block tables of ``max_blocks`` are padded to."""
    return max(_LEAST_BLOCKS, 1 << (max_blocks - 1).bit_length())


class StaticInput:
    """A ``ModelInput`` of one size at fixed addresses; what changes from step to step crosses in one copy."""

    def __init__(self, key: GraphKey, spare: Spare, device: torch.device, buffers: Buffers) -> None:
        n = key.num_seqs
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (n,)),
            "slot_mapping": (torch.int64, (n,)),
            "block_tables": (torch.int32, (n, key.max_blocks)),
            "positions": (torch.int32, (n,)),
            "conv_slots": (torch.int32, (n,)),
        }
        self.buffers = buffers
        self.source, self.host = _carve(fields, buffers.buffer)
        self.target, views = _carve(fields, lambda size: torch.zeros(size, dtype=torch.uint8, device=device))
        rows = torch.arange(n + 1, dtype=torch.int32, device=device)
        each_one = torch.stack((rows[:-1], rows[:-1], torch.ones_like(rows[:-1])), dim=1)
        self.inputs = ModelInput(
            **views, cu_seqlens=rows, query_blocks=each_one, logits_indices=rows[:-1].to(torch.int64), tail=None
        )
        self.spare = spare

    def fill(self, inputs: ModelInput | None) -> None:
        """Take over a step's CPU tensors; the rows left over, or all for None, work on the spare state."""
        count, width = (0, 0) if inputs is None else inputs.block_tables.shape
        self.buffers.wait()
        for name, rest in (("token_ids", 0), ("positions", 0), ("conv_slots", self.spare.slot)):
            self.host[name][count:] = rest
        self.host["slot_mapping"][count:] = self.spare.block * self.spare.block_size
        self.host["block_tables"].zero_()
        self.host["block_tables"][count:, 0] = self.spare.block
        if inputs is not None:
            for name in ("token_ids", "positions", "conv_slots", "slot_mapping"):
                self.host[name][:count] = getattr(inputs, name)
            self.host["block_tables"][:count, :width] = inputs.block_tables
        self.buffers.upload(self.source, self.target)


def _carve(
    fields: dict[str, tuple[torch.dtype, tuple[int, ...]]], allocate: Callable[[int], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One piece of memory, and tensors of the given types and shapes in it."""
    spans, end = {}, 0
    for name, (dtype, shape) in fields.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        spans[name] = (end, end + size)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    memory = allocate(end)
    views = {name: memory[slice(*spans[name])].view(dtype).view(shape) for name, (dtype, shape) in fields.items()}
    return memory, views


def is_decode(inputs: ModelInput) -> bool:
    """Whether every sequence has one token in a step, and its logits are wanted in order."""
    n = inputs.num_seqs
    return inputs.num_tokens == n and torch.equal(inputs.logits_indices, torch.arange(n))


def can_record(model: Lfm2Model) -> bool:
    """Whether the model's kernels can be recorded: those that ask the device nothing."""
    return model.device.type == "cuda" and model.kernels.name == "cuda"


class DecodeGraphs:
    """Runs the steps that can be replayed; records a size when it is first met."""

    def __init__(
        self, model: Lfm2Model, state: StateCache, spare: Spare, recorder: Recorder, max_model_len: int
    ) -> None:
        self.model = model
        self.state = state
        self.spare = spare
        self.recorder = recorder
        self.last_position = max_model_len - 1
        model.rotary.upto(max_model_len)  # recordings hold its address, so it must not grow afterwards
        self._recorded: dict[GraphKey, tuple[StaticInput, Replay]] = {}

    @staticmethod
    def takes(inputs: ModelInput) -> bool:
        """Whether every sequence has one token in this step, and its logits are wanted in order."""
        return is_decode(inputs)

    @torch.inference_mode()
    def run(self, inputs: ModelInput, feed: Feed | None = None) -> Tensor:
        """Logits [num_seqs, vocab_size] for CPU inputs that ``takes`` accepts, valid until the next call.

        ``feed`` puts in the tokens that only the device knows.
        """
        num_blocks = inputs.block_tables.shape[1]
        key = GraphKey(bucket(inputs.num_seqs, self.spare.slot), table_width(num_blocks), self.model.dtype)
        if key not in self._recorded:
            self._recorded[key] = self._record(key)
        static, replay = self._recorded[key]
        static.fill(inputs)
        if feed is not None:
            feed.into(static.inputs.token_ids)
        return replay()[: inputs.num_seqs]

    def _record(self, key: GraphKey) -> tuple[StaticInput, Replay]:
        static = StaticInput(key, self.spare, self.model.device, self.recorder)
        static.fill(None)  # a convolution's state moves on each time the work is run: let it be nobody's
        return static, self.recorder.record(lambda: self.model.forward(static.inputs, self.state, self.last_position))
