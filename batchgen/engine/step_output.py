"""What a step gives, and what of it the next one takes without a wait for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.inputs import upload


class CaptureFailed(Exception):
    """A step could not be recorded; nothing is lost, as it can be launched kernel by kernel."""


class StepOutput(NamedTuple):
    """What a step gives: logits [num_rows, vocab_size], and maybe ``argmax_ids``.

    These are int64 [num_rows] on the device, the likeliest token of each row, -1 for a row that is not finite. The next
    step overwrites both.
    """

    logits: Tensor
    argmax_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Ids of tokens that the step before sampled, passed on to this step without leaving the device.

    Attributes:
        token_ids: int64 [num_sampled] on the device, -1 for a row of logits that is not finite.
        rows: int64 [num_in_flight] on the host, which of them are wanted; None: they are this step's tokens in order.
        places: int64 [num_in_flight] on the host, where they go among this step's tokens; None as ``rows`` is.
    """

    token_ids: Tensor
    rows: Tensor | None = None
    places: Tensor | None = None

    @torch.inference_mode()
    def into(self, token_ids: Tensor) -> None:
        """Write the ids into ``token_ids``, in launch order; -1 becomes 0, as it must not index the embeddings."""
        if self.rows is None or self.places is None:
            torch.clamp(self.token_ids, min=0, out=token_ids[: len(self.token_ids)])
            return
        rows, places = upload(torch.stack((self.rows, self.places)), token_ids.device)
        token_ids[places] = self.token_ids[rows].clamp(min=0)
