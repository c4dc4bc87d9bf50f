"""Decode steps run from recordings: kernel launches are recorded once per batch size and then repeated.

A step in which every sequence has one token does the same work on the same tensors as any other of its size, so the
host need not launch its hundreds of kernels again: it only changes what the input tensors hold. CUDA graphs are
recorded with padding: sizes are rounded up to a few buckets, and the added rows work on a block and a slot that no
sequence owns. On the CPU a recording is cheap but computes every row it has, so it is made of exactly one size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.batch import PendingTokens
from batchgen.kernels.inputs import ModelInput
from batchgen.kernels.interface import Recorder
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

_MAX_EXACT = 64  # recordings of exact sizes; each holds a few copies of its block tables
_MIN_BLOCKS = 16
_ALIGNMENT = 64  # bytes: vector loads want it, and so fields share no cache line


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a recording holds fixed beside the model and its state; ``num_threads`` is torch's on the CPU."""

    num_seqs: int
    max_blocks: int
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class PaddingSlot:
    """A KV block and a convolution slot that no sequence is ever given: those after all others."""

    block: int
    slot: int
    block_size: int


def is_decode(inputs: ModelInput) -> bool:
    """Whether every sequence has one token in this step, and its logits are wanted in order."""
    n = inputs.num_seqs
    return inputs.num_tokens == n and torch.equal(inputs.logits_indices, torch.arange(n))


def bucket(num_seqs: int, most: int) -> int:
    """The rows that ``num_seqs`` are padded to: a power of two in at most four steps to the next, at most ``most``."""
    step = 1 << max(0, (num_seqs - 1).bit_length() - 3)
    return min(-(-num_seqs // step) * step, most)


class CudaRecorder:
    """Records CUDA graphs; they share one pool of memory, which is as large as the largest graph needs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """See ``Recorder``; the result is only there after a replay.

        ``work`` runs once before it is captured, which compiles kernels and sets up cuBLAS for the stream.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
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

        return result, replay


class StepReplays:
    """Runs decode steps of one model, from recordings as far as it has them.

    With ``padding`` each size is padded to its bucket and recorded when first met, on the padding alone. Without, a
    size is recorded when it is met twice in a row, and that step's result comes from the recording.
    """

    def __init__(
        self, model: Decoder, state: StateCache, recorder: Recorder, padding: PaddingSlot | None, max_model_len: int
    ) -> None:
        self.model = model
        self.state = state
        self.recorder = recorder
        self.padding = padding
        # Recordings hold the address of the rotary table: graphs get one that never grows, others are made anew.
        self.rotary = model.rotary.upto(max_model_len if padding is not None else 0)
        self.recorded: dict[StepSize, tuple[StaticInput, Callable[[], Tensor]]] = {}
        self._newest: StepSize | None = None  # of the steps that were not recorded

    @torch.inference_mode()
    def run(self, inputs: ModelInput, pending: PendingTokens | None = None) -> Tensor:
        """Logits [num_seqs, vocab_size] for CPU inputs with ``is_decode``, valid until the next call.

        ``pending`` has the token ids that only the device knows.
        """
        last = int(inputs.positions.max())
        if (table := self.model.rotary.upto(last + 1)) is not self.rotary:
            self.recorded.clear()
            self.rotary = table
        size = self._size(inputs)
        if size not in self.recorded:
            if self.padding is None:
                if pending is not None:
                    pending.into(inputs.token_ids)
                return self._run_exact(size, inputs, last)
            self._record(size, self.padding, None, last)
        static, replay = self.recorded[size]
        static.fill(inputs)
        if pending is not None:
            pending.into(static.inputs.token_ids)
        return replay()[: inputs.num_seqs]

    def _size(self, inputs: ModelInput) -> StepSize:
        num_seqs, num_blocks = inputs.block_tables.shape
        if self.padding is not None:
            num_seqs = bucket(num_seqs, self.padding.slot)
        return StepSize(num_seqs, max(_MIN_BLOCKS, 1 << (num_blocks - 1).bit_length()), torch.get_num_threads())

    def _run_exact(self, size: StepSize, inputs: ModelInput, last: int) -> Tensor:
        if size != self._newest:
            self._newest = size
            return self.model.forward(inputs, self.state, last)
        if len(self.recorded) == _MAX_EXACT:
            del self.recorded[next(iter(self.recorded))]
        return self._record(size, PaddingSlot(0, 0, 1), inputs, last)

    def _record(self, size: StepSize, padding: PaddingSlot, inputs: ModelInput | None, last: int) -> Tensor:
        """Record a step while it is run: recording advances the convolution state of the rows it is made with."""
        static = StaticInput(size, padding, self.model.device)
        static.fill(inputs)
        logits, replay = self.recorder.record(lambda: self.model.forward(static.inputs, self.state, last))
        self.recorded[size] = static, replay
        return logits


class StaticInput:
    """A ``ModelInput`` of one size at fixed addresses; what changes from step to step crosses in one copy."""

    def __init__(self, size: StepSize, padding: PaddingSlot, device: torch.device) -> None:
        n = size.num_seqs
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (n,)),
            "slot_mapping": (torch.int64, (n,)),
            "block_tables": (torch.int32, (n, size.max_blocks)),
            "positions": (torch.int32, (n,)),
            "conv_slots": (torch.int32, (n,)),
        }
        num_bytes = sum(_aligned_bytes(*field) for field in fields.values())
        is_cuda = device.type == "cuda"
        self._source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)  # so that a copy is no wait
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # unannotated
        self._host = _views(self._source, fields)
        rows = torch.arange(n + 1, dtype=torch.int32, device=device)
        self.inputs = ModelInput(
            **_views(self._target, fields),
            cu_seqlens=rows,
            query_blocks=torch.stack((rows[:-1], rows[:-1], torch.ones_like(rows[:-1])), dim=1),
            logits_indices=rows[:-1].to(torch.int64),
            subset=None,
        )
        self.padding = padding

    def fill(self, inputs: ModelInput | None) -> None:
        """Take over a step's CPU tensors; the rows left over, or all for None, work on the padding."""
        count, width = (0, 0) if inputs is None else inputs.block_tables.shape
        host, padding = self._host, self.padding
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read its source
        for name, rest in (("token_ids", 0), ("positions", 0), ("conv_slots", padding.slot)):
            host[name][count:] = rest
        host["slot_mapping"][count:] = padding.block * padding.block_size
        host["block_tables"].zero_()
        host["block_tables"][count:, 0] = padding.block
        if inputs is not None:
            for name in ("token_ids", "positions", "conv_slots", "slot_mapping"):
                host[name][:count] = getattr(inputs, name)
            host["block_tables"][:count, :width] = inputs.block_tables
        self._target.copy_(self._source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors of the given types and shapes, one behind the other in a piece of memory."""
    views, start = {}, 0
    for name, (dtype, shape) in fields.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        views[name] = memory[start : start + num_bytes].view(dtype).view(shape)
        start += _aligned_bytes(dtype, shape)
    return views
