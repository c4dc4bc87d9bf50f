"""GPUs of Apple and Intel: only named ones are taken, missing ones refused, and others compared with the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from families import RAW, raw_config
from tiny_model import engine_for, random_requests, tokens_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from batchgen.config.job import ModelSpec
from batchgen.core.errors import ModelError
from batchgen.core.machine import UNTRIED_DEVICES, total_bytes
from batchgen.engine import sizes
from batchgen.engine.load import load_weights
from batchgen.engine.self_test import SmallModel, device_fault
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.select import select
from batchgen.model.load import load_model, resolve_device
from batchgen.model.registry import parse_config
from batchgen.model.weights import RandomTensors

SAMPLE = str(Path(__file__).parents[2] / "sample_data" / "tiny-lfm2")
AVAILABLE = {"mps": (torch.backends.mps, "mps"), "xpu": (torch.xpu, "xpu")}


class OnCpu(TorchFunctionMode):
    """Makes the tensors of a GPU that this machine lacks on the CPU; counts them, and float32 rows fetched."""

    num_made = 0
    num_rows_fetched = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            if not isinstance(value, torch.device) or value.type not in UNTRIED_DEVICES:
                return value
            self.num_made += 1
            return torch.device("cpu")

        if func is Tensor.cpu and args[0].dim() == 2 and args[0].dtype is torch.float32:
            self.num_rows_fetched += len(args[0])
        return func(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


@pytest.fixture(params=UNTRIED_DEVICES)
def pretended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, OnCpu]]:
    """The name of such a GPU, whose tensors are the CPU's, and how often it was asked for them."""
    module, name = AVAILABLE[request.param]
    monkeypatch.setattr(module, "is_available", lambda: True)
    with OnCpu() as made:
        yield name, made
    assert made.num_made


@pytest.mark.parametrize("device", UNTRIED_DEVICES)
def test_a_gpu_that_torch_does_not_see_is_refused_in_one_line(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AVAILABLE[device][0], "is_available", lambda: False)
    with pytest.raises(ModelError) as caught:
        load_model(SAMPLE, device=device)
    assert str(caught.value) == f"device '{device}': this torch sees no such GPU; use --device cpu"
    assert caught.value.exit_code == 2


def test_auto_never_takes_a_gpu_on_which_batchgen_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module, name in AVAILABLE.values():
        monkeypatch.setattr(module, "is_available", lambda: True)
        assert resolve_device(name) == torch.device(name, 0)
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", UNTRIED_DEVICES)
def test_plain_torch_computes_there_and_says_that_it_is_not_tried(device: str, dtype: torch.dtype) -> None:
    kernels = select(torch.device(device, 0), dtype)
    assert isinstance(kernels, PlainKernels)
    assert kernels.variant.endswith(f"-{device}")
    assert kernels.notes == (
        f"device '{device}:0': batchgen's authors have not tried it, so each start compares a small model there with "
        "the CPU; plain torch computes, slower, and tokens may depend on the batch",
    )


def test_a_run_there_gives_the_tokens_of_the_cpu(pretended: tuple[str, OnCpu]) -> None:
    found = load_weights(ModelSpec(SAMPLE, dtype="float32", device=pretended[0]))
    assert isinstance(found.kernels, PlainKernels)
    expected = load_weights(ModelSpec(SAMPLE, dtype="float32", device="cpu"))
    requests = random_requests(8, seed=1, vocab_size=found.config.vocab_size)
    assert found.numerics["kernels"] != expected.numerics["kernels"]
    fetched_by_proof = pretended[1].num_rows_fetched
    tokens = [tokens_of(engine_for(m, num_blocks=60, block_size=8).run(requests)) for m in (found, expected)]
    assert tokens[0] == tokens[1]
    assert pretended[1].num_rows_fetched - fetched_by_proof >= sum(map(len, tokens[0].values()))


def test_random_weights_are_the_same_there_as_on_the_cpu(pretended: tuple[str, OnCpu]) -> None:
    there, here = (RandomTensors(torch.float16, torch.device(name)) for name in (pretended[0], "cpu"))
    assert torch.equal(there.take("x", (3, 5)), here.take("x", (3, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", RAW)
def test_the_compiled_kernels_are_as_near_as_a_right_gpu(family: str, dtype: torch.dtype) -> None:
    small = SmallModel(parse_config(raw_config(model_type=family), "tiny"), torch.device("cpu"), dtype)
    assert device_fault(select(small.device, dtype), small) == ""


@pytest.mark.parametrize("change", ["attention", "short_conv", "nan", "lacks"])
def test_a_gpu_that_computes_something_else_is_refused(
    change: str, pretended: tuple[str, OnCpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "attention" if change in ("nan", "lacks") else change
    right = getattr(PlainKernels, name)

    def wrong(self: PlainKernels, *given: Any, **named: Any) -> Tensor:
        result: Tensor = right(self, *given, **named)
        if self._device is None or self._device.type == "cpu":
            return result
        if change == "lacks":
            raise NotImplementedError("The operator 'aten::x' is not\nimplemented")
        return result * (torch.nan if change == "nan" else 1.3)

    monkeypatch.setattr(PlainKernels, name, wrong)
    with pytest.raises(ModelError) as caught:
        load_weights(ModelSpec(SAMPLE, dtype="float32", device=pretended[0]))
    assert str(caught.value).startswith(f"device '{pretended[0]}': ")
    assert str(caught.value).endswith("; use --device cpu")
    assert "\n" not in str(caught.value)


def test_memory_is_that_of_the_gpu_or_of_the_processor_that_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (3, 7))
    found = {name: sizes._memory(cast(Any, SimpleNamespace(device=torch.device(name, 0)))) for name in UNTRIED_DEVICES}
    assert found["xpu"] == (3, 7)
    assert found["mps"][1] == total_bytes()
