"""Reports made of invented rows and counts."""

from __future__ import annotations

from typing import Any

from batchgen.report.build import build_report
from batchgen.report.rows import RowTotals

ABOUT: dict[str, Any] = {
    "model": "m",
    "input": ["i"],
    "shard": "1/1",
    "created_at": "2026-01-01T00:00:00+00:00",
    "numerics": {"dtype": "bfloat16", "device": "cpu"},
    "threads": 2,
}


def record(index: int, **more: Any) -> dict[str, Any]:
    """An output record; ``timings`` in ``more`` are beside its own ones."""
    timings = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 1.0, "ttft_s": 0.3, "tpot_s": 0.1, "total_s": 1.0 + index}
    timings |= {"cached_tokens": 0, "preemptions": 0, **more.pop("timings", {})}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return {"id": f"r{index}", "index": index, "finish_reason": "stop", "usage": usage, "timings": timings, **more}


def scored_record(index: int, label: str) -> dict[str, Any]:
    """That of a row of a job with labels."""
    plain = record(index, usage={"prompt_tokens": 10, "completion_tokens": 0})
    left_out = ("text", "finish_reason")
    fields = {"label": label, "score": 0.75, "scores": {label: 0.75, "other": 0.25}}
    return {name: value for name, value in plain.items() if name not in left_out} | fields


def made(errors: int = 0, rows: int = 20, **usage: Any) -> dict[str, Any]:
    totals = RowTotals()
    for index in range(rows):
        totals.add_result(record(index))
    for _ in range(errors):
        totals.add_error({"code": "too_long"})
    return build_report(totals, {"wall_s": 10.0, "seconds": {"generate": 9.0, "other": 1.0}, **usage}, ABOUT)


def engine(**counts: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"num_steps": 10, "num_prefill_tokens": 200, "num_decode_tokens": 100, "max_kv_use": 0.5}
    known |= {"steps_s": 9.0, "sequences_s": 63.0, "tokens_s": 270.0, "kv_use_s": 2.7}
    known |= {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    known |= {"phase_s": {"forward": 8.0, "sample": 1.0}, "forward_prefill_s": 3.0}
    return known | counts
