"""Runs the model on the device for one schedule; owns the cached state."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from batchgen.core.machine import SMALLER_SIZES, memory_errors
from batchgen.engine.graphs import CaptureFailed
from batchgen.engine.model_input import build_input
from batchgen.engine.replay import Fetched, fetch_ids, for_sampling, is_asynchronous, state_and_replays
from batchgen.engine.schedule import Schedule
from batchgen.engine.sizes import SchedulerConfig
from batchgen.kernels.inputs import StepOutput
from batchgen.model.decoder import Decoder


class ModelRunner:
    """A model with the KV blocks and convolution slots that a scheduler of these sizes hands out.

    Attributes:
        overlaps: whether a step is launched before the last one has ended; by default if launches return early.
        fetch: copies token ids to the host.
        notes: lines for the user.
    """

    @memory_errors("allocating KV blocks and convolution state", SMALLER_SIZES)
    def __init__(
        self,
        model: Decoder,
        config: SchedulerConfig,
        *,
        overlaps: bool | None = None,
        fetch: Callable[[Tensor], Fetched] = fetch_ids,
    ) -> None:
        self.model, self.block_size = model, config.block_size
        self.overlaps = is_asynchronous(model.device) if overlaps is None else overlaps
        self.fetch = fetch
        self.state, self.replays = state_and_replays(model, config)
        self.notes = [*model.kernels.notes]
        try:
            if self.replays is not None:
                self.replays.record_all()
        except CaptureFailed as error:
            self._drop_recordings(error)

    def _drop_recordings(self, error: CaptureFailed) -> None:
        self.replays = None
        self.notes.append(f"steps could not be recorded, so they take longer: {error}")

    def run(self, schedule: Schedule) -> StepOutput:
        """A row of logits per sequence in ``schedule.completing``, then one per token of ``schedule.scored``."""
        config = self.model.config
        inputs = build_input(schedule, self.block_size, config.tail_reach, is_causal=config.is_causal)
        if schedule.resumed:
            last = [s.block_table[s.num_computed_tokens // self.block_size - 1] for s in schedule.resumed]
            self.state.restore_conv(last, [s.conv_slot for s in schedule.resumed if s.conv_slot is not None])
        if self.replays is not None and self.replays.takes(inputs):  # with some kernels nearly every step
            try:
                return self.replays.run(inputs)
            except CaptureFailed as error:
                self._drop_recordings(error)
        max_position = int(inputs.positions.max())
        inputs = inputs.to(self.model.device)
        if inputs.pending is not None:
            inputs.pending.into(inputs.token_ids)
        return StepOutput(for_sampling(self.model.forward(inputs, self.state, max_position)))
