"""The self-test of kernels: no false alarm, each planted fault is found, and plain torch gives the tokens then."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import RAW, raw_config
from late_device import Again
from reference_kernels import ReferenceKernels
from repeats import slow
from tiny_model import CPU, random_state, tiny_model, tokens_of
from torch import Tensor

from batchgen.config.job import ModelSpec
from batchgen.core.errors import OutOfMemory
from batchgen.engine import invariants, self_test
from batchgen.engine.graphs import CaptureFailed, CudaGraphs, PaddingSlot
from batchgen.engine.load import load_weights
from batchgen.engine.self_test import SmallModel, find_fault, self_tested
from batchgen.kernels.cpu import backend, experts
from batchgen.kernels.cpu import linear as linears
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.parallel import Kernel
from batchgen.kernels.interface import Kernels
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.select import select
from batchgen.model import state
from batchgen.model.registry import dummy_config, parse_config

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else CPU  # of the kernels of a GPU
SAMPLE = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
COMPILED = Path(backend.__file__).parent / "compiled"
FORMS: dict[str, tuple[torch.dtype, str, dict[str, str]]] = {  # dtype, what is cached, integers
    "float32": (torch.float32, "auto", {}),
    "bfloat16": (torch.bfloat16, "auto", {}),
    "kv-bfloat16": (torch.float32, "bfloat16", {}),
    "w8a16": (torch.bfloat16, "int8", {"weights": "int8"}),
    "w8a8": (torch.float32, "int8", {"weights": "int8", "activations": "int8"}),
}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that a test has changed must not be remembered as this machine's."""
    monkeypatch.setattr(self_test, "cache_folder", lambda: tmp_path)


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that Triton's interpreter answers in seconds, and keys as a GPU keeps them; on a GPU all as it is."""
    if HAS_GPU:
        return
    monkeypatch.setattr(self_test, "_ON_CPU", ((1, 21), (3,), 33, (0, 1)))
    monkeypatch.setattr(self_test, "_NUM_DRAWS", 16)
    monkeypatch.setattr(state, "key_pack", lambda _dtype, _device, width: width)


def small_model(family: str, form: str = "float32", device: torch.device = CPU, **changes: int) -> SmallModel:
    dtype, kv_cache_dtype, _ = FORMS[form]
    return SmallModel(parse_config(raw_config(model_type=family, **changes), "tiny"), device, dtype, kv_cache_dtype)


def tokens(small: SmallModel, kernels: Kernels) -> Mapping[int, tuple[int, ...]]:
    runs = small.runs(kernels, small.device)
    return tokens_of(runs.engine(runs.requests).run(runs.requests))


def of_gpu(*case: str, is_quick: bool) -> Any:
    """A case of a GPU's kernels. On the interpreter it takes minutes: CI does those that differ most."""
    interpreted = pytest.mark.slow if is_quick else pytest.mark.nightly
    return pytest.param(*case, marks=pytest.mark.gpu if HAS_GPU else interpreted)


def cuda_kernels() -> Any:
    """Those of a GPU, on Triton's interpreter; a test that wants them is skipped without it."""
    from triton_device import CudaKernels

    return CudaKernels


# Triton's interpreter multiplies what is beyond a sequence's end too, before it is masked: NaN and inf.
quiet = pytest.mark.filterwarnings("ignore:(invalid|overflow|divide|All-NaN).*:RuntimeWarning")
QUICK = (("gemma3_text", "float32"),)
ON_GPU = [case for case in product(RAW, FORMS) if case[1] in ("float32", "bfloat16", "w8a16")]


@quiet
@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "form"), [of_gpu(*case, is_quick=case in QUICK) for case in ON_GPU])
@pytest.mark.usefixtures("few_requests")
def test_right_kernels_of_a_gpu_pass(family: str, form: str) -> None:
    kernels = cuda_kernels()(DEVICE, weights=FORMS[form][2].get("weights", "auto"))
    assert find_fault(kernels, small_model(family, form, DEVICE)) == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", RAW)
def test_right_kernels_of_a_cpu_pass(family: str, form: str) -> None:
    small = small_model(family, form)
    assert find_fault(select(CPU, small.dtype, **FORMS[form][2]), small) == ""


def test_texts_of_a_model_that_is_not_causal_are_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model("lfm2")
    small = replace(small, config=replace(small.config, is_causal=False, has_head=False))
    assert find_fault(CpuKernels(torch.float32), small) == ""
    plant(monkeypatch, "short_conv", lambda items, args: (max(items - 1, 1), args))
    assert find_fault(CpuKernels(torch.float32), small)


Launch = tuple[int, list[int]]  # items and arguments
Planted = Callable[[int, list[int]], Launch]
KEPT: list[Tensor] = []  # memory that planted arguments point to


def plant(monkeypatch: pytest.MonkeyPatch, name: str, change: Planted) -> None:
    """Change the items and arguments of each launch of the kernel of that name."""
    right = Kernel.launch

    def launch(self: Kernel, kind: Any, items: int, *args: int, **named: Any) -> None:
        if self._spec.name == name and items:
            items, changed = change(items, [*args])
            args = tuple(changed)
        right(self, kind, items, *args, **named)

    monkeypatch.setattr(Kernel, "launch", launch)


def argument(place: int, value: int | Tensor) -> Planted:
    """Another argument; of a tensor its address."""
    if isinstance(value, Tensor):
        KEPT.append(value)
        value = value.data_ptr()

    def change(items: int, args: list[int]) -> Launch:
        args[place] = value
        return items, args

    return change


def fewer(items: int, args: list[int]) -> Launch:
    """A thread's share is left out."""
    return items - items // 2, args


def one_row_fewer(place: int) -> Planted:
    def change(items: int, args: list[int]) -> Launch:
        args[place] = max(args[place] - 1, 1)
        return items, args

    return change


def zeros(dtype: torch.dtype) -> Tensor:
    return torch.zeros(1 << 20, dtype=dtype)


def bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))


# The kernel in whose launches each is planted, a family that launches it, and the number format.
LAUNCHES: dict[str, tuple[str, str, str, Planted]] = {
    "another row": ("take_rows", "lfm2", "float32", argument(1, zeros(torch.int64))),
    "half of the rows": ("take_rows", "lfm2", "float32", fewer),
    "another token's embedding": ("embedding_lookup_packed", "lfm2", "float32", argument(1, zeros(torch.int64))),
    "no residual behind a norm": ("rms_norm", "gemma3_text", "float32", argument(6, 0)),
    "another eps": ("rms_norm", "lfm2", "float32", argument(5, bits(0.05))),
    "an eps that is NaN": ("rms_norm", "lfm2", "bfloat16", argument(5, bits(float("nan")))),
    "the last row is not normed": ("rms_norm", "llama", "float32", one_row_fewer(3)),
    "no residual behind a product": ("matmul", "lfm2", "bfloat16", argument(2, 0)),
    "half of the products": ("matmul", "llama", "float32", fewer),
    "half of the products of integers": ("matmul_integers", "lfm2", "w8a8", fewer),
    "half of the unpacked products": ("matmul_unpacked", "lfm2", "w8a16", fewer),
    "inputs that are not rounded": ("quantize_rows", "lfm2", "w8a8", fewer),
    "sines in place of cosines": ("rope_and_cache", "llama", "float32", lambda n, a: (n, [*a[:8], a[9], *a[9:]])),
    "keys that are not normed": ("rope_and_cache", "qwen3", "float32", argument(5, 0)),
    "half of the keys": ("rope_and_cache", "llama", "float32", fewer),
    "another sequence's block": ("attention", "llama", "bfloat16", argument(11, zeros(torch.int32))),
    "a window of three": ("attention", "llama", "bfloat16", argument(-7, 3)),
    "no gates of heads": ("attention", "lfm3", "float32", argument(-6, 0)),
    "half of the query blocks": ("attention", "lfm2", "float32", fewer),
    "a state that is not kept": ("short_conv", "lfm2", "float32", argument(3, zeros(torch.float32))),
    "another sequence's state": ("short_conv", "lfm2", "bfloat16", argument(5, zeros(torch.int32))),
    "a block's end that is not kept": ("short_conv", "lfm2", "float32", argument(-3, zeros(torch.float32))),
    "positions that are zero": ("short_conv", "lfm2", "float32", argument(6, zeros(torch.int32))),
    "the last sequence is left out": ("short_conv", "lfm2", "float32", lambda n, args: (max(n - 1, 1), args)),
    "another scale": ("scale", "granite", "float32", argument(3, bits(1.001))),
    "no bias of the router": ("route", "lfm2_moe", "bfloat16", argument(3, 0)),
    "experts without their weights": ("add_up", "qwen3_moe", "bfloat16", argument(2, torch.ones(1 << 20))),
    "experts without a residual": ("add_up", "lfm2_moe", "float32", argument(3, zeros(torch.float32))),
    "a likeliest token's neighbour": ("argmax", "llama", "float32", argument(0, zeros(torch.float32))),
    "no top_k": ("sample", "llama", "float32", argument(4, zeros(torch.int64))),
    "no top_p": ("sample", "llama", "bfloat16", argument(5, torch.ones(1 << 20, dtype=torch.float64))),
    "no min_p": ("sample", "llama", "float32", argument(3, zeros(torch.float32))),
    "half of the log-probabilities": ("logsumexp", "llama", "float32", fewer),
    "a mask that forbids nothing": ("mask", "llama", "float32", argument(2, ~zeros(torch.int32))),
}


def test_faults_are_planted_in_each_kernel_of_a_cpu() -> None:
    kernels = [value for room in (backend, experts, linears) for value in vars(room).values()]
    names = {kernel._spec.name for kernel in kernels if isinstance(kernel, Kernel)}
    assert names - {name for name, *_ in LAUNCHES.values()} == {"sort"}


@pytest.mark.parametrize("fault", LAUNCHES)
def test_a_fault_in_a_launch_is_found_and_the_tokens_are_the_reference_s(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "has_matrix_unit", lambda unit: False)  # faults of tiles are below
    name, family, form, change = LAUNCHES[fault]
    small, formats = small_model(family, form), FORMS[form][2]
    plant(monkeypatch, name, change)
    kernels = self_tested(select(CPU, small.dtype, **formats), small)
    assert isinstance(kernels, PlainKernels)
    assert kernels.notes[-1].startswith("self-test: the kernels for this processor are wrong (")
    if not formats and small.dtype == torch.float32:
        assert tokens(small, kernels) == tokens(small, ReferenceKernels())


# As those of launches, of products and attention by tiles, which a test has in memory.
WHOLE_HEADS: dict[str, dict[str, int]] = {"lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1}}
TILES = {
    "half of the query blocks by tiles": ("attention", "lfm2", "bfloat16", fewer),
    "another sequence's block by tiles": ("attention", "lfm2", "bfloat16", argument(11, zeros(torch.int32))),
    "a window of three by tiles": ("attention", "lfm2", "bfloat16", argument(-7, 3)),
    "no residual behind tiles": ("matmul_bf16", "lfm2", "bfloat16", argument(2, 0)),
    "half of the tiles": ("matmul_bf16", "lfm2_moe", "bfloat16", fewer),
    "tiles of another row": ("matmul_bf16", "llama", "bfloat16", one_row_fewer(7)),
    "half of the unpacked tiles": ("matmul_bf16_unpacked", "lfm2", "w8a16", fewer),
}


def by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all that a matrix unit would by tiles in memory."""
    monkeypatch.setattr(linears, "has_matrix_unit", lambda unit: unit == "bf16")
    monkeypatch.setitem(backend._ATTENTION_KINDS, (torch.bfloat16, torch.bfloat16, True), "bf16_tiles")


@pytest.mark.parametrize("fault", TILES)
def test_a_fault_in_a_launch_of_tiles_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tiles(monkeypatch)
    name, family, form, change = TILES[fault]
    small, formats = small_model(family, form, **WHOLE_HEADS.get(family, {})), FORMS[form][2]
    assert find_fault(CpuKernels(small.dtype, **formats), small) == ""
    plant(monkeypatch, name, change)
    assert find_fault(CpuKernels(small.dtype, **formats), small)


# The module of a kernel, its attribute, and what is written in place of what in its source.
SOURCES: dict[str, tuple[Any, str, str, str, str]] = {
    "a sum that depends on the number of rows": (
        *(backend, "_RMS_NORM", "lfm2", "F32(math.sqrt(mean_square(x, start, width) + eps))"),
        "F32(math.sqrt(mean_square(x, start, width) * (F32(1.0) if rows < 5 else F32(1.0000001)) + eps))",
    ),
    "rows that read their neighbour": (
        *(backend, "_RMS_NORM", "lfm2", "mean_square(x, start, width)"),
        "mean_square(x, start if row == 0 else start - width, width)",
    ),
    "columns that are left out": (
        *(backend, "_RMS_NORM", "llama", "for i in range(0, width, LANES):\n            rest"),
        "for i in range(LANES, width, LANES):\n            rest",
    ),
    "experts added in an order of the rows": (
        *(experts, "_ADD_UP", "qwen3_moe", "for pair in range(row * num_active, (row + 1) * num_active):"),
        "for pair in range(row * num_active, (row + 1) * num_active) if rows < 5 else "
        "range((row + 1) * num_active - 1, row * num_active - 1, -1):",
    ),
    "the weakest experts": (experts, "_ROUTE", "lfm2_moe", "ranks[expert] > best", "-ranks[expert] > best"),
    "a state of one input too few": (
        *(backend, "_SHORT_CONV", "lfm2", "_store_conv_state(past, 0, taps - 1, width, state)"),
        "_store_conv_state(past, 0, taps - 2, width, state)",
    ),
    "a block's end that is one token late": (
        *(backend, "_SHORT_CONV", "lfm3", "(positions[token + t] + 1) % block_size == 0"),
        "positions[token + t] % block_size == 0",
    ),
    "the last of equals": (backend, "_ARGMAX", "llama", "return i + j\n", "return i + j + 1\n"),
    "a sum without its last vector": (
        *(backend, "_LOGSUMEXP", "llama", "for i in range(0, width, LANES):\n        count"),
        "for i in range(0, width - LANES, LANES):\n        count",
    ),
}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, str], str]:
    """Writes a copy of a kernel's source with something in place of something; its module, named by what is wrong."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, right: str, wrong: str) -> str:
        source = (COMPILED / f"{name}.py").read_text()
        assert right in source
        module = f"faulty_{name}_{zlib.crc32(wrong.encode())}"
        (tmp_path / f"{module}.py").write_text(source.replace(right, wrong))
        return module

    return write


@pytest.mark.parametrize("fault", SOURCES)
def test_a_fault_in_the_source_of_a_kernel_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[str, str, str], str]
) -> None:
    room, attribute, family, right, wrong = SOURCES[fault]
    spec = getattr(room, attribute)._spec
    module = faulty(spec.module.rpartition(".")[2], right, wrong)
    monkeypatch.setattr(room, attribute, Kernel(replace(spec, module=module)))
    assert find_fault(CpuKernels(torch.float32), small_model(family))


# What is written in place of what in the source of attention's products.
PRODUCTS: dict[str, tuple[str, str]] = {
    "sums of values that depend on the number of rows": (
        "min(last + 1, NUM_STREAMS) - first",
        "min(last + 1, NUM_STREAMS) - first - (rows > 2 and last > first)",
    ),
    "values in the places of their neighbours": (
        "for start in (at, builder.add(at, width))]",
        "for start in (builder.add(at, width), at)]",
    ),
    "scores of half of the dimensions": ("width // TILE_STEP", "max(width // TILE_STEP // 2, 1)"),
    "scores that are no logarithms to base 2": ("simd.splat(_LOG2_E)", "simd.splat(F32(1.0))"),
}


@pytest.mark.parametrize("fault", [fault if number == 0 else slow(fault) for number, fault in enumerate(PRODUCTS)])
def test_a_fault_in_the_source_of_attention_by_tiles_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[str, str, str], str]
) -> None:
    by_tiles(monkeypatch)
    products = faulty("matrix_attention", *PRODUCTS[fault])
    named = "from batchgen.kernels.cpu.compiled import matrix_attention as products"
    module = faulty("attention", named, f"import {products} as products")
    monkeypatch.setattr(backend, "_ATTENTION", Kernel(replace(backend._ATTENTION._spec, module=module)))
    small = small_model("lfm2", "bfloat16", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    assert find_fault(CpuKernels(torch.bfloat16), small)


def wrong_from(name: str, change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Kernels of which one operation's result is changed, by a function of it and of what was given."""

    def planted(base: Any) -> Any:
        def method(self: Any, *given: Any) -> Any:
            return change(getattr(base, name)(self, *given), *given)

        return type("Faulty", (base,), {name: method})

    return planted


def raising(result: Any, *_: Any) -> Any:
    raise type("OutOfResources", (Exception,), {})("Required: 262152")  # Triton's errors have no base of their own


def spoilt(result: Tensor, *given: Any) -> Tensor:
    given[3].slots[:, 0] = given[3].slots[:, -1]
    return result


def value_off(result: Tensor, *given: Any) -> Tensor:
    given[4].values[..., :1] += 0.05
    return result


ON_A_GPU: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a value that is off": ("lfm2", wrong_from("rope_and_cache", value_off)),
    "a spoilt state": ("lfm2", wrong_from("short_conv", spoilt)),
    "too much shared memory": ("lfm2", wrong_from("swiglu", raising)),
    "log-probabilities that are off": ("lfm2", wrong_from("logsumexp", lambda y, _: y + 0.001)),
    "another row": ("llama", wrong_from("take_rows", lambda y, *_: y.roll(1, 0))),
    "no mask": ("llama", wrong_from("mask", lambda *_: None)),
    "another scale": ("granite", wrong_from("scale", lambda _, x, by: x.mul_(1.001))),
    "rows that depend on others": ("llama", wrong_from("rms_norm", lambda y, *_: y * (1 + 1e-6 * len(y)))),
}


@pytest.mark.parametrize("fault", [of_gpu(fault, is_quick=fault == "too much shared memory") for fault in ON_A_GPU])
@pytest.mark.usefixtures("few_requests")
def test_a_planted_fault_of_a_gpu_is_found(fault: str) -> None:
    family, planted = ON_A_GPU[fault]
    assert find_fault(planted(cuda_kernels())(DEVICE), small_model(family, device=DEVICE))


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_near_ties_between_experts_that_end_otherwise_are_no_fault(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model("qwen3_moe", form)
    noise = torch.arange(64.0).sin() * (2e-5 if form == "float32" else 4e-3)
    plant(monkeypatch, "route", argument(3, noise))  # of an expert's score, as if its product had been rounded
    assert find_fault(CpuKernels(small.dtype), small) == ""
    monkeypatch.setattr(invariants, "_NEAR_TIE", dict.fromkeys(invariants._NEAR_TIE, 0.0))
    if form == "bfloat16":
        assert find_fault(CpuKernels(small.dtype), small), "some have ended otherwise"


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full"), OutOfMemory("full")])
def test_exhausted_memory_is_no_fault_of_kernels(error: Exception) -> None:
    def exhausted(*_: Any) -> Any:
        raise error

    with pytest.raises((type(error), OutOfMemory)):
        find_fault(wrong_from("rms_norm", exhausted)(CpuKernels)(torch.float32), small_model("llama"))


class Stale(Again):
    """A recording that reads the inputs of the step that was recorded."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        found, _ = super().record(work)
        return found, lambda: found


def test_a_stale_recording_is_found_before_the_first_step() -> None:
    model = tiny_model(kernels=ReferenceKernels())
    for recorder, is_right in ((Again(), True), (Stale(), False)):
        state = random_state(model, num_blocks=60, block_size=4, num_slots=5)
        graphs = CudaGraphs(model, state, recorder, PaddingSlot(60, 5, 4), max_model_len=200)
        with nullcontext() if is_right else pytest.raises(CaptureFailed, match="differs from a launched one"):
            graphs.record_all()


@pytest.fixture
def tests_run(monkeypatch: pytest.MonkeyPatch) -> list[SmallModel]:
    """The small models that are tested from now on; each time draws are found to be wrong."""
    found: list[SmallModel] = []

    def find(_: Kernels, small: SmallModel) -> str:
        found.append(small)
        return "draws differ from plain torch"

    monkeypatch.setattr(self_test, "find_fault", find)
    return found


@pytest.mark.usefixtures("threads_as_before")
def test_a_verdict_is_kept_for_shapes_formats_threads_and_libraries(
    tests_run: list[SmallModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_model("qwen3")
    for _ in range(2):
        assert self_tested(CpuKernels(torch.float32), small).name == "plain"
    assert len(tests_run) == 1
    for other in (replace(small, dtype=torch.bfloat16), replace(small, kv_cache_dtype="int8"), small_model("llama")):
        self_tested(CpuKernels(other.dtype), other)
    self_tested(CpuKernels(torch.float32, weights="int8"), small)
    assert len(tests_run) == 5
    torch.set_num_threads(3)
    self_tested(CpuKernels(torch.float32), small)
    monkeypatch.setattr(self_test, "version", lambda library: "99")
    self_tested(CpuKernels(torch.float32), small)
    assert len(tests_run) == 7


def test_a_verdict_that_cannot_be_kept_is_found_each_time(tests_run: list[SmallModel], tmp_path: Path) -> None:
    (tmp_path / "self_test.json").mkdir()
    for _ in range(2):
        self_tested(CpuKernels(torch.float32), small_model("qwen3"))
    assert len(tests_run) == 2


def test_whatever_loads_a_model_takes_the_same_verdict(tests_run: list[SmallModel]) -> None:
    where = ModelSpec(path=str(SAMPLE), dtype="float32", device="cpu")
    loaded = [load_weights(where) for _ in range(2)]
    assert len(tests_run) == 1
    assert {model.numerics["kernels"] for model in loaded} == {PlainKernels(CPU, torch.float32).variant}
    assert load_weights(where, ReferenceKernels()).kernels.notes == ()


def test_the_small_model_has_each_layer_once_the_last_ones_as_they_are_and_all_widths() -> None:
    config = dummy_config("dummy:LFM2-350M")
    shape = SmallModel(config, CPU, torch.bfloat16).shape
    assert len(shape.layers) == 2
    assert set(shape.layers) == set(config.layers)
    assert shape.layers[-1] == config.layers[-1]
    assert (shape.hidden_size, shape.num_heads, shape.ff_dim) == (config.hidden_size, config.num_heads, config.ff_dim)
    assert SmallModel(config, torch.device("cuda", 0), torch.bfloat16).shape.vocab_size == config.vocab_size
