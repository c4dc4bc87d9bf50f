"""Abilities of a device beyond running a step: queueing the next step after it, and repeating a recorded step.

A step of one token per sequence repeats the launches of any other of its size; only the inputs' content differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from batchgen.engine.graphs import CudaGraphs, CudaRecorder, PaddingSlot, StaticInput, StepSize
from batchgen.engine.sizes import SchedulerConfig
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.recording import Recorder
from batchgen.kernels.inputs import ModelInput, StepOutput
from batchgen.model.decoder import Decoder
from batchgen.model.state import KV_DTYPES, StateCache, allocate

_MAX_KEPT = 64  # each holds a few copies of its block tables
_MIN_BLOCKS = 16
_NO_PADDING = PaddingSlot(0, 0, 1)
Fetched = Callable[[], list[int]]  # waits for token ids on their way to the host, and returns them


def is_asynchronous(device: torch.device) -> bool:
    """Whether launches return before their work is done, so that a step can be launched while another runs."""
    return device.type == "cuda"


def for_sampling(logits: Tensor) -> Tensor:
    """The logits, on the host if launches are synchronous: drawing takes float64, which the device may lack."""
    return logits if is_asynchronous(logits.device) else logits.cpu()


def fetch_ids(token_ids: Tensor) -> Fetched:
    """Begin to copy int64 ids to the host, after all work launched so far; later launches are not waited for."""
    if token_ids.device.type != "cuda":
        return token_ids.tolist
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    copied.record(torch.cuda.current_stream(token_ids.device))  # a thread's current device may be another

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return wait


class CpuRecordings:
    """Runs the steps of one model: decode steps from lists of launches, recorded once per size, others unrecorded.

    A recording computes all of its rows, so it has one exact size. Feeding tokens and argmax are not recorded, since
    only the recorder's own kernels can be repeated.
    """

    def __init__(self, model: Decoder, state: StateCache, recorder: Recorder) -> None:
        self.model, self.state, self.recorder = model, state, recorder
        self.rotary = model.rotary.upto(0)  # recordings hold the address of the table
        self.recorded: dict[StepSize, tuple[StaticInput, Callable[[], Tensor]]] = {}

    def record_all(self) -> None:
        """Do nothing: the sizes of later steps are not known."""

    @staticmethod
    def takes(inputs: ModelInput) -> bool:
        """Whether ``run`` computes such a step: any step that does not need torch."""
        return inputs.unseen is None

    @torch.inference_mode()
    def run(self, inputs: ModelInput) -> StepOutput:
        """The output of a step for CPU inputs, valid until the next call; see ``CudaGraphs.run``."""
        last = int(inputs.positions.max())
        if (table := self.model.rotary.upto(last + 1)) is not self.rotary:
            self.recorded.clear()
            self.rotary = table
        if inputs.pending is not None:
            inputs.pending.into(inputs.token_ids)
            inputs = replace(inputs, pending=None)
        if not inputs.is_decode:
            return StepOutput(self.recorder.run(lambda: self.model.forward(inputs, self.state, last)))
        size = self.size_of(inputs)
        if size not in self.recorded:
            return StepOutput(self._record(size, inputs, last))
        static, replay = self.recorded[size]
        static.fill(inputs)
        return StepOutput(replay())

    @staticmethod
    def size_of(inputs: ModelInput) -> StepSize:
        """The size of the recording for a step; its block tables may have more columns than needed."""
        num_seqs, num_blocks = inputs.block_tables.shape
        return StepSize(num_seqs, max(_MIN_BLOCKS, 1 << (num_blocks - 1).bit_length()), torch.get_num_threads())

    def _record(self, size: StepSize, inputs: ModelInput, last: int) -> Tensor:
        """Record a step by running it, on its own rows: this advances their convolution state."""
        if len(self.recorded) == _MAX_KEPT:
            del self.recorded[next(iter(self.recorded))]
        static = StaticInput(size, _NO_PADDING, self.model.device)
        static.fill(inputs)
        logits, replay = self.recorder.record(lambda: self.model.forward(static.inputs, self.state, last))
        self.recorded[size] = static, replay
        return logits


def has_graphs(model: Decoder) -> bool:
    """Whether the model's decode steps can be CUDA graphs: its kernels do not wait for the device."""
    return model.device.type == "cuda" and model.kernels.name in ("cuda", "plain")


def state_and_replays(model: Decoder, config: SchedulerConfig) -> tuple[StateCache, CpuRecordings | CudaGraphs | None]:
    """The state for a scheduler of these sizes, with padding for CUDA graphs, and recordings of steps, or None."""
    num_more = int(has_graphs(model))
    state = allocate(
        model.config,
        num_blocks=config.num_blocks + num_more,
        block_size=config.block_size,
        num_slots=config.max_num_seqs + num_more,
        dtype=model.dtype,
        device=model.device,
        kv_cache_dtype=KV_DTYPES.get(config.kv_cache_dtype),
    )
    if num_more:
        padding = PaddingSlot(config.num_blocks, config.max_num_seqs, config.block_size)
        return state, CudaGraphs(model, state, CudaRecorder(model.device), padding, config.max_model_len)
    if isinstance(model.kernels, CpuKernels):  # all launches of its steps can be recorded
        return state, CpuRecordings(model, state, Recorder())
    return state, None
