"""A row's bits on a GPU: the same alone and among others, on both sides of the row count at which kernels change.

Triton's interpreter adds up along K in order within a step, whatever the tile (``triton_device``): what these tests
show is that kernels for few rows and for many take the same steps and parts of K and round in the same places. That a
GPU's matrix instructions of different widths round alike can only be seen on one.
"""

from __future__ import annotations

import pytest
import torch
from families import RAW
from kernel_cases import INTERPRETED, normal
from repeats import nightly, slow
from tiny_model import engine_for, random_requests, tiny_model
from torch import Tensor
from triton_device import DEVICE, HAS_GPU, OnDevice

from batchgen.core.records import SamplingParams
from batchgen.kernels.cuda import linear as products
from batchgen.kernels.cuda import tuning
from batchgen.model import state

FEW = 4
ROWS = 7
DTYPES = [torch.float32, torch.bfloat16]
SUBSETS = [slice(0, ROWS), slice(0, FEW), slice(2, 3), slice(1, 6), slice(FEW, ROWS)]  # on both sides of ``FEW``
# Routers of experts are torch's, whose loops on a CPU round the last elements of a tensor in another way than others.
DENSE = [name for name in RAW if not name.endswith("_moe")]
pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW_ROWS", FEW)
    monkeypatch.setattr(tuning, "MAX_ROWS_IN_PARTS", ROWS - 1)


def half_layer(x: Tensor, h: Tensor, out_features: int, width: int) -> list[Tensor]:
    """What a layer's last product, the norm behind it, and the gated product of that give for rows x added to h."""
    kernels, dtype = OnDevice().kernels, x.dtype
    linear = kernels.linear(normal(out_features, width, seed=1, dtype=dtype).to(DEVICE))
    gated = kernels.gated_linear(*(normal(9, out_features, seed=s, dtype=dtype).to(DEVICE) for s in (2, 3)))
    weight = (1 + normal(out_features, seed=4, dtype=dtype)).to(DEVICE)
    sums, norm = kernels.add_and_norm(linear, x.to(DEVICE), h.to(DEVICE), weight, 1e-5)
    return [part.cpu() for part in (linear(x.to(DEVICE)), sums, norm, gated(norm))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "width"), [(70, 600), (40, 40), (130, 70), (1, 1)])
def test_a_row_has_the_same_bits_in_every_number_of_rows(out_features: int, width: int, dtype: torch.dtype) -> None:
    x, h = normal(ROWS, width, seed=0, dtype=dtype), normal(ROWS, out_features, seed=5, dtype=dtype)
    whole = half_layer(x, h, out_features, width)
    for rows in SUBSETS:
        got = half_layer(x[rows], h[rows], out_features, width)
        assert all(torch.equal(a, b[rows]) for a, b in zip(got, whole, strict=True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_steps_and_parts_of_k_do_not_follow_the_number_of_rows(dtype: torch.dtype) -> None:
    few, many = (torch.empty(n, 8, dtype=dtype) for n in (1, 2000))
    steps = {options["BLOCK_K"] for x in (few, many) for options in (products.block_sizes(x), products.tiles_of(x))}
    assert len(steps) == 1


@pytest.mark.parametrize(("shape", "num_parts"), [((1024, 4608), 4), ((1024, 1024), 4), ((3072, 1024), 1)])
def test_sums_of_weights_with_few_rows_fall_in_parts(shape: tuple[int, int], num_parts: int) -> None:
    assert OnDevice().kernels.linear(torch.empty(*shape)).num_parts == num_parts


def test_the_fingerprint_tells_cublas_from_products_in_one_order() -> None:
    assert "cublas" in OnDevice(batch_invariant=False).variant
    assert "cublas" not in OnDevice().variant


@pytest.mark.skipif(HAS_GPU, reason="this is for a model whose weights are on the CPU; test_cuda_device has the other")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [slow("lfm2", torch.float32), *(nightly(name, torch.bfloat16) for name in DENSE)],
)
def test_log_probabilities_of_a_row_are_those_of_the_row_alone(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TALL_TILE", (16, 32))
    monkeypatch.setattr(state, "key_pack", lambda _dtype, _device, width: width)  # as on a GPU
    model = tiny_model(dtype, OnDevice().kernels, model_type=family)
    requests = random_requests(6, seed=3, prompt=(1, 9), output=(1, 3), params=SamplingParams(logprobs=1))
    together = engine_for(model, num_blocks=40, block_size=8, max_num_seqs=6, max_num_batched_tokens=11)
    expected = {}
    for request in requests:
        alone = engine_for(model, num_blocks=4, block_size=8, max_num_seqs=1, max_num_batched_tokens=3)
        expected |= {answer.key: answer.first.logprobs for answer in alone.run([request])}
    assert {answer.key: answer.first.logprobs for answer in together.run(requests)} == expected
    assert all(expected.values())
