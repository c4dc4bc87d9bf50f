"""Experts: whom the router chooses, and that a row's bits are its own whichever rows share the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY_BACK_END, EVERY_NAME, normal
from reference_kernels import ExpertLoop, ReferenceKernels
from tiny_model import DTYPES
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.experts import PackedExperts
from batchgen.kernels.cpu.recording import Recorder
from batchgen.kernels.interface import Kernels, Routing, SparseFeedForward
from batchgen.kernels.torch_kernels import choose

FORMS = {"auto": {}, "int8": {"weights": "int8"}, "integers": {"weights": "int8", "activations": "int8"}}
Weights = list[tuple[Tensor, Tensor, Tensor]]


def routing_of(num_experts: int, width: int, active: int, seed: int = 0, *, is_softmax: bool = False) -> Routing:
    weight, bias = normal(num_experts, width, seed=seed) / width**0.5, normal(num_experts, seed=seed + 1) / 4
    eps = 0.0 if is_softmax else 1e-6
    return Routing(weight, None if is_softmax else bias, active, is_softmax, normalizer_eps=eps)


def weights_of(num_experts: int, width: int, inner: int, dtype: torch.dtype, seed: int = 0) -> Weights:
    shapes = ((inner, width), (inner, width), (width, inner))
    return [
        tuple(normal(*shape, seed=seed + 10 * e + i).to(dtype) / shape[1] ** 0.5 for i, shape in enumerate(shapes))  # type: ignore[misc]
        for e in range(num_experts)
    ]


def feed(kernels: Kernels, routing: Routing, experts: SparseFeedForward, x: Tensor) -> Tensor:
    return experts(x, *kernels.router(routing)(x), x.flip(1).contiguous())


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_router_chooses_as_defined(name: str, is_softmax: bool) -> None:
    for num_experts, active, rows, width in ((4, 4, 1, 32), (6, 1, 3, 70), (32, 4, 50, 64), (128, 8, 13, 32)):
        routing = routing_of(num_experts, width, active, rows, is_softmax=is_softmax)
        for varied in (routing, replace(routing, is_normalized=False, scale=2.5)):
            x = normal(rows, width, seed=rows)
            ids, weights = EVERY_BACK_END[name]().router(varied)(x)
            expected_ids, expected = choose(x @ varied.weight.T, varied)
            assert ids.tolist() == expected_ids.tolist()
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_of_equal_experts_those_with_the_lowest_ids_are_chosen(name: str) -> None:
    weight = torch.zeros(70, 32)
    weight[[5, 66]] = 1.0
    ids, weights = EVERY_BACK_END[name]().router(Routing(weight, None, 4, is_softmax=True))(torch.ones(2, 32))
    assert ids.tolist() == [[0, 1, 5, 66]] * 2
    assert weights.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_an_expert_whose_score_is_nan_is_chosen_last(name: str) -> None:
    bias = torch.tensor([0.0, torch.nan, 2.0, torch.nan])
    for active, chosen in ((2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        ids, _ = EVERY_BACK_END[name]().router(Routing(torch.zeros(4, 32), bias, active, is_softmax=False))(
            torch.ones(3, 32)
        )
        assert ids.tolist() == [chosen] * 3


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_row_that_is_not_finite_meets_experts_that_exist_and_stays_alone(name: str, is_softmax: bool) -> None:
    kernels, routing = EVERY_BACK_END[name](), routing_of(6, 32, 2, is_softmax=is_softmax)
    experts = kernels.experts(weights_of(6, 32, 48, torch.float32))
    x = normal(5, 32, seed=2)
    clean = feed(kernels, routing, experts, x)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[2] = bad
        ids, weights = kernels.router(routing)(x)
        assert ids.min() >= 0
        assert ids.max() < 6
        assert weights[2].isnan().all() or not is_softmax
        dirty = feed(kernels, routing, experts, x)
        assert dirty[2].isnan().all()
        others = [0, 1, 3, 4]
        if name in ("plain", "reference"):  # whose products may round a row otherwise when fewer share them
            torch.testing.assert_close(dirty[others], clean[others])
        else:
            assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_the_reference(name: str, dtype: str) -> None:
    for num_experts, active, rows, width, inner in (
        (4, 2, 9, 64, 40),
        (5, 3, 40, 36, 70),
        (6, 2, 1, 32, 96),
        (4, 4, 0, 32, 32),
    ):
        weights, routing = weights_of(num_experts, width, inner, DTYPES[dtype]), routing_of(num_experts, width, active)
        x = normal(rows, width, seed=1).to(DTYPES[dtype])
        fast, slow = (kernels() for kernels in (EVERY_BACK_END[name], ReferenceKernels))
        chosen = slow.router(routing)(x)
        tolerance = {"rtol": 2**-6, "atol": 2**-5} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
        results = [kernels.experts(iter(weights))(x, *chosen, x) for kernels in (fast, slow)]
        torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_has_the_bits_of_each_experts_own_linears(dtype: str, form: str) -> None:
    kernels, width = CpuKernels(DTYPES[dtype], **FORMS[form]), 128
    weights = weights_of(5, width, 160, DTYPES[dtype])
    together = kernels.experts(weights)
    assert isinstance(together, PackedExperts)
    assert kernels.variant == CpuKernels(DTYPES[dtype], **FORMS[form]).variant
    places = [
        {linear.packed.strips.untyped_storage().data_ptr() for linear in parts}
        for parts in zip(*together.linears, strict=True)
    ]
    assert [len(of_all) for of_all in places] == [1, 1], (
        "pieces of their own leave holes when the memory between is freed"
    )
    alone = ExpertLoop([(kernels.gated_linear(gate, up), kernels.linear(down)) for gate, up, down in weights])
    x, one = normal(60, width, seed=4).to(DTYPES[dtype]), torch.ones(60, 1)
    ids = torch.randint(5, (60, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    for rows in (60, 13, 2, 1):
        inputs = (x[:rows], ids[:rows], one[:rows], x[:rows])
        assert torch.equal(together(*inputs), alone(*inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("threads_as_before")
def test_a_rows_bits_do_not_depend_on_which_rows_share_the_step(threads: int, form: str) -> None:
    kernels, routing = CpuKernels(torch.bfloat16, **FORMS[form]), routing_of(8, 64, 3)
    experts = kernels.experts(weights_of(8, 64, 96, torch.bfloat16))
    torch.set_num_threads(1)
    x = normal(150, 64, seed=5).bfloat16()
    whole = feed(kernels, routing, experts, x)
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(threads)
    for count in (150, 149, 40, 7, 2, 1):
        some = torch.randperm(150, generator=generator)[:count]
        assert torch.equal(feed(kernels, routing, experts, x[some]), whole[some])


def test_the_weighted_sum_is_in_the_order_of_ids_and_rounded_once() -> None:
    """One large part among small ones: another order, or a rounding between, gives another sum."""
    kernels, width = CpuKernels(torch.bfloat16), 32
    up = torch.full((32, width), 1 / 32, dtype=torch.bfloat16)
    weights = [(up, up, torch.full((width, 32), size, dtype=torch.bfloat16)) for size in (4096.0, 1.0, -4096.0, 1.0)]
    experts, x = kernels.experts(weights), torch.ones(1, width, dtype=torch.bfloat16)
    parts = [
        down(gated(x)).float()
        for gated, down in ((kernels.gated_linear(g, u), kernels.linear(d)) for g, u, d in weights)
    ]
    ids, by = torch.arange(4, dtype=torch.int32)[None], torch.tensor([[0.7, 0.1, 0.7, 0.1]])
    total = torch.zeros(1, width)
    for part, weight in zip(parts, by[0], strict=True):
        total = torch.addcmul(total.double(), part.double(), weight.double()).float()
    assert torch.equal(experts(x, ids, by, x), (total + x.float()).bfloat16())


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_shape_equals_the_reference_in_any_subset(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 70))
    active, rows = data.draw(st.integers(1, min(num_experts, 9))), data.draw(st.integers(1, 40))
    width, inner = 2 * data.draw(st.integers(1, 70)), 2 * data.draw(st.integers(1, 70))
    weights, routing = weights_of(num_experts, width, inner, torch.float32), routing_of(num_experts, width, active)
    x, kernels = normal(rows, width, seed=rows), CpuKernels(torch.float32)
    experts, chosen = kernels.experts(weights), kernels.router(routing)(x)
    result = experts(x, *chosen, x)
    expected = ReferenceKernels().experts(weights)(x, *chosen, x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    some = data.draw(st.permutations(range(rows)).map(lambda order: order[: 1 + rows // 2]))
    ids, by = kernels.router(routing)(x[some])
    assert torch.equal(ids, chosen[0][some])
    assert torch.equal(experts(x[some], ids, by, x[some]), result[some])


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_reads_anew_which_experts_are_met(form: str) -> None:
    kernels, routing = CpuKernels(torch.bfloat16, **FORMS[form]), routing_of(8, 64, 2)
    experts, recorder = kernels.experts(weights_of(8, 64, 96, torch.bfloat16)), Recorder()
    x = normal(9, 64, seed=6).bfloat16()
    route = kernels.router(routing)

    def work() -> Tensor:
        return experts(x, *route(x), x)

    result, replay = recorder.record(work)
    assert torch.equal(result, work())
    for seed in range(5):
        x.copy_(normal(9, 64, seed=seed))
        expected = work()
        assert torch.equal(replay(), expected)


def test_experts_stored_in_different_types_are_refused() -> None:
    weights = weights_of(3, 32, 32, torch.float32)
    weights[1] = tuple(part.bfloat16() for part in weights[1])  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"different types; save"):
        CpuKernels(torch.float32).experts(weights)
