"""Launches of one decode step on a GPU: each costs microseconds there, whatever it computes."""

from __future__ import annotations

import pytest
from launches import decode_launches
from triton_device import OnDevice

from batchgen.model.config import CONV
from batchgen.model.registry import dummy_config

LFM2_350M = dummy_config("dummy:LFM2-350M")
AROUND = {"embedding": 1, "first norm": 1, "rows with logits": 2, "head": 1}


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("num_seqs", [1, 100, 256])
def test_a_decode_step_launches_no_more_than_its_layers_need(num_seqs: int, batch_invariant: bool) -> None:
    found = decode_launches(LFM2_350M, num_seqs, OnDevice(batch_invariant=batch_invariant).kernels)
    half_layers = 2 * len(LFM2_350M.layers)
    num_conv = sum(layer.mixer == CONV for layer in LFM2_350M.layers)
    num_attention = len(LFM2_350M.layers) - num_conv
    assert found["matmul_in_parts"] == (half_layers if batch_invariant else 0)
    assert found["add_and_norm"] == half_layers, "each norm but the first belongs to a sum"
    assert found["rms_norm"] == 1
    assert found.total() == 8 * num_conv + 9 * num_attention + sum(AROUND.values()), found
