"""On a real GPU only: recorded = launched, and the device = the CPU, for a whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_model import CPU, STD, engine_for, ragged_input, random_requests, random_state, raw_config, solo, tokens_of
from torch import Tensor
from triton_device import DEVICE, HAS_GPU, CudaKernels

from batchgen.core.records import SamplingParams
from batchgen.engine.replay import CudaRecorder, PaddingSlot, StepReplays, bucket
from batchgen.kernels.interface import Kernels
from batchgen.kernels.reference import ReferenceKernels
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.state import StateCache
from batchgen.model.weights import Init, RandomTensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")]

BLOCK_SIZE = 16
MOST_SEQS = 70
NO_FORECAST = {"forecast_memory": False}  # so that memory does run out, and sequences are preempted
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_ff_dim": 384,
    "vocab_size": 1000,
}


class MovedTensors(RandomTensors):
    """The CPU's random weights on another device, which would draw others."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, CPU, std=STD / 2)
        self.target = device

    def take(
        self, name: str, shape: tuple[int, ...], init: Init | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return super().take(name, shape, init, dtype).to(self.target)


def model_on(device: torch.device, dtype: torch.dtype, kernels: Kernels, family: str = "lfm2") -> Decoder:
    with torch.inference_mode():
        return Decoder(parse_config(raw_config(family, **SHAPE), "tiny"), MovedTensors(dtype, device), kernels)


def state_for(model: Decoder, num_blocks: int) -> StateCache:
    return random_state(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=MOST_SEQS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replayed_logits_equal_launched_ones_in_every_bucket(batch_invariant: bool, dtype: torch.dtype) -> None:
    model = model_on(DEVICE, dtype, CudaKernels(DEVICE, batch_invariant=batch_invariant))
    num_blocks = MOST_SEQS * 70
    launched, replayed = state_for(model, num_blocks), state_for(model, num_blocks)
    padding = PaddingSlot(num_blocks, MOST_SEQS, BLOCK_SIZE)
    graphs = StepReplays(model, replayed, CudaRecorder(DEVICE), padding, 4096)
    for num_seqs in range(1, MOST_SEQS + 1):
        is_bucket = bucket(num_seqs, MOST_SEQS) == num_seqs
        for longest in (100, 1100):
            pasts = torch.randint(0, longest, (num_seqs,), generator=torch.Generator().manual_seed(num_seqs)).tolist()
            inputs, _ = ragged_input([(past, 1) for past in pasts], BLOCK_SIZE, seed=num_seqs)
            expected = model.forward(inputs.to(DEVICE), launched, longest)
            got = graphs.run(inputs)
            if batch_invariant:
                assert torch.equal(got, expected)
            else:
                most = 1e-5 if dtype == torch.float32 else 2e-2
                assert (got - expected).norm() / expected.norm() < most, f"{num_seqs} rows, a bucket: {is_bucket}"


@pytest.mark.parametrize("family", ["lfm2", "lfm3"])
def test_float32_tokens_equal_those_of_the_cpu_reference(family: str) -> None:
    requests = random_requests(40, seed=0, prompt=(1, 90), output=(1, 60), vocab_size=1000)
    drawn = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01)
    requests += [replace(r, key=100 + r.key, params=replace(drawn, max_tokens=9)) for r in requests[:10]]
    model = model_on(DEVICE, torch.float32, CudaKernels(DEVICE), family)
    engine = engine_for(
        model, num_blocks=60, block_size=BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=64, **NO_FORECAST
    )
    got = tokens_of(engine.run(requests))
    assert engine.stats.num_preemptions
    assert got == solo(model_on(CPU, torch.float32, ReferenceKernels(), family), requests)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=str)
def test_half_precision_logits_are_near_those_of_the_cpu_reference(dtype: torch.dtype, most: float) -> None:
    inputs, num_blocks = ragged_input([(0, 300), (0, 17), (0, 1), (0, 64)], BLOCK_SIZE)
    logits = []
    for model in (
        model_on(DEVICE, dtype, CudaKernels(DEVICE)),
        model_on(CPU, dtype, ReferenceKernels()),
        model_on(CPU, torch.float32, ReferenceKernels()),
    ):
        state = state_for(model, num_blocks)
        logits.append(model.forward(inputs.to(model.device), state, 300).double().cpu())
    got, same_dtype, exact = logits
    error, usual = (got - exact).norm() / exact.norm(), (same_dtype - exact).norm() / exact.norm()
    assert error < max(most, 2 * usual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariant_kernels_make_batched_and_preempted_tokens_those_of_a_row_alone(dtype: torch.dtype) -> None:
    requests = random_requests(30, seed=1, prompt=(1, 200), output=(1, 80), vocab_size=1000)
    model = model_on(DEVICE, dtype, CudaKernels(DEVICE, batch_invariant=True))
    engine = engine_for(
        model, num_blocks=60, block_size=BLOCK_SIZE, max_num_seqs=13, max_num_batched_tokens=50, **NO_FORECAST
    )
    got = tokens_of(engine.run(requests))
    assert engine.stats.num_preemptions
    assert got == solo(model, requests)
