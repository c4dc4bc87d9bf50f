"""Runs the model on the device for one schedule; owns the cached state and nothing else."""

from __future__ import annotations

from torch import Tensor

from batchgen.engine.batch import build_input
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.scheduler import Schedule
from batchgen.model.cache import allocate
from batchgen.model.lfm2 import Lfm2Model


class ModelRunner:
    """A model with the KV blocks and convolution slots that a scheduler of these sizes hands out."""

    def __init__(self, model: Lfm2Model, config: SchedulerConfig) -> None:
        self.model = model
        self.block_size = config.block_size
        self.state = allocate(
            model.config,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_slots=config.max_num_seqs,
            dtype=model.dtype,
            device=model.device,
        )

    def run(self, schedule: Schedule) -> Tensor:
        """Logits [num_completing, vocab_size] of the sequences that ``schedule.completing`` names, in its order."""
        inputs = build_input(schedule, self.block_size)
        max_position = int(inputs.positions.max())
        return self.model.forward(inputs.to(self.model.device), self.state, max_position)
