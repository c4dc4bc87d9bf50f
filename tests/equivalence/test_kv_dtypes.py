"""Keys and values of fewer bits than are computed with: the same tokens in any batch, and nearly those of more bits.

One shape for each type of cache, and of every other family chunks with preemption; ``test_equivalence`` has every shape
in the type that is computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from families import RAW
from tiny_model import DTYPES, checked_run, engine_for, random_requests, solo, tiny_model, tokens_of, whole_input
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine
from batchgen.kernels.reference import ReferenceKernels
from batchgen.model.decoder import Decoder
from batchgen.model.state import KV_DTYPES, allocate

KINDS = [("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")]
every_kind = pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)


@cache
def model_of(dtype: str, family: str = "lfm2") -> Decoder:
    return tiny_model(DTYPES[dtype], model_type=family, num_attention_heads=8, num_key_value_heads=2, head_dim=24)


@cache
def requests() -> tuple[Request, ...]:
    """Greedy and sampled ones of mixed lengths, some beyond one tile of the CPU's attention."""
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    kinds = [
        random_requests(6, seed=3, prompt=(1, 50), output=(4, 24)),
        random_requests(6, seed=4, prompt=(1, 50), output=(4, 24), params=sampled),
        random_requests(3, seed=5, prompt=(240, 300), output=(10, 20)),
    ]
    return tuple(replace(r, key=100 * kind + r.key) for kind, found in enumerate(kinds) for r in found)


@cache
def expected(dtype: str, kv_dtype: str, family: str = "lfm2") -> dict[int, tuple[int, ...]]:
    return solo(model_of(dtype, family), requests() if family == "lfm2" else requests()[:12], kv_dtype)


def run(engine: Engine, asked: tuple[Request, ...]) -> dict[int, tuple[int, ...]]:
    return tokens_of(checked_run(engine, asked))


@every_kind
@pytest.mark.parametrize("threads", [1, 2])
def test_batched_equals_solo(dtype: str, kv_dtype: str, threads: int) -> None:
    reference = expected(dtype, kv_dtype)
    torch.set_num_threads(threads)
    engine = engine_for(model_of(dtype), num_blocks=200, block_size=16, max_num_seqs=15, kv_dtype=kv_dtype)
    assert run(engine, requests()) == reference
    assert engine.stats.max_running == len(requests())


@every_kind
@pytest.mark.parametrize("block_size", [7, 32])
def test_chunked_equals_whole(dtype: str, kv_dtype: str, block_size: int) -> None:
    sizes = {"max_num_batched_tokens": 37, "max_num_seqs": 9, "kv_dtype": kv_dtype}
    engine = engine_for(model_of(dtype), num_blocks=-(-640 // block_size), block_size=block_size, **sizes)
    assert run(engine, requests()) == expected(dtype, kv_dtype)


@every_kind
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 80), (3, 28), (5, 17)])
def test_preempted_equals_undisturbed(dtype: str, kv_dtype: str, block_size: int, num_blocks: int) -> None:
    sizes = {"max_num_batched_tokens": 20, "max_num_seqs": 12, "kv_dtype": kv_dtype}
    engine = engine_for(model_of(dtype), num_blocks=num_blocks, block_size=block_size, **sizes)
    found = run(engine, requests()[:12])
    assert found == {key: expected(dtype, kv_dtype)[key] for key in found}
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("family", [family for family in RAW if family != "lfm2"], ids=str)
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
def test_every_family_keeps_its_tokens_in_chunks_and_after_preemption(dtype: str, kv_dtype: str, family: str) -> None:
    sizes = {"max_num_batched_tokens": 20, "max_num_seqs": 12, "kv_dtype": kv_dtype}
    engine = engine_for(model_of(dtype, family), num_blocks=28, block_size=3, **sizes)
    assert run(engine, requests()[:12]) == expected(dtype, kv_dtype, family)
    assert engine.stats.num_preemptions > 0


@every_kind
def test_a_cached_prefix_equals_a_cold_one(dtype: str, kv_dtype: str) -> None:
    prefix = tuple(range(8, 78))
    asked = tuple(replace(r, prompt_token_ids=prefix + r.prompt_token_ids) for r in requests()[:8])
    engine = engine_for(model_of(dtype), num_blocks=100, block_size=16, max_num_batched_tokens=90, kv_dtype=kv_dtype)
    assert run(engine, asked) == solo(model_of(dtype), asked, kv_dtype)
    assert engine.stats.num_cached_tokens >= 64


@every_kind
def test_a_row_goes_on_from_what_an_earlier_run_generated(dtype: str, kv_dtype: str) -> None:
    tokens = expected(dtype, kv_dtype)
    half = tuple(replace(r, output_token_ids=tokens[r.key][: len(tokens[r.key]) // 2]) for r in requests())
    engine = engine_for(model_of(dtype), num_blocks=200, block_size=16, kv_dtype=kv_dtype)
    assert run(engine, half) == tokens


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_reference_generates_the_same_tokens(kv_dtype: str) -> None:
    """In float32, where both back ends keep the same integers but for those that a last bit decides."""
    reference = tiny_model(kernels=ReferenceKernels(), num_attention_heads=8, num_key_value_heads=2, head_dim=24)
    found = solo(reference, requests()[:8], kv_dtype)
    assert found == {key: expected("float32", kv_dtype)[key] for key in found}


def logits(model: Decoder, kv_dtype: str, request: Request) -> Tensor:
    """Logits behind every token of a request's prompt."""
    ids = request.prompt_token_ids
    state = allocate(
        model.config,
        num_blocks=-(-len(ids) // 16),
        block_size=16,
        num_slots=1,
        dtype=model.dtype,
        device=model.device,
        kv_dtype=KV_DTYPES.get(kv_dtype),
    )
    return model.forward(whole_input(ids, 16), state, len(ids) - 1).float()


@every_kind
def test_logits_change_a_little_and_not_more(dtype: str, kv_dtype: str) -> None:
    model = model_of(dtype)
    for request in requests()[-3:]:
        plain, rounded = (logits(model, kind, request) for kind in ("auto", kv_dtype))
        error = ((rounded - plain).norm() / plain.norm()).item()
        assert 0 < error < 0.03
