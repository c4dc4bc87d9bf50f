"""The lists of kernels that are compiled ahead of a run name what it launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import CPU, DTYPES, STD, engine_for, random_requests, raw_config, tokens_of

from batchgen.core.records import SamplingParams
from batchgen.kernels.cpu import kernel_specs
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.kernel_specs import ATTENTION, RUN_ALL, SERVE, KernelSpec, needed, needed_by_some
from batchgen.kernels.cpu.parallel import Kernel, Kind
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.weights import RandomTensors

OTHER_ROWS = (
    SamplingParams(logprobs=1),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(allowed_token_ids=(9, 10)),
)


@pytest.mark.parametrize(
    ("weights", "activations", "kv_cache_dtype"),
    [("auto", "auto", "auto"), ("int8", "auto", "bfloat16"), ("int8", "int8", "int8")],
)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_what_is_compiled_for_a_model_is_what_it_launches(
    model_type: str,
    dtype: str,
    stored: str,
    weights: str,
    activations: str,
    kv_cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: set[tuple[KernelSpec, str]] = {(RUN_ALL, "any"), (SERVE, "any")}  # which run all launches
    launch = Kernel.launch

    def noted(self: Kernel, kind: Kind, *arguments: Any, **named: Any) -> None:
        launched.add((self._spec, str(kind).removeprefix("torch.")))
        launch(self, kind, *arguments, **named)

    monkeypatch.setattr(Kernel, "launch", noted)
    tensors = RandomTensors(DTYPES[dtype], CPU, std=STD, saved=DTYPES[stored])
    kernels = CpuKernels(DTYPES[dtype], weights=weights, activations=activations)
    raw = raw_config(model_type, moe_intermediate_size=64)  # whole groups of 8-bit weights, as in any other width
    with torch.inference_mode():
        config = replace(parse_config(raw, "tiny"), logits_scale=0.5 if model_type == "lfm2_moe" else 1.0)
        model = Decoder(config, tensors, kernels)

    def run(params: SamplingParams) -> None:
        rows = [
            replace(row, params=replace(params, max_tokens=row.params.max_tokens)) for row in random_requests(8, seed=1)
        ]
        tokens_of(engine_for(model, num_blocks=60, block_size=16, kv_cache_dtype=kv_cache_dtype).run(rows))

    run(SamplingParams())
    wanted = set(needed(dtype, stored, weights, activations, kv_cache_dtype, model.config.parts))
    assert launched == wanted
    for params in OTHER_ROWS:
        run(params)
    assert launched == wanted | set(needed_by_some(dtype))


@pytest.mark.parametrize(
    ("head_dim", "kv_cache_dtype", "kind"),
    [(64, "auto", "bf16_tiles"), (16, "auto", "bfloat16"), (64, "int8", "bf16_kv_int8")],
)
def test_attention_is_compiled_for_tiles_where_heads_are_whole_tiles_of_bfloat16(
    head_dim: int, kv_cache_dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_specs, "has_matrix_unit", lambda unit: unit == "bf16")
    monkeypatch.setattr(kernel_specs, "has_fast_bfloat16_pairs", lambda: False)
    parts = parse_config(raw_config("llama", head_dim=head_dim), "tiny").parts
    wanted = needed("bfloat16", "bfloat16", kv_cache_dtype=kv_cache_dtype, parts=parts)
    assert [found for spec, found in wanted if spec is ATTENTION] == [kind]


def test_no_kernel_is_listed_twice_and_each_kind_exists() -> None:
    for dtype in DTYPES:
        for stored in DTYPES:
            wanted = needed(dtype, stored)
            assert len(wanted) == len(set(wanted))
            assert all(kind in spec.kinds for spec, kind in wanted + needed_by_some(dtype))
    assert needed("float16", "float16") == needed_by_some("float16") == []
