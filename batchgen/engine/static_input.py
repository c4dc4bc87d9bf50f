"""Inputs of decode steps at fixed addresses, for back ends that run a recorded step again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.inputs import ModelInput

_LEAST_BLOCKS = 16
_ALIGNMENT = 64  # bytes: what vector loads want, and cache lines of their own


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


def is_decode(inputs: ModelInput) -> bool:
    """Whether every sequence has one token in a step, and its logits are wanted in order."""
    n = inputs.num_seqs
    return inputs.num_tokens == n and torch.equal(inputs.logits_indices, torch.arange(n))


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
