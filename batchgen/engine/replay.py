"""Steps in which every sequence has one token, run from recordings on back ends whose launches cost the host time.

A recording is made when two steps in a row that could be recorded have as many sequences: with it, the same work is
done on the same tensors each time, and only what they hold changes. (Graphs of CUDA need more care, and have their own
module.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.engine.batch import Feed
from batchgen.engine.static_input import GraphKey, Spare, StaticInput, is_decode, table_width
from batchgen.kernels.inputs import ModelInput
from batchgen.kernels.interface import Recorder
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

_MOST_RECORDED = 64  # each holds some copies of its block tables


class _HostBuffers:
    """Where a step's inputs lie; see ``Buffers``. The device is the host, and nothing is under way."""

    @staticmethod
    def buffer(num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @staticmethod
    def upload(source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    @staticmethod
    def wait() -> None:
        pass


class StepReplays:
    """See ``DecodeGraphs``, whose place this takes."""

    def __init__(self, model: Decoder, state: StateCache, recorder: Recorder, block_size: int) -> None:
        self.model = model
        self.state = state
        self.recorder = recorder
        self._nobody = Spare(0, 0, block_size)  # recordings have no rows to spare
        self._rotary: Tensor | None = None  # the table that recordings hold the address of
        self._newest: tuple[GraphKey, int] | None = None  # of the steps that were not recorded
        self._recorded: dict[tuple[GraphKey, int], tuple[StaticInput, Callable[[], Tensor]]] = {}

    @staticmethod
    def takes(inputs: ModelInput) -> bool:
        """See ``DecodeGraphs.takes``."""
        return is_decode(inputs)

    @torch.inference_mode()
    def run(self, inputs: ModelInput, feed: Feed | None = None) -> Tensor:
        """See ``DecodeGraphs.run``; there is no ``feed`` where the host itself computes."""
        assert feed is None, "every id is known"
        last = int(inputs.positions.max())
        table = self.model.rotary.upto(last + 1)
        if table is not self._rotary:
            self._recorded.clear()
            self._rotary = table
        size = GraphKey(inputs.num_seqs, table_width(inputs.block_tables.shape[1]), self.model.dtype)
        key = size, torch.get_num_threads()
        if key in self._recorded:
            static, replay = self._recorded[key]
            static.fill(inputs)
            return replay()
        if key != self._newest:
            self._newest = key
            return self.model.forward(inputs, self.state, last)
        if len(self._recorded) == _MOST_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        static = StaticInput(size, self._nobody, self.model.device, _HostBuffers())
        static.fill(inputs)
        logits, replay = self.recorder.record(lambda: self.model.forward(static.inputs, self.state, last))
        self._recorded[key] = static, replay
        return logits
