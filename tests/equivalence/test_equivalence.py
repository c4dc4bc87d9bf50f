"""The result of a row does not depend on what shared its batch, on chunks, blocks, preemption, order or threads.

Rows of every kind in ``row_kinds``, held against each of them run by itself; on tiny random models of every family and
on the trained sample model, with weights as they are and as integers, and caches of every type. The budgets are so
tight that chunks are cut and sequences are preempted, and each test asserts that they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import RAW
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_kernels import ReferenceKernels
from repeats import further, share_of
from row_kinds import INTEGERS, KINDS, MODELS, SHAPES, TYPES, alone, engine_of, model_of, run
from tiny_model import DTYPES, checked_run, prefix_logits, tiny_model, whole_input
from torch import Tensor

from batchgen.core.records import FinishReason, Request, Timings
from batchgen.engine import Engine
from batchgen.engine.schedule import Schedule
from batchgen.model.decoder import Decoder
from batchgen.model.state import KV_DTYPES, allocate

SHORT = [rows for rows in KINDS if rows != "long"]
# Convolutions, experts, windows, multipliers, an odd shape, integers: other models differ in formulas of one token.
MECHANISMS = ["lfm2", "lfm2_moe", "lfm3", "gemma3_text", "granite", "granitemoehybrid", "odd", "trained int8 by int8"]
every_kind = pytest.mark.parametrize("rows", KINDS)
every_short_kind = pytest.mark.parametrize("rows", SHORT)
every_model = pytest.mark.parametrize("model", [m if m in MECHANISMS else further(m) for m in MODELS])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_type = pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TYPES)


def cuts_of(engine: Engine) -> list[int]:
    """How many debts each schedule of an engine that runs from now on cuts short."""
    cuts: list[int] = []
    plain = engine.scheduler.schedule

    def schedule() -> Schedule:
        made = plain()
        cuts.append(sum(count < sequence.num_owed for sequence, count in made.entries.items()))
        return made

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return cuts


@every_model
@every_kind
@every_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_batched_on_any_number_of_threads_equals_solo(rows: str, model: str, dtype: str, threads: int) -> None:
    requests = KINDS[rows].requests
    engine = engine_of(rows, model, dtype, room=40, max_num_seqs=40, max_num_batched_tokens=2000)
    expected = alone(rows, model, dtype)
    torch.set_num_threads(threads)
    assert run(engine, requests) == expected
    assert engine.stats.max_running >= len(requests) // 2
    assert engine.stats.num_preemptions == 0
    assert bool(engine.stats.num_shared_requests) == (rows in ("rules", "sharing", "structured"))
    assert engine.stats.num_cached_tokens > 200 or rows != "sharing"


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        *(("lfm2", budget) for budget in (1, 2, 5, 16, 17, 100)),
        *((name, 17) for name in MECHANISMS[1:4]),
        *(further(name, 17) for name in RAW if name not in MECHANISMS[:4]),
    ],
)
@every_short_kind
@every_dtype
def test_chunked_equals_whole(rows: str, model: str, budget: int, dtype: str) -> None:
    """Also where a row owes more tokens that a grammar forces than a step computes."""
    engine = engine_of(rows, model, dtype, max_num_batched_tokens=budget, max_num_seqs=7)
    cuts = cuts_of(engine)
    # Half of the rows where a step has room for one or two tokens: steps are what takes time.
    requests = KINDS[rows].requests[:: 2 if budget <= 2 else 1]
    assert run(engine, requests) == {request.key: alone(rows, model, dtype)[request.key] for request in requests}
    assert sum(cuts) > (10 if budget < 100 else 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 24, 31, 32, 100])
@every_kind
@every_dtype
def test_any_block_size_gives_the_same(rows: str, block_size: int, dtype: str) -> None:
    engine = engine_of(rows, "odd", dtype, block_size=block_size, room=8, max_num_batched_tokens=48, max_num_seqs=8)
    assert run(engine, KINDS[rows].requests) == alone(rows, "odd", dtype)


@every_model
@every_kind
@every_type
def test_preempted_equals_undisturbed(rows: str, model: str, dtype: str, kv_cache_dtype: str) -> None:
    kind = KINDS[rows]
    sizes = {
        "max_num_batched_tokens": 50 if rows == "long" else 20,
        "max_num_seqs": 12,
        "kv_cache_dtype": kv_cache_dtype,
    }
    engine = engine_of(rows, model, dtype, block_size=kind.tight, room=1.12, **sizes)
    cuts = cuts_of(engine)
    assert run(engine, kind.requests) == alone(rows, model, dtype, kv_cache_dtype)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0 or rows != "sharing"
    assert sum(cuts) > 0


@every_type
@every_short_kind
def test_preempted_before_every_step_equals_undisturbed(rows: str, dtype: str, kv_cache_dtype: str) -> None:
    """All that runs loses its state whenever a token is known, so every token comes from a prompt computed anew."""
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 256}
    engine = engine_of(rows, "lfm2", dtype, room=30, prefix_caching=False, kv_cache_dtype=kv_cache_dtype, **sizes)
    schedule, owing = engine.scheduler.schedule, 0

    def preempting() -> Schedule:
        nonlocal owing
        owing += sum(s.generation.constraint is not None and s.num_owed > 1 for s in engine.scheduler.running)
        for sequence in engine.scheduler.running[::-1]:
            engine.scheduler._preempt(sequence)
        return schedule()

    engine.scheduler.schedule = preempting  # type: ignore[method-assign]
    assert run(engine, KINDS[rows].requests) == alone(rows, "lfm2", dtype, kv_cache_dtype)
    assert engine.stats.num_preemptions > 20
    assert owing > 5 or rows != "structured", "some owed forced tokens"


@pytest.mark.parametrize("overlaps", [False, True], ids=["single", "overlapping"])
@pytest.mark.parametrize("records", [False, True], ids=["launched", "recorded"])
@every_short_kind
def test_overlapping_steps_and_recordings_change_nothing(rows: str, overlaps: bool, records: bool) -> None:
    """In bfloat16, whose steps a CPU with its instructions records."""
    engine = engine_of(rows, "lfm2", "bfloat16", room=30, parts={"overlaps": overlaps}, max_num_seqs=6)
    if not records:
        engine.runner.replays = None
    assert run(engine, KINDS[rows].requests) == alone(rows, "lfm2", "bfloat16")
    assert engine.runner.replays is None or engine.runner.replays.recorded


@every_type
@every_short_kind
def test_a_row_goes_on_from_any_token_of_an_earlier_run_as_if_undisturbed(
    rows: str, dtype: str, kv_cache_dtype: str
) -> None:
    """Also from inside forced tokens, and from free text before a marker; each under the key that its draws have."""
    expected = alone(rows, "lfm2", dtype, kv_cache_dtype)
    resumed = [
        replace(request, output_token_ids=expected[request.key].first.token_ids[:end])
        for request in KINDS[rows].requests
        for end in range(0 if request.labels else len(expected[request.key].first.token_ids))
    ]
    engine = engine_of(rows, "lfm2", dtype, room=30, share_duplicates=False, kv_cache_dtype=kv_cache_dtype)
    results = list(checked_run(engine, resumed))
    assert len(results) == len(resumed) > 80
    for result in results:
        assert replace(result, timings=Timings()) == expected[result.key]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_DTYPES])
@every_short_kind
def test_the_reference_kernels_give_the_same_tokens_in_float32(rows: str, kv_cache_dtype: str) -> None:
    """Plain torch promises no equal bits, but on a tiny model its tokens must not change, batched or alone."""
    reference = tiny_model(kernels=ReferenceKernels(), vocab_size=KINDS[rows].vocab_size)
    requests = KINDS[rows].requests[::2]
    for sizes in ({"block_size": 3, "max_num_batched_tokens": 20, "max_num_seqs": 6}, {"max_num_seqs": 1}):
        found = run(engine_of(rows, reference, room=3, kv_cache_dtype=kv_cache_dtype, **sizes), requests)
        for key, result in found.items():
            for mine, theirs in zip(
                result.samples, alone(rows, "lfm2", "float32", kv_cache_dtype)[key].samples, strict=True
            ):
                assert replace(mine, logprobs=None) == replace(theirs, logprobs=None), key


def logits_of_every_token(engine: Engine, requests: Iterable[Request]) -> dict[tuple[int, int], Tensor]:
    """The logits behind every generated token, by request key and position."""
    seen: dict[tuple[int, int], Tensor] = {}
    plain = engine.sampler.sample

    def sample(logits: Tensor, sequences: list[Any], *args: Any) -> Tensor:
        for row, sequence in zip(logits, sequences, strict=True):
            seen[sequence.request.key, sequence.num_output_tokens] = row.clone()
        return plain(logits, sequences, *args)

    engine.sampler.sample = sample  # type: ignore[method-assign]
    run(engine, requests)
    return seen


@every_model
@every_dtype
def test_logits_are_the_same_bit_for_bit(model: str, dtype: str) -> None:
    """Chunked, preempted, in blocks of 3 and on two threads, against whole prefixes alone."""
    requests = KINDS["greedy"].requests
    torch.set_num_threads(2)
    engine = engine_of("greedy", model, dtype, block_size=3, room=1.12, max_num_batched_tokens=20, max_num_seqs=12)
    seen = logits_of_every_token(engine, requests)
    assert engine.stats.num_preemptions > 0
    torch.set_num_threads(1)
    for request in requests:
        whole = [*request.prompt_token_ids, *alone("greedy", model, dtype)[request.key].first.token_ids][:-1]
        rows = prefix_logits(model_of(model, dtype), whole)[len(request.prompt_token_ids) - 1 :]
        for position, row in enumerate(rows):
            assert torch.equal(seen[request.key, position], row), (request.key, position)


any_setting = {
    "rows": st.sampled_from(SHORT),
    "types": st.sampled_from(TYPES[:2]),
    "overlaps": st.booleans(),
    "block_size": st.integers(1, 40),
    "room": st.floats(1, 3),
    "order": st.randoms(use_true_random=False),
    "sizes": st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(1, 120),
            "max_num_seqs": st.integers(1, 18),
            "look_ahead": st.integers(1, 24),
            "prefix_caching": st.booleans(),
            "share_duplicates": st.booleans(),
            "longest_first": st.booleans(),
            "forecast_memory": st.booleans(),
        }
    ),
}


def check_setting(
    rows: str,
    types: tuple[str, str],
    order: random.Random,
    overlaps: bool,
    sizes: dict[str, Any],
    model: str = "lfm2",
    threads: int = 1,
    **pool: Any,
) -> None:
    """Any of the rows in any order, with any sizes and policies."""
    dtype, kv_cache_dtype = types
    expected = alone(rows, model, dtype, kv_cache_dtype)
    torch.set_num_threads(threads)
    requests = order.sample(KINDS[rows].requests, order.randint(1, len(expected)))
    engine = engine_of(rows, model, dtype, parts={"overlaps": overlaps}, kv_cache_dtype=kv_cache_dtype, **sizes, **pool)
    assert run(engine, requests) == {request.key: expected[request.key] for request in requests}
    torch.set_num_threads(1)


@settings(max_examples=6)  # more of them, and other models, in the slow test below
@given(**any_setting)
def test_no_setting_changes_a_result(**found: Any) -> None:
    check_setting(**found)


@pytest.mark.slow
@settings(max_examples=share_of(300))
@given(
    **any_setting
    | {
        "types": st.sampled_from(TYPES),
        "model": st.sampled_from([f"{name} {kind}".strip() for name in (*SHAPES, "trained") for kind in INTEGERS]),
        "threads": st.sampled_from([1, 2]),
    }
)
def test_no_setting_changes_a_result_of_any_model(**found: Any) -> None:
    check_setting(**found)


def test_a_copy_of_a_request_under_another_key_draws_other_tokens() -> None:
    """Randomness is keyed by the row: equal prompts must not give equal samples."""
    one = KINDS["drawn"].requests[0]
    copies = [replace(one, key=key, params=replace(one.params, max_tokens=20, ignore_eos=True)) for key in range(6)]
    assert len({result.first.token_ids for result in run(engine_of("drawn"), copies).values()}) == 6


def prompt_logits(model: Decoder, kv_cache_dtype: str, request: Request) -> Tensor:
    """Logits behind every token of a request's prompt."""
    ids = request.prompt_token_ids
    pool: dict[str, Any] = {"num_blocks": -(-len(ids) // 16), "block_size": 16, "num_slots": 1}
    kind = {"dtype": model.dtype, "device": model.device, "kv_cache_dtype": KV_DTYPES.get(kv_cache_dtype)}
    return model.forward(whole_input(ids, 16), allocate(model.config, **pool, **kind), len(ids) - 1).float()


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TYPES[2:])
def test_keys_and_values_of_fewer_bits_change_logits_a_little_and_not_more(dtype: str, kv_cache_dtype: str) -> None:
    for request in KINDS["long"].requests[:3]:
        plain, rounded = (prompt_logits(model_of("lfm2", dtype), kind, request) for kind in ("auto", kv_cache_dtype))
        error = ((rounded - plain).norm() / plain.norm()).item()
        assert 0 < error < 0.03


@pytest.mark.parametrize(
    ("rows", "model"), [*((rows, "lfm2") for rows in ("greedy", "drawn", "structured")), ("sharing", "lfm3")]
)
def test_these_rows_end_in_every_way(rows: str, model: str) -> None:
    """Otherwise every sequence would end at max_tokens, and the tests above would show less than they claim."""
    samples = [sample for result in alone(rows, model).values() for sample in result.samples]
    ends = {(sample.finish_reason, sample.is_complete) for sample in samples}
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    if rows == "sharing":
        assert {reason for reason, _ in ends} == set(FinishReason)
    elif rows == "structured":
        assert ends >= {(stop, True), (stop, False), (length, True), (length, False), (length, None)}
        assert any(len({s.token_ids for s in result.samples}) > 1 for result in alone(rows).values())
    else:
        assert {reason for reason, _ in ends} >= {stop, length}
