"""Runs the model on the device for one schedule; owns the cached state and nothing else."""

from __future__ import annotations

from torch import Tensor

from batchgen.core.machine import SMALLER_SIZES, memory_errors
from batchgen.engine.batch import PendingTokens, build_input
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.graphs import CaptureFailed, CudaRecorder
from batchgen.engine.replay import PaddingSlot, StepReplays, is_decode
from batchgen.engine.schedule import Schedule
from batchgen.kernels.inputs import ModelInput
from batchgen.model.decoder import Decoder
from batchgen.model.state import KV_DTYPES, allocate


class ModelRunner:
    """A model with the KV blocks and convolution slots that a scheduler of these sizes hands out.

    CUDA graphs of its decode steps are recorded here, before the first step. ``notes`` are for the user.

    Attributes:
        likeliest: int64 [rows], the likeliest token of each row of logits that ``run`` gave last, -1 for a row that is
            not finite; None if the step did not find them. Valid until the next run, which still takes them as pending.
    """

    @memory_errors("allocating KV blocks and convolution state", SMALLER_SIZES)
    def __init__(self, model: Decoder, config: SchedulerConfig) -> None:
        self.model = model
        self.block_size = config.block_size
        padding = PaddingSlot(config.num_blocks, config.max_num_seqs, config.block_size) if has_graphs(model) else None
        num_more = 0 if padding is None else 1
        self.state = allocate(
            model.config,
            num_blocks=config.num_blocks + num_more,
            block_size=config.block_size,
            num_slots=config.max_num_seqs + num_more,
            dtype=model.dtype,
            device=model.device,
            kv_dtype=KV_DTYPES.get(config.kv_dtype),
            max_drafts=config.max_drafts,
        )
        recorder = model.kernels.recorder() if padding is None else CudaRecorder(model.device)
        self.replays: StepReplays | None = None
        if recorder is not None:
            self.replays = StepReplays(model, self.state, recorder, padding, config.max_model_len)
        self.likeliest: Tensor | None = None
        self.notes: list[str] = []
        if self.replays is not None and padding is not None:
            try:
                self.replays.record_all()
            except CaptureFailed as error:
                self._launch_all(error)

    def _launch_all(self, error: CaptureFailed) -> None:
        """Do without recordings."""
        self.replays = None
        self.notes.append(f"steps could not be recorded as CUDA graphs, so they take longer: {error}")

    def run(self, schedule: Schedule, pending: PendingTokens | None = None) -> Tensor:
        """Logits [rows, vocab_size]: one row per ``schedule.completing``, then one per token of ``schedule.scored``.

        ``pending`` has the ids of the schedule's pending tokens, if there are any.
        """
        inputs = build_input(schedule, self.block_size, self.model.config.tail_reach)
        if schedule.resumed:
            last = [s.block_table[s.num_computed_tokens // self.block_size - 1] for s in schedule.resumed]
            self.state.restore_conv(last, [s.conv_slot for s in schedule.resumed if s.conv_slot is not None])
        return self.forward(inputs, pending)

    def forward(self, inputs: ModelInput, pending: PendingTokens | None) -> Tensor:
        """``run`` for CPU inputs that are built already."""
        if self.replays is not None and is_decode(inputs, self.replays.most_each):
            try:
                logits = self.replays.run(inputs, pending)
                newest = self.replays.newest
                self.likeliest = None if newest is None else newest[: len(logits)]
                return logits
            except CaptureFailed as error:
                self._launch_all(error)
        self.likeliest = None
        max_position = int(inputs.positions.max())
        inputs = inputs.to(self.model.device)
        if pending is not None:
            pending.into(inputs.token_ids)
        return self.model.forward(inputs, self.state, max_position)


def has_graphs(model: Decoder) -> bool:
    """Whether the model's steps can be CUDA graphs: its kernels ask the device nothing."""
    return model.device.type == "cuda" and model.kernels.name == "cuda"
