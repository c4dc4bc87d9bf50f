"""Decode steps as CUDA graphs: recorded once for a size, replayed with one copy and one launch.

A step in which every sequence has one token does the same work on the same tensors as any other of its size, so
the host need not launch its few hundred kernels again. Sizes are rounded up to a few buckets; the rows added work on
a block and a slot that belong to nobody. What a recording depends on beyond the contents of its tensors is in its
``GraphKey``; what is the same for all keys (weights, state, the rotary table) is fixed before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.batch import Feed
from batchgen.engine.static_input import Buffers, GraphKey, Spare, StaticInput, is_decode, table_width
from batchgen.kernels.inputs import ModelInput
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

Replay = Callable[[], Tensor]


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


def bucket(num_seqs: int, most: int) -> int:
    """The rows that ``num_seqs`` are padded to: a power of two in at most four steps to the next, at most ``most``."""
    step = 1 << max(0, (num_seqs - 1).bit_length() - 3)
    return min(-(-num_seqs // step) * step, most)


def can_record(model: Decoder) -> bool:
    """Whether the model's kernels can be recorded: those that ask the device nothing."""
    return model.device.type == "cuda" and model.kernels.name == "cuda"


class DecodeGraphs:
    """Runs the steps that can be replayed; records a size when it is first met."""

    def __init__(self, model: Decoder, state: StateCache, spare: Spare, recorder: Recorder, max_model_len: int) -> None:
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
