"""The tensors of one forward pass over a ragged batch, built by the engine and read by the model.

All sequences' tokens lie end to end in one axis without padding; everything else says whose is whose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_BLOCK = 16  # most tokens of a sequence that attention treats as one piece of work


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; a GPU's is copied from pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Inputs of one step: ``num_tokens`` tokens of ``num_seqs`` sequences.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int32 [num_tokens], each token's place in its own sequence.
        cu_seqlens: int32 [num_seqs + 1], where each sequence's tokens start; the last is num_tokens.
        slot_mapping: int64 [num_tokens], block * block_size + offset: where a token's keys and values go.
        block_tables: int32 [num_seqs, max_blocks], the blocks of each sequence in order; 0 beyond its end.
        conv_slots: int32 [num_seqs], each sequence's row of convolution state.
        query_blocks: int32 [num_blocks, 3] of (sequence, first token, count): the tokens in pieces of
            at most ``QUERY_BLOCK`` that belong to one sequence.
        logits_indices: int64 [num_logits], the tokens whose logits are needed.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    conv_slots: Tensor
    query_blocks: Tensor
    logits_indices: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.token_ids.numel()

    @property
    def num_seqs(self) -> int:
        """Sequences that take part in this step."""
        return self.conv_slots.numel()

    def to(self, device: torch.device) -> ModelInput:
        """The same on another device."""
        if device.type == "cpu":
            return self
        return ModelInput(**{name: upload(getattr(self, name), device) for name in self.__slots__})
