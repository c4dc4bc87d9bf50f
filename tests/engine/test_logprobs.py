"""The likeliest tokens of rows of logits, in their order, whatever the parts that a step is looked at in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_kernels import ReferenceKernels

from batchgen.engine import sampler
from batchgen.engine.sampler import likeliest, step_logprobs

WIDTHS = [1, 2, 9, 64, 640, 1001, 65_536]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_the_largest_and_of_equals_the_lowest(width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    logits[1] = logits[1].round()  # many equals
    logits[2, ::2] = -0.0
    logits[2, 1::2] = 0.0
    for k in (0, 1, 2, 20, 64, min(width // 2, 500), min(width, 1001)):
        ids, values = likeliest(logits, k)
        for row, found, tops in zip(logits.float().tolist(), ids.tolist(), values.tolist(), strict=True):
            wanted = sorted(range(width), key=lambda i: (-row[i], i))[: min(k, width)]
            assert found == wanted
            assert tops == [row[i] for i in wanted]


def test_a_step_in_parts_is_the_step_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    tokens = [*range(20)]
    whole = step_logprobs(ReferenceKernels(), logits, tokens, 7)
    monkeypatch.setattr(sampler, "_MAX_LOGITS", 900)
    parts = step_logprobs(ReferenceKernels(), logits, tokens, 7)
    for one, other in zip(whole, parts, strict=True):
        assert np.array_equal(one, other)
    wanted = logits.log_softmax(-1)
    assert np.allclose(whole.values, wanted[range(20), tokens], atol=1e-6)
    assert np.allclose(whole.top_values, wanted.topk(7).values, atol=1e-6)


def test_infinite_logits_have_their_place() -> None:
    logits = torch.zeros(1, 700)
    logits[0, 5], logits[0, 9] = torch.inf, -torch.inf
    ids, _ = likeliest(logits, 700)
    assert (ids[0, 0], ids[0, -1]) == (5, 9)
