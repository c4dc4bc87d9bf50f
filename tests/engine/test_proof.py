"""Kernels that prove themselves: no false alarm, and each planted fault is found, named and computed by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import RAW, raw_config
from late_device import Again
from tiny_model import CPU, random_state, tiny_model, tokens_of
from torch import Tensor

from batchgen.config.job import ModelSpec
from batchgen.engine import proof
from batchgen.engine.graphs import CaptureFailed, CudaGraphs, PaddingSlot
from batchgen.engine.load import load_weights
from batchgen.engine.proof import Setting, find_faults, proven
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.interface import Kernels, Linear
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.proven import BATCH, with_plain
from batchgen.kernels.reference import ReferenceKernels
from batchgen.kernels.select import select
from batchgen.model import state
from batchgen.model.registry import dummy_config, parse_config

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else CPU  # of the kernels of a GPU
SAMPLE = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
FORMATS = {  # dtype, what is cached, weights
    "float32": (torch.float32, "auto", "auto"),
    "bfloat16": (torch.bfloat16, "auto", "auto"),
    "int8": (torch.bfloat16, "int8", "int8"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that the interpreter answers in seconds, and keys as a GPU keeps them; on a GPU all as it is."""
    if HAS_GPU:
        return
    for name, value in {"_LENGTHS": (1, 21), "_PREFIX": 33, "_SUFFIXES": (0, 2), "_MOST_TOKENS": 24}.items():
        monkeypatch.setattr(proof, name, value)
    monkeypatch.setattr(proof, "_NUM_DRAWS", 16)
    monkeypatch.setattr(state, "key_pack", lambda _dtype, _device, width: width)


def setting_of(family: str, form: str = "float32", device: torch.device = CPU) -> Setting:
    dtype, kv_cache_dtype, _ = FORMATS[form]
    return Setting(parse_config(raw_config(model_type=family), "tiny"), device, dtype, kv_cache_dtype)


def tokens(setting: Setting, kernels: Kernels) -> Mapping[int, tuple[int, ...]]:
    return tokens_of(setting.engine(setting.decoder(kernels)).run(setting.requests()))


def of_gpu(*case: str, is_quick: bool) -> Any:
    """A case of a GPU's kernels. On the interpreter it takes minutes: CI does those that differ most."""
    interpreted = pytest.mark.slow if is_quick else pytest.mark.nightly
    return pytest.param(*case, marks=pytest.mark.gpu if HAS_GPU else interpreted)


QUICK = (("lfm2", "int8"), ("gemma3_text", "float32"), ("lfm2_moe", "bfloat16"))


@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "form"), [of_gpu(*case, is_quick=case in QUICK) for case in product(RAW, FORMATS)])
@pytest.mark.usefixtures("small")
def test_right_kernels_of_a_gpu_have_no_fault(family: str, form: str) -> None:
    assert find_faults(cuda_kernels()(DEVICE, weights=FORMATS[form][2]), setting_of(family, form, DEVICE)) == {}


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "integers"),
    [
        (torch.float32, "bfloat16", {}),
        (torch.bfloat16, "auto", {}),
        (torch.float32, "int8", {"weights": "int8", "activations": "int8"}),
        (torch.bfloat16, "int8", {"weights": "int8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", RAW)
def test_right_kernels_of_a_cpu_have_no_fault(
    family: str, dtype: torch.dtype, kv_cache_dtype: str, integers: dict[str, str]
) -> None:
    setting = Setting(parse_config(raw_config(model_type=family), "tiny"), CPU, dtype, kv_cache_dtype)
    assert find_faults(select(CPU, dtype, **integers), setting) == {}


class Changed:
    """A linear, or another call, whose result is changed."""

    def __init__(self, work: Any, change: Callable[..., Any]) -> None:
        self._work, self._change = work, change

    def __call__(self, *given: Any) -> Any:
        return self._change(self._work(*given), *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def off(by: float) -> Callable[..., Tensor]:
    def change(result: Tensor, *_: Any) -> Tensor:
        result[..., -1] += by
        return result

    return change


class FusedNorms(ReferenceKernels):
    """The reference as a back end that has a kernel of its own where another is made of two, as that of a GPU."""

    def add_and_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return ReferenceKernels().add_and_norm(linear, x, residual, weight, eps, post)


Base = type[ReferenceKernels]


def cuda_kernels() -> Base:
    """Those of a GPU, on Triton's interpreter; a test that wants them is skipped without it."""
    from triton_device import CudaKernels

    return CudaKernels


Planted = Callable[[Base], Base]


def instead(name: str, call: Callable[..., Any]) -> Planted:
    """Kernels of which one operation is another: a function of the right one and of what is given."""

    def planted(base: Base) -> Base:
        def method(self: Kernels, *given: Any) -> Any:
            return call(partial(getattr(base, name), self), *given)

        return type("Faulty", (base,), {name: method})

    return planted


def after(name: str, change: Callable[..., Any]) -> Planted:
    """Kernels of which one operation's result is changed, by a function of it and of what was given."""
    return instead(name, lambda right, *given: change(right(*given), *given))


def making(name: str, change: Callable[..., Any]) -> Planted:
    """Kernels that make calls of weights, such as linears, whose result is changed."""
    return after(name, lambda made, *_: Changed(made, change))


def failing(name: str, error: Exception, when: Callable[..., bool] = lambda *_: True) -> Planted:
    def change(result: Any, *given: Any) -> Any:
        if when(*given):
            raise error
        return result

    return after(name, change)


def spoilt(result: Tensor, *given: Any) -> Tensor:
    """The convolution's state: the newest input in place of the oldest."""
    given[3].slots[:, 0] = given[3].slots[:, -1]
    return result


def without_block_ends(result: Tensor, *given: Any) -> Tensor:
    given[3].blocks.zero_()
    return result


def value_off(result: Tensor, *given: Any) -> Tensor:
    given[4].values[..., :1] += 0.05
    return result


def overwritten(result: Tensor, *given: Any) -> Tensor:
    given[1].values[-1] = 3.0
    return result


def without_last(right: Callable[..., Tensor], q: Tensor, cache: Any, inputs: Any, *rest: Any) -> Tensor:
    return right(q, cache, replace(inputs, positions=(inputs.positions - 1).clamp(min=0)), *rest)


def more_of_top_k(right: Callable[..., Tensor], logits: Tensor, rows: Any) -> Tensor:
    return right(logits, replace(rows, top_k=rows.top_k + 4 * (rows.top_k > 0)))


def another_eps(right: Callable[..., Tensor], x: Tensor, weight: Tensor, eps: float, *rest: Any) -> Tensor:
    return right(x, weight, eps + 0.05 * (x.dim() == 2), *rest)  # not of heads, which another operation norms


OUT_OF_RESOURCES = type("OutOfResources", (Exception,), {})  # Triton's errors have no base of their own
# The operation that each is planted in, and a family that has it.
FAULTS: dict[str, tuple[str, str, Planted]] = {
    "a value that is off": ("rope_and_cache", "lfm2", after("rope_and_cache", value_off)),
    "the last position is missed": ("attention", "lfm2", instead("attention", without_last)),
    "a spoilt state": ("short_conv", "lfm2", after("short_conv", spoilt)),
    "another eps": ("rms_norm", "lfm2", instead("rms_norm", another_eps)),
    "more of top_k": ("sample", "lfm2", instead("sample", more_of_top_k)),
    "no mask": ("mask", "lfm2", instead("mask", lambda *_: None)),
    "log-probabilities that are off": ("logsumexp", "lfm2", after("logsumexp", lambda y, _: y + 0.001)),
    "too much shared memory": ("swiglu", "lfm2", failing("swiglu", OUT_OF_RESOURCES("Required: 262152"))),
    "a column that is off": ("linear", "llama", making("linear", off(0.02))),
    "a state without block ends": ("short_conv", "lfm3", after("short_conv", without_block_ends)),
    "attention that writes": ("attention", "qwen3", after("attention", overwritten)),
    "another expert": ("router", "lfm2_moe", making("router", lambda found, _: ((found[0] + 1) % 6, found[1]))),
    "experts that are off": ("experts", "qwen3_moe", making("experts", off(0.02))),
    "another row": ("take_rows", "llama", after("take_rows", lambda y, *_: y.roll(1, 0))),
    "another likeliest token": ("argmax", "llama", after("argmax", lambda ids, _: (ids - 1).clamp(min=0))),
    "a norm of NaN": ("add_and_norm", "mistral", after("add_and_norm", lambda y, *_: (y[0], y[1] * torch.nan))),
    "another scale": ("scale", "granite", after("scale", lambda _, x, by: x.mul_(1.001))),
    "an error with many rows": (
        *("attention", "smollm3"),
        failing("attention", AssertionError(), lambda q, *_: len(q) > 20),
    ),
    "a linear that cannot be made": ("linear", "llama", failing("linear", ValueError("no layout"))),
    "a number in another type": ("logsumexp", "llama", after("logsumexp", lambda y, _: y.double())),
}


@pytest.mark.parametrize(
    ("fault", "base"),
    [
        *((fault, "FusedNorms") for fault in FAULTS),
        *(of_gpu(fault, "CudaKernels", is_quick=number % 10 == 0) for number, fault in enumerate(FAULTS)),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_planted_fault_is_found_and_plain_torch_gives_the_tokens_of_the_reference(fault: str, base: str) -> None:
    name, family, planted = FAULTS[fault]
    device = CPU if base == "FusedNorms" else DEVICE
    setting = setting_of(family, device=device)
    kernels = planted(FusedNorms if base == "FusedNorms" else cuda_kernels())(device)
    before = kernels.variant
    faults = find_faults(kernels, setting)
    assert [*faults] == [name]
    mended = with_plain(kernels, PlainKernels(device, torch.float32), faults, "this GPU")
    assert mended.fingerprint == f"{before}-plain-{name}"
    assert mended.notes == (f"{name} is computed by plain torch on this GPU, which is slower: {faults[name]}",)
    assert tokens(setting, mended) == tokens(setting, ReferenceKernels(device))


def test_a_row_whose_bits_depend_on_the_batch_is_found(small: None) -> None:
    kernels = making("linear", lambda y, x, *_: y * (1 + 1e-7 * len(x)))(FusedNorms)()
    kernels.batch_invariant = True
    setting = setting_of("llama")
    faults = find_faults(kernels, setting)
    assert [*faults] == [BATCH]
    assert with_plain(kernels, PlainKernels(), faults, "this GPU").notes[0].startswith("tokens may depend on the batch")


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("attend", after("attend", off(0.02))),
        ("gated_linear", making("gated_linear", off(0.02))),
        ("embedding", after("tied_embedding", lambda pair, *_: (Changed(pair[0], off(0.02)), pair[1]))),
        ("linear", making("linear", off(0.02))),
    ],
)
def test_a_planted_fault_of_a_cpu_is_found_too_and_nothing_is_recorded(name: str, planted: Any) -> None:
    setting, kernels = setting_of("qwen3"), planted(CpuKernels)(torch.float32)
    faults = find_faults(kernels, setting)
    assert name in faults
    mended = with_plain(kernels, PlainKernels(CPU, torch.float32), faults, "this processor")
    assert mended.recorder() is None
    assert tokens(setting, mended) == tokens(setting, ReferenceKernels())


class Stale(Again):
    """A recording that reads the inputs of the step that was recorded."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        found, _ = super().record(work)
        return found, lambda: found


def test_a_stale_recording_is_found_before_the_first_step() -> None:
    model = tiny_model(kernels=FusedNorms())
    for recorder, is_right in ((Again(), True), (Stale(), False)):
        state = random_state(model, num_blocks=60, block_size=4, num_slots=5)
        graphs = CudaGraphs(model, state, recorder, PaddingSlot(60, 5, 4), max_model_len=200)
        with nullcontext() if is_right else pytest.raises(CaptureFailed, match="differs from a launched one"):
            graphs.record_all()


@pytest.fixture
def num_proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Setting]:
    """The settings that are proven from now on, with an empty cache; each time "swiglu" is found to be wrong."""
    settings: list[Setting] = []

    def find(_: Kernels, setting: Setting) -> dict[str, str]:
        settings.append(setting)
        return {"swiglu": "it differs"}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "find_faults", find)
    return settings


def test_a_verdict_is_kept_for_its_setting_kernels_and_libraries(
    num_proofs: list[Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of("qwen3")
    for _ in range(2):
        assert proven(CpuKernels(torch.float32), setting, always=True).faults == {"swiglu": "it differs"}
    assert len(num_proofs) == 1
    for other in (replace(setting, dtype=torch.bfloat16), replace(setting, kv_cache_dtype="int8"), setting_of("llama")):
        proven(CpuKernels(other.dtype), other, always=True)
    proven(CpuKernels(torch.float32, weights="int8"), setting, always=True)
    assert len(num_proofs) == 5
    monkeypatch.setattr(proof, "version", lambda library: "99")
    proven(CpuKernels(torch.float32), setting, always=True)
    assert len(num_proofs) == 6


def test_what_cannot_be_kept_is_proven_each_time(num_proofs: list[Setting], tmp_path: Path) -> None:
    (tmp_path / "batchgen").touch()  # no folder
    for _ in range(2):
        proven(CpuKernels(torch.float32), setting_of("qwen3"), always=True)
    assert len(num_proofs) == 2


@pytest.mark.parametrize(("machine", "proofs"), [("x86_64", 0), ("aarch64", 1)])
def test_a_job_proves_the_kernels_of_processors_on_which_their_tests_do_not_run(
    machine: str, proofs: int, num_proofs: list[Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "platform", SimpleNamespace(machine=lambda: machine))
    where = ModelSpec(path=str(SAMPLE), dtype="float32", device="cpu")
    model = load_weights(where)
    assert len(num_proofs) == proofs
    assert model.numerics["kernels"].endswith("-plain-swiglu") == bool(proofs)
    if machine == "x86_64":  # and takes up what a check has found
        assert load_weights(where, always_proves=True).numerics["kernels"].endswith("-plain-swiglu")
        assert load_weights(where).numerics["kernels"].endswith("-plain-swiglu")
    assert load_weights(where, ReferenceKernels()).kernels.faults == {}


def test_the_proof_of_a_model_has_each_of_its_layers_twice_and_its_widths() -> None:
    config = dummy_config("dummy:LFM2-350M")
    setting = Setting(config, CPU, torch.bfloat16)
    assert len(setting.shrunk.layers) == 4
    assert set(setting.shrunk.layers) == set(config.layers)
    assert (setting.shrunk.hidden_size, setting.shrunk.vocab_size) == (config.hidden_size, config.vocab_size)


def test_texts_of_a_model_that_is_not_causal_are_proven_too() -> None:
    setting = setting_of("lfm2")
    setting = replace(setting, config=replace(setting.config, is_causal=False, has_head=False))
    assert find_faults(CpuKernels(torch.float32), setting) == {}
    wrong = after("attend", off(0.02))(CpuKernels)(torch.float32)
    assert [*find_faults(wrong, setting)] == ["attend"]
