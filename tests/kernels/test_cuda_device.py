"""On a real GPU only: recorded = launched, and the device = the CPU, for a whole model."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import rotary_table
from reference_kernels import ReferenceKernels
from tiny_model import CPU, STD, engine_for, ragged_input, random_requests, random_state, raw_config, solo, tokens_of
from torch import Tensor
from triton_device import DEVICE, HAS_GPU, CudaKernels

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.core.records import SamplingParams
from batchgen.engine import Engine
from batchgen.engine.graphs import CaptureFailed, CudaGraphs, CudaRecorder, PaddingSlot, bucket
from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import Heads, Kernels
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.state import StateCache
from batchgen.model.weights import Init, RandomTensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")]

JOBS = Path(__file__).parents[2] / "jobs"
BLOCK_SIZE = 16
MAX_SEQS = 70
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
    return random_state(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=MAX_SEQS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_replayed_logits_equal_launched_ones_in_every_bucket(batch_invariant: bool, dtype: torch.dtype) -> None:
    model = model_on(DEVICE, dtype, CudaKernels(DEVICE, batch_invariant=batch_invariant))
    num_blocks = MAX_SEQS * 70
    launched, replayed = state_for(model, num_blocks), state_for(model, num_blocks)
    padding = PaddingSlot(num_blocks, MAX_SEQS, BLOCK_SIZE)
    graphs = CudaGraphs(model, replayed, CudaRecorder(DEVICE), padding, 4096)
    for num_seqs in range(1, MAX_SEQS + 1):
        is_bucket = bucket(num_seqs, MAX_SEQS) == num_seqs
        for longest in (100, 1100):
            pasts = torch.randint(0, longest, (num_seqs,), generator=torch.Generator().manual_seed(num_seqs)).tolist()
            inputs, _ = ragged_input([(past, 1) for past in pasts], BLOCK_SIZE, seed=num_seqs)
            expected = model.forward(inputs.to(DEVICE), launched, longest)
            got = graphs.run(inputs).logits
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
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_batch_invariant_kernels_make_batched_and_preempted_tokens_those_of_a_row_alone(
    kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    requests = random_requests(30, seed=1, prompt=(1, 200), output=(1, 80), vocab_size=1000)
    model = model_on(DEVICE, dtype, CudaKernels(DEVICE, batch_invariant=True))
    sizes = {"max_num_seqs": 13, "max_num_batched_tokens": 50, "kv_cache_dtype": kv_cache_dtype}
    engine = engine_for(model, num_blocks=60, block_size=BLOCK_SIZE, **sizes, **NO_FORECAST)
    got = tokens_of(engine.run(requests))
    assert engine.stats.num_preemptions
    assert got == solo(model, requests, kv_cache_dtype)


def small_engine(kernels: CudaKernels, **parts: Any) -> Engine:
    sizes = {"max_num_seqs": 13, "max_num_batched_tokens": 50}
    model = model_on(DEVICE, torch.float32, kernels)
    return engine_for(model, num_blocks=200, block_size=BLOCK_SIZE, parts=parts, **sizes, **NO_FORECAST)


def test_steps_that_overlap_give_the_tokens_of_single_ones() -> None:
    requests = random_requests(60, seed=2, prompt=(1, 90), output=(1, 80), vocab_size=1000)
    requests += [replace(r, key=100 + r.key, params=replace(r.params, temperature=1.0, seed=5)) for r in requests]
    kernels = CudaKernels(DEVICE, batch_invariant=True)
    assert tokens_of(small_engine(kernels).run(requests)) == tokens_of(
        small_engine(kernels, overlaps=False).run(requests)
    )


def test_an_engine_goes_on_when_another_one_ends() -> None:
    requests = random_requests(40, seed=3, prompt=(1, 60), output=(20, 80), vocab_size=1000)
    kernels = CudaKernels(DEVICE, batch_invariant=True)
    expected = tokens_of(small_engine(kernels).run(requests))
    survivor, other = small_engine(kernels), small_engine(kernels)
    answers = [answer for r in requests if (answer := survivor.submit(r)) is not None]
    for step in range(10_000):
        answers += survivor.step()
        if step < 40:
            other.submit(replace(requests[step % len(requests)], key=step))
            other.step()
        if step == 40:
            del other
            gc.collect()
            torch.cuda.empty_cache()
        if not survivor.has_work:
            break
    answers += survivor.flush()
    assert tokens_of(answers) == expected


def test_a_capture_that_fails_leaves_the_device_to_steps_launched_one_by_one() -> None:
    recorder = CudaRecorder(DEVICE)
    x = torch.arange(5, device=DEVICE)
    with pytest.raises(CaptureFailed):
        recorder.record(lambda: x * x.sum().item())  # which waits for the device
    assert (x + 1).tolist() == [1, 2, 3, 4, 5]
    _, replay = CudaRecorder(DEVICE).record(lambda: x * 2)  # of another engine: torch keeps the failed one's pool open
    assert replay().tolist() == [0, 2, 4, 6, 8]


def shifted(inputs: ModelInput, by: int, block_size: int) -> ModelInput:
    """The same inputs, with all blocks ``by`` further on."""
    tables, slots = inputs.block_tables + by, inputs.slot_mapping + by * block_size
    return replace(inputs, block_tables=tables, slot_mapping=slots).to(DEVICE)


def test_attention_far_into_a_pool_beyond_two_to_the_31_elements() -> None:
    block_size, kv_heads, dim, num_blocks = 32, 8, 64, 140_000
    generator = torch.Generator().manual_seed(0)
    base, used = ragged_input([(0, 100), (64, 1), (40, 7)], block_size)
    first = torch.randn(2, used, kv_heads, block_size, dim, generator=generator).bfloat16().to(DEVICE)
    qkv = torch.randn(base.num_tokens, 32 * dim, generator=generator).bfloat16().to(DEVICE)
    norm = torch.ones(dim, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.zeros(num_blocks + 1, kv_heads, dim, block_size, 1, dtype=torch.bfloat16, device=DEVICE)
    values = torch.zeros(num_blocks, kv_heads, block_size, dim, dtype=torch.bfloat16, device=DEVICE)
    assert keys.numel() > 2**31
    cache, kernels, found = KVCache(keys, values, block_size), CudaKernels(DEVICE), []
    for by in (0, num_blocks - used):
        keys[by : by + used, ..., 0] = first[0].transpose(2, 3)
        values[by : by + used] = first[1]
        inputs = shifted(base, by, block_size)
        rotary = rotary_table(128, dim).to(DEVICE)
        heads = Heads(16, dim, norm, norm, 1e-5)
        q = kernels.rope_and_cache(qkv, heads, rotary, inputs, cache)
        found.append(kernels.attention(q, qkv, heads, inputs, cache))
    assert torch.equal(*found) and found[0].isfinite().all()


def test_convolution_state_is_kept_far_into_a_pool_beyond_two_to_the_31_elements() -> None:
    block_size, width, num_blocks = 32, 1024, 1_060_000
    generator = torch.Generator().manual_seed(0)
    base, used = ragged_input([(0, 100), (63, 1)], block_size)
    blocks = torch.zeros(num_blocks, 2, width, dtype=torch.bfloat16, device=DEVICE)
    assert blocks.numel() > 2**31
    bcx = torch.randn(base.num_tokens, 3 * width, generator=generator).bfloat16().to(DEVICE)
    weight, bias = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((3, width), (width,)))
    found, kernels = [], CudaKernels(DEVICE)
    for by in (0, num_blocks - used):
        state = ConvState(torch.ones(2, 2, width, dtype=torch.bfloat16, device=DEVICE), blocks, block_size)
        out = kernels.short_conv(bcx, weight, bias, state, shifted(base, by, block_size))
        found.append((out, blocks[by : by + used].clone(), state.slots))
    assert all(torch.equal(near, far) for near, far in zip(*found, strict=True))
    assert found[0][1].any()


@pytest.mark.usefixtures("threads_as_before")
def test_the_quickstart_gives_the_texts_of_the_cpu(tmp_path: Path) -> None:
    texts = []
    for device in ("cpu", "auto"):
        out = tmp_path / device
        options = ["--device", device, "--dtype", "float32", "--output", str(out), "--quiet"]
        assert call(["run", str(JOBS / "quickstart.toml"), *options]) == ExitCode.OK
        report = json.loads((out / "report.json").read_text())
        assert report["numerics"]["device"] == ("cpu" if device == "cpu" else DEVICE.type)
        texts.append([json.loads(line)["text"] for line in (out / "outputs.jsonl").read_text().splitlines()])
    assert texts[0] == texts[1] and len(texts[0]) == 300
