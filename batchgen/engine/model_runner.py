"""Runs the model on the device for one schedule; owns the cached state and nothing else."""

from __future__ import annotations

from torch import Tensor

from batchgen.core.machine import SMALLER_SIZES, memory_errors
from batchgen.engine.batch import Feed, build_input
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.graphs import CudaRecorder, DecodeGraphs, can_record
from batchgen.engine.replay import StepReplays
from batchgen.engine.sequence import Schedule
from batchgen.engine.static_input import Spare
from batchgen.model.decoder import Decoder
from batchgen.model.state import allocate


class ModelRunner:
    """A model with the KV blocks and convolution slots that a scheduler of these sizes hands out."""

    @memory_errors("allocating KV blocks and convolution state", SMALLER_SIZES)
    def __init__(self, model: Decoder, config: SchedulerConfig) -> None:
        self.model = model
        self.block_size = config.block_size
        num_spare = 1 if can_record(model) else 0
        self.state = allocate(
            model.config,
            num_blocks=config.num_blocks + num_spare,
            block_size=config.block_size,
            num_slots=config.max_num_seqs + num_spare,
            dtype=model.dtype,
            device=model.device,
        )
        self.graphs: DecodeGraphs | StepReplays | None = None
        if num_spare:
            spare = Spare(config.num_blocks, config.max_num_seqs, config.block_size)
            self.graphs = DecodeGraphs(model, self.state, spare, CudaRecorder(model.device), config.max_model_len)
        elif (recorder := model.kernels.recorder()) is not None:
            self.graphs = StepReplays(model, self.state, recorder, config.block_size)

    def run(self, schedule: Schedule, feed: Feed | None = None) -> Tensor:
        """Logits [rows, vocab_size]: a row for each of ``schedule.completing``, then one a token of ``.scored``.

        ``feed`` has the ids of the schedule's pending tokens, if there are any.
        """
        inputs = build_input(schedule, self.block_size, self.model.config.tail_reach)
        if schedule.resumed:
            last = [s.block_table[s.num_computed_tokens // self.block_size - 1] for s in schedule.resumed]
            self.state.restore_conv(last, [s.conv_slot for s in schedule.resumed if s.conv_slot is not None])
        if self.graphs is not None and self.graphs.takes(inputs):
            return self.graphs.run(inputs, feed)
        max_position = int(inputs.positions.max())
        inputs = inputs.to(self.model.device)
        if feed is not None:
            feed.into(inputs.token_ids)
        return self.model.forward(inputs, self.state, max_position)
