"""The CUDA kernels against the reference: right at odd shapes, contained, and independent of what shares the batch."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
from families import RAW
from kernel_cases import INTERPRETED, Case, KvDtype, Shape, attend, dense, empty_cache, make_case, normal, rotary_table
from late_device import Operations
from reference_kernels import ReferenceKernels, key_columns
from tiny_model import packed_keys, ragged_input, random_requests, solo, tiny_model, tokens_of
from torch import Tensor
from torch.nn import functional
from triton_device import DEVICE, HAS_GPU, CudaKernels, InterpreterBuilder, OnDevice

from batchgen.core.records import SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.kernels import select as selection
from batchgen.kernels.cuda import attention as attention_kernels
from batchgen.kernels.cuda import rows as row_kernels
from batchgen.kernels.cuda import tuning
from batchgen.kernels.cuda.tiles import SplitCounters
from batchgen.kernels.interface import Heads, Kernels
from batchgen.kernels.quantize import quantize_weight
from batchgen.kernels.select import select
from batchgen.model import load, state
from batchgen.model.config import CONV, ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.registry import dummy_config
from batchgen.model.weights import RandomTensors

REFERENCE = ReferenceKernels()
META = torch.device("meta")
DTYPES = [torch.float32, torch.bfloat16]
KINDS = list(product(DTYPES, [None, torch.int8]))  # (what is computed, what is cached of it: None for the same)
pytestmark = INTERPRETED


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "out_features"), [(600, 33), (70, 1), (1, 1)])
def test_a_product_in_parts_has_the_bits_of_one_program_and_leaves_counters_at_zero(
    width: int, out_features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((70, width), (out_features, width), (out_features,))
    x, weight, bias = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    device = OnDevice()
    linear = device.linear(weight, bias)
    whole = linear(x)
    most = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert relative_error(whole, x.double() @ weight.double().T + bias.double()) < most
    for rows in (slice(0, 1), slice(5, 9), slice(60, 69)):
        assert torch.equal(linear(x[rows]), whole[rows])
    (counters,) = device.kernels._counters._counters
    assert not counters.any()
    monkeypatch.setattr(tuning, "FEW_ROWS", 0)  # in taller tiles
    assert torch.equal(linear(x), whole)
    monkeypatch.setattr(tuning, "MAX_ROWS_IN_PARTS", 0)
    assert torch.equal(linear(x), whole)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 100])
def test_a_product_is_rounded_before_it_is_added_and_the_sum_before_it_is_normed(
    width: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    device = OnDevice(batch_invariant=batch_invariant)
    x, h = normal(5, 70, seed=0, dtype=dtype), normal(5, width, seed=1, dtype=dtype)
    post, norm = (1 + normal(width, seed=seed, dtype=dtype) for seed in (2, 3))
    weight, bias = normal(width, 70, seed=4, dtype=dtype), normal(width, seed=5, dtype=dtype)
    for behind, added in ((None, None), (post, None), (None, bias)):
        linear = device.kernels.linear(weight.to(DEVICE), None if added is None else added.to(DEVICE))
        y = linear(x.to(DEVICE)).cpu()
        sums, normed = device.add_and_norm(linear, x, h, norm, 1e-5, behind)
        assert torch.equal(sums, h + (y if behind is None else device.rms_norm(y, behind, 1e-5)))
        assert torch.equal(normed, device.rms_norm(sums, norm, 1e-5))
        expected = REFERENCE.add_and_norm(REFERENCE.linear(weight, added), x, h, norm, 1e-5, behind)
        for got, close in zip((sums, normed), expected, strict=True):
            assert relative_error(got, close) < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("heads", "block_size"), [((3, 3, 16), 16), ((5, 1, 8), 3), ((4, 3, 64), 32)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_integers_and_their_scales_are_those_of_the_reference(
    heads: Shape, block_size: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    inputs, num_blocks = ragged_input([(0, 1), (300, 1), (0, 5), (31, 3)], block_size)
    qkv = 2.0 ** normal(inputs.num_tokens, 1, seed=1) * normal(
        inputs.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=2
    )
    turn = torch.stack((torch.ones(400, head_dim // 2), torch.zeros(400, head_dim // 2)))  # keys stay as they are
    caches = [empty_cache(inputs, num_blocks, block_size, num_kv_heads, head_dim, torch.int8) for _ in range(2)]
    for kernels, cache in zip((OnDevice(), REFERENCE), caches, strict=True):
        kernels.rope_and_cache(qkv.to(dtype), Heads(num_heads, head_dim, None, None, 1e-5), turn, inputs, cache)
    got, expected = ((cache.keys, cache.values, cache.scales) for cache in caches)
    assert all(map(torch.equal, got, expected)), "in the tokens' own slots, and nothing elsewhere"


def test_the_reference_keeps_keys_as_a_gpu_does_too() -> None:
    inputs, num_blocks = ragged_input([(0, 5), (31, 3)], 16)
    qkv, weight = normal(inputs.num_tokens, 4 * 24, seed=1), 1 + normal(24, seed=2)
    narrow = empty_cache(inputs, num_blocks, 16, 1, 24, torch.float32)
    wide = replace(narrow, keys=packed_keys(key_columns(narrow, torch.arange(num_blocks + 1)), pack=32))
    assert wide.keys.shape == (num_blocks + 1, 1, 1, 16, 32)
    for cache in (narrow, wide):
        REFERENCE.rope_and_cache(qkv, Heads(2, 24, weight, weight, 1e-5), rotary_table(40, 24), inputs, cache)
    assert torch.equal(*(key_columns(cache, torch.arange(num_blocks + 1)) for cache in (narrow, wide)))


# Single tokens and chunks; in the first span of a context, across its end, and on a later one.
PIECES = [(0, 1), (0, 7), (40, 1), (127, 1), (128, 1), (200, 1), (125, 9), (0, 70)]


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 64 positions, so that contexts the interpreter can cope with have several."""
    monkeypatch.setattr(attention_kernels, "SPAN", 64)


def assert_attends(case: Case, block_size: int) -> None:
    is_bfloat16 = case.keys[0].dtype == torch.bfloat16
    close = {"rtol": 2**-6, "atol": 2**-6} if is_bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for got, expected in zip(attend(OnDevice(), case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, **close)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [((6, 2, 24), 3, 3), ((4, 1, 16), 64, 100), ((3, 3, 16), 32, 0), ((6, 2, 24), 64, 0), ((12, 1, 16), 3, 0)],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), KINDS, ids=str)
def test_attention_over_a_window_with_gates_or_over_all_equals_dense_attention(
    heads: Shape, block_size: int, window: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    assert_attends(make_case(PIECES, heads, dtype, block_size, kv_cache_dtype, window, is_gated=window > 0), block_size)


@pytest.mark.usefixtures("short_spans")
def test_in_float16_no_weight_of_an_integer_value_is_too_small_to_count() -> None:
    case = make_case([(150, 1), (60, 9)], (4, 2, 16), torch.float16, 1, torch.int8)
    case = replace(case, values=[value * 2**-10 for value in case.values])
    for got, expected in zip(attend(OnDevice(), case, 16), dense(case), strict=True):
        assert relative_error(got, expected) < 2**-7


@pytest.mark.slow
def test_attention_equals_dense_attention_over_full_spans() -> None:
    assert_attends(make_case([(511, 1), (512, 1), (500, 20)], (4, 2, 64), torch.bfloat16, seed=0), 64)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), KINDS, ids=str)
def test_attention_has_the_same_bits_whatever_shares_the_batch(dtype: torch.dtype, kv_cache_dtype: KvDtype) -> None:
    case = make_case([(100, 1), (20, 5), (64, 2)], (4, 2, 16), dtype, 2, kv_cache_dtype)
    together = attend(OnDevice(), case, 16)
    assert all(map(torch.equal, attend(OnDevice(), case, 64, seed=1), together)), "other blocks, other block size"
    for row, expected in enumerate(together):
        assert torch.equal(attend(OnDevice(), case.only(row), 16)[0], expected)


@pytest.fixture(params=[1, 2])
def turn_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the interpreter take the programs along one axis of a grid in another order."""
    if HAS_GPU:
        pytest.skip("a GPU takes programs in an order of its own")
    set_grid_idx = InterpreterBuilder.set_grid_idx

    def turn(axis: int) -> None:
        def turned(builder: InterpreterBuilder, *place: int) -> None:
            at, size = list(place), builder.grid_dim[axis]
            at[axis] = size - 1 - at[axis] if request.param == 2 else (at[axis] + 1) % size
            set_grid_idx(builder, *at)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", turned)

    return turn


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("window", [0, 150])
def test_spans_are_merged_in_order_whichever_comes_last_and_counters_are_left_at_zero(
    window: int, turn_programs: Callable[[int], None]
) -> None:
    case = make_case([(200, 1), (20, 5), (64, 1)], (2, 1, 16), torch.float32, 2, window=window)
    device = OnDevice()
    expected = attend(device, case, 16)
    turn_programs(2)
    assert all(map(torch.equal, attend(device, case, 16), expected))
    (counters,) = device.kernels._counters._counters
    assert not counters.any()


def test_parts_of_a_product_are_added_up_in_order_whichever_comes_last(turn_programs: Callable[[int], None]) -> None:
    linear, x = OnDevice().linear(normal(40, 300, seed=1)), normal(70, 300, seed=0)
    expected = linear(x)
    turn_programs(1)
    assert torch.equal(linear(x), expected)


def test_counters_stay_where_recordings_found_them() -> None:
    counters = SplitCounters()
    few = counters.at_least(5, DEVICE)
    assert counters.at_least(len(few), DEVICE) is few
    more = counters.at_least(len(few) + 1, DEVICE)
    assert len(more) > len(few)
    assert more.dtype is torch.int32
    assert counters._counters[0] is few


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("window", [0, 3, 50])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), KINDS, ids=str)
def test_batch_invariant_attention_has_the_same_bits_however_a_prompt_is_cut(
    window: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    whole = make_case([(0, 140)], (2, 1, 16), dtype, 3, kv_cache_dtype, window, is_gated=window > 0)
    expected = attend(OnDevice(), whole, 16)[0]
    starts = [0, 63, 64, 65, 128, 129, 136, 140]
    cuts = [whole.chunk(start, end - start) for start, end in pairwise(starts)]
    assert torch.equal(torch.cat([attend(OnDevice(), cut, 32)[0] for cut in cuts]), expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_equals_torch(dtype: torch.dtype, batch_invariant: bool) -> None:
    x, weight = normal(70, 100, seed=0, dtype=dtype), normal(130, 100, seed=1, dtype=dtype)
    bias, residual = normal(130, seed=2, dtype=dtype), normal(70, 130, seed=3, dtype=dtype)
    for b in (None, bias):
        linear = OnDevice(batch_invariant=batch_invariant).linear(weight, b)
        expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
        most = 2**-7 if dtype == torch.bfloat16 else 1e-6
        assert relative_error(linear(x), expected) < most
        assert relative_error(linear(x, residual), expected + residual) < most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_product_equals_the_reference(dtype: torch.dtype) -> None:
    gate, up = (normal(70, 100, seed=seed, dtype=dtype) for seed in (1, 2))
    x = normal(5, 100, seed=0, dtype=dtype)
    got = OnDevice().kernels.gated_linear(gate.to(DEVICE), up.to(DEVICE))(x.to(DEVICE)).cpu()
    assert relative_error(got, REFERENCE.gated_linear(gate, up)(x)) < (2**-6 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_8_bits_multiply_as_the_numbers_they_stand_for(dtype: torch.dtype, batch_invariant: bool) -> None:
    weight, x = normal(33, 80, seed=1, dtype=dtype), normal(5, 80, seed=0, dtype=dtype)
    numbers = quantize_weight(weight).dequantize(dtype)
    expected = OnDevice(batch_invariant=batch_invariant).linear(numbers)(x)
    assert torch.equal(OnDevice(batch_invariant=batch_invariant, weights="int8").linear(weight)(x), expected)
    assert not torch.equal(numbers, weight)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What stands in the way of Triton is asked once for each device otherwise."""
    selection.triton_obstacle.cache_clear()
    yield
    selection.triton_obstacle.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_cuda_device_gets_these_kernels_and_plain_torch_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, tried = [], []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(selection, "_launch_one", tried.append)
    device = torch.device("cuda", 3)
    assert select(device, torch.float32).name == "cuda"
    current.clear()
    assert select(device, torch.bfloat16).name == "cuda"
    assert current == [device], "Triton launches on the current device"
    assert select(torch.device("cuda"), torch.bfloat16).name == "cuda"
    assert current == [device], "set_device takes no device without an index"
    assert tried == [device, torch.device("cuda")], "each is tried once"
    selection.triton_obstacle.cache_clear()
    monkeypatch.setattr(selection, "find_spec", lambda _: None)
    assert select(device, torch.bfloat16).name == "plain"


NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs")
NO_DRIVER = AssertionError("libcuda.so cannot found!")
OUT_OF_RESOURCES = type("OutOfResources", (Exception,), {})()  # Triton's errors have no base of their own
NO_HEADERS = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "cuda_utils.c"])


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("capability", "error", "found"),
    [
        ((7, 5), None, "compute capability is 7.5; the kernels need 8.0"),
        ((11, 0), "rocm", "are written for NVIDIA's GPUs"),
        (
            (9, 0),
            NO_COMPILER,
            r"Failed to find C compiler.*needs a C compiler and Python's headers \(gcc, python3-dev\)",
        ),
        ((9, 0), NO_HEADERS, "cuda_utils.c.*needs a C compiler"),
        ((9, 0), NO_DRIVER, "libcuda.so cannot found!.*needs a C compiler"),
        ((9, 0), OUT_OF_RESOURCES, "OutOfResources.*needs a C compiler"),
    ],
)
def test_on_a_gpu_that_triton_cannot_use_plain_torch_computes_and_says_why(
    capability: tuple[int, int], error: Exception | str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_: torch.device) -> None:
        if isinstance(error, Exception):
            raise error

    monkeypatch.setattr(torch.version, "hip", "6.4" if error == "rocm" else None)
    for name, value in {"is_available": True, "device_count": 1, "get_device_capability": capability}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(selection, "_launch_one", launch)
    monkeypatch.setattr(load, "Decoder", lambda config, source, kernels: kernels)
    kernels = cast("Kernels", load.load_model("dummy:LFM2-350M", device="cuda:0"))
    assert kernels.name == "plain"
    assert re.fullmatch(rf"device 'cuda:0': .*{found}.*; plain torch computes, .* depend on the batch", *kernels.notes)


@pytest.mark.usefixtures("asked_anew")
def test_a_model_that_is_not_causal_is_computed_by_plain_torch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "triton_obstacle", lambda _: "")
    kernels = select(torch.device("cuda", 0), torch.float32, is_causal=False)
    assert (kernels.name, len(kernels.notes)) == ("plain", 1)


def test_products_of_half_precision_are_summed_in_float32() -> None:
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    for name in names:
        setattr(matmul, name, True)
    CudaKernels()
    assert [getattr(matmul, name) for name in names] == [False, False]


@pytest.mark.skipif(HAS_GPU, reason="this is for a model whose weights are on the CPU; test_cuda_device has the other")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", RAW)
def test_a_decode_step_of_every_family_gives_the_logits_of_the_reference(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, num_blocks = ragged_input([(0, 1), (5, 1), (20, 1)], 8)
    monkeypatch.setattr(state, "key_pack", lambda _dtype, _device, width: width)  # as on a GPU
    found = []
    for kernels in (OnDevice().kernels, REFERENCE):
        model = tiny_model(dtype, kernels, model_type=family)
        sizes = {"num_blocks": num_blocks, "block_size": 8, "num_slots": inputs.num_seqs}
        zeros = state.allocate(model.config, **sizes, dtype=dtype, device=model.device)
        found.append(model.forward(inputs, zeros, 20))
    assert relative_error(*found) < (2**-5 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.skipif(HAS_GPU, reason="this is for a model whose weights are on the CPU; test_cuda_device has the other")
@pytest.mark.parametrize(
    ("shape", "kv_cache_dtype"),
    [
        ({"num_hidden_layers": 2, "full_attn_idxs": [1]}, "auto"),
        ({"num_hidden_layers": 2, "full_attn_idxs": [1]}, "int8"),
        ({"model_type": "lfm3", "sliding_window": 6}, "auto"),
        ({"model_type": "lfm3", "sliding_window": 6}, "int8"),
    ],
    ids=["lfm2", "lfm2-int8", "lfm3", "lfm3-int8"],
)
def test_a_model_generates_what_the_reference_generates(
    shape: dict[str, Any], kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = random_requests(2, seed=1, prompt=(1, 20), output=(2, 3))
    drawn = random_requests(1, seed=2, prompt=(3, 9), output=(2, 2), params=SamplingParams(temperature=0.8, top_k=20))
    requests = [*greedy, *(replace(r, key=10 + r.key) for r in drawn)]
    monkeypatch.setattr(state, "key_pack", lambda _dtype, _device, width: width)  # as on a GPU
    model = tiny_model(kernels=OnDevice().kernels, **shape)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8, "kv_cache_memory": 1 << 20}
    got = tokens_of(Engine(model, EngineConfig(kv_cache_dtype=kv_cache_dtype, **sizes)).run(requests))
    monkeypatch.undo()
    assert got == solo(tiny_model(kernels=REFERENCE, **shape), requests, kv_cache_dtype)


class Shapes(RandomTensors):
    """Weights without contents."""

    def take(self, name: str, shape: tuple[int, ...], init: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=META)


def decode_launches(config: ModelConfig, num_seqs: int, kernels: CudaKernels) -> Counter[str]:
    """Launches of a step with one token for each of ``num_seqs`` sequences, when it is run a second time.

    Kernels of Triton are counted instead of run; tensors have shapes and no contents.
    """
    with torch.inference_mode():
        model = Decoder(config, Shapes(torch.bfloat16, META), kernels)
    inputs, num_blocks = ragged_input([(70 + i, 1) for i in range(num_seqs)], 64)
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": 64, "num_slots": num_seqs}
    caches = state.allocate(config, **sizes, dtype=torch.bfloat16, device=META)
    model.rotary.upto(1024)
    on_meta = inputs.to(META)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, Operations() as counted:
            found = counted.found
            patch.setattr(type(row_kernels.rms_norm), "run", lambda self, *_, f=found, **__: f.update([self.__name__]))
            logits = model.forward(on_meta, caches, 1000)
    assert logits.shape == (num_seqs, config.vocab_size)
    return found


# A launch costs microseconds on a GPU, whatever it computes.
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("num_seqs", [1, 100, 256])
def test_a_decode_step_launches_no_more_than_its_layers_need(num_seqs: int, batch_invariant: bool) -> None:
    config = dummy_config("dummy:LFM2-350M")
    around = {"embedding": 1, "first norm": 1, "rows with logits": 2, "head": 1}
    found = decode_launches(config, num_seqs, OnDevice(batch_invariant=batch_invariant).kernels)
    half_layers = 2 * len(config.layers)
    num_conv = sum(layer.mixer == CONV for layer in config.layers)
    num_attention = len(config.layers) - num_conv
    assert found["matmul_in_parts"] == (half_layers if batch_invariant else 0)
    assert found["add_and_norm"] == half_layers, "each norm but the first belongs to a sum"
    assert found["rms_norm"] == 1
    assert found.total() == 8 * num_conv + 9 * num_attention + sum(around.values()), found
