"""Counts of the tokens of penalized sequences on the device: where steps overlap, the host learns the newest too late.

A row of counts belongs to a slot of convolution state. It is set from the tokens that the host knows when a sequence is
first sampled there, and each token is added where it is sampled. Rows are dense: a device passes over a vocabulary
faster than the host gathers the distinct tokens, as ``observers.HostTokenCounts`` does for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import upload

_ROWS = 64  # penalized at a time: what is computed on the way is several times as large as their logits


class DeviceTokenCounts:
    """How often each token was seen, by slot: 0 never, 1 in the prompt, and 1 more for each time it was generated."""

    def __init__(self, num_slots: int) -> None:
        self._times = torch.empty(num_slots, 0, dtype=torch.int32)  # [num_slots, vocab_size] from the first use on
        self._owners: list[Sequence | None] = [None] * num_slots
        self._num_known = [0] * num_slots  # tokens of the owner that are counted

    def penalize(self, logits: Tensor, rows: Sequence_[int], sequences: Sequence_[Sequence]) -> Tensor:
        """Lower logits as ``sampler.penalize`` does, bit for bit; the slots of ``sequences``, int64 [num_penalized].

        Row ``rows[i]`` of the float32 logits [num_seqs, vocab_size] is what follows ``sequences[i]``.
        """
        if not self._times.numel():
            self._times = torch.zeros(len(self._owners), logits.shape[1], dtype=torch.int32, device=logits.device)
        slots = [self._counted(sequence) for sequence in sequences]
        indexes = upload(torch.tensor([rows, slots]), logits.device)
        places, of_slots = indexes[0], indexes[1]
        params = [s.request.params for s in sequences]
        penalties = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        columns = upload(torch.from_numpy(np.array(penalties, dtype=np.float32)), logits.device)
        for start in range(0, len(slots), _ROWS):
            part = slice(start, start + _ROWS)
            repetition, frequency, presence = columns[part].T.unsqueeze(2)
            times, given = self._times[of_slots[part]], logits[places[part]]
            lowered = torch.where(given > 0, given / repetition, given * repetition)
            lowered -= frequency * (times - 1).clamp(min=0)
            lowered -= presence * (times > 1)
            logits[places[part]] = torch.where(times > 0, lowered, given)
        return of_slots

    def add(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count the tokens that were sampled behind the sequences of ``penalize``; -1 ends its sequence."""
        ids = token_ids.clamp(min=0)
        times = self._times[slots, ids]
        self._times[slots, ids] = times + 1 + (times == 0)

    def _counted(self, sequence: Sequence) -> int:
        """The slot of a sequence that is about to be sampled, once all of its tokens are counted there."""
        slot = sequence.conv_slot
        assert slot is not None
        if self._owners[slot] is not sequence or self._num_known[slot] != sequence.num_tokens:
            assert not sequence.num_in_flight, "tokens are to be counted that the host does not know"
            times = dict.fromkeys(sequence.request.prompt_token_ids, 1)
            for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
                times[token_id] = times.get(token_id, 1) + 1
            ids, counts = upload(torch.tensor([[*times], [*times.values()]]), self._times.device)
            self._times[slot] = 0
            self._times[slot, ids] = counts.int()
            self._owners[slot] = sequence
        self._num_known[slot] = sequence.num_tokens + 1  # with the one that is sampled now
        return slot
