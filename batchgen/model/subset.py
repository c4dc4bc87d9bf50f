"""The tokens of a step that later results depend on, found by a pure function as the step's other tensors are."""

from __future__ import annotations

import numpy as np
import torch

from batchgen.kernels.inputs import LogitsSubset, ModelInput, query_blocks


def build_subset(inputs: ModelInput, block_size: int, reach: int) -> LogitsSubset | None:
    """The tokens of CPU ``inputs`` that later results depend on after the last attention; None if all of them are.

    The convolutions after the last attention reach back ``reach`` tokens in all. So logits need a token and ``reach``
    before it; the convolution state at the end of a chunk or a KV block needs the last ``reach`` tokens. One token per
    sequence is always kept: kernels never see a sequence without tokens. If a token sees its whole text, the
    convolutions reach as far ahead, state is not kept, and each text has logits.
    """
    if inputs.num_tokens == inputs.num_seqs:
        return None
    positions, cu_seqlens, logits = (t.numpy() for t in (inputs.positions, inputs.cu_seqlens, inputs.logits_indices))
    sequences = np.repeat(np.arange(inputs.num_seqs), np.diff(cu_seqlens))
    changes = np.zeros(inputs.num_tokens + 1, dtype=np.int64)  # in the number of wanted tokens that need a token
    needs, ahead = [(logits, reach + 1)], 0 if inputs.is_causal else reach
    if inputs.is_causal:
        borders = np.flatnonzero((positions + 1) % block_size == 0)
        needs += [(borders, reach), (cu_seqlens[1:] - 1, max(reach, 1))]
    for wanted, count in needs:
        np.add.at(changes, np.maximum(wanted + 1 - count, cu_seqlens[sequences[wanted]]), 1)
        np.add.at(changes, np.minimum(wanted + 1 + ahead, cu_seqlens[sequences[wanted] + 1]), -1)
    rows = np.flatnonzero(changes[:-1].cumsum())
    if len(rows) == inputs.num_tokens:
        return None
    kept, bounds = torch.from_numpy(rows), np.searchsorted(rows, cu_seqlens)
    begins_run = np.diff(rows, prepend=-2) > 1
    begins_run[bounds[:-1]] = True
    starts = np.flatnonzero(begins_run)
    narrowed = ModelInput(
        token_ids=inputs.token_ids[kept],
        positions=inputs.positions[kept],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        slot_mapping=inputs.slot_mapping[kept],
        block_tables=inputs.block_tables,
        conv_slots=inputs.conv_slots,
        query_blocks=query_blocks(
            sequences[rows[starts]],
            starts,
            np.append(starts[1:], len(rows)),
            positions[rows],
            inputs.block_tables.numpy(),
            block_size,
            None if inputs.is_causal else np.diff(cu_seqlens)[sequences[rows[starts]]],
        ),
        logits_indices=torch.from_numpy(np.searchsorted(rows, logits)),
        subset=None,
        is_causal=inputs.is_causal,
        num_alone=inputs.num_alone,
    )
    return LogitsSubset(kept, narrowed)
