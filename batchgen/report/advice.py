"""What limited a run and what its user can change, one sentence each, derived from the numbers of its report.

Plain rules with their thresholds. Where no rule applies, the model's arithmetic was the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.core.units import counted, format_duration

_OVERHEAD_SHARE = 0.3  # of the wall time: an overhead above it is named as the limit
_FULL_SHARE = 0.9  # of max_num_seqs: the batch was as full as it gets
_FULL_KV = 0.95
_PREEMPTIONS_PER_ROW = 0.05
_HALF = 0.5
_CUT_OFF_SHARE = 0.1  # of the rows
_TAIL_SHARE = 0.1  # of the wall time
_LEAST_TAIL_S = 1.0
_IDLE_SHARE = 0.3  # of the time that workers were there

_OVERHEADS = {
    "load": "loading the model",
    "read": "reading and tokenizing",
    "write": "writing",
    "host": "work between the model's steps",
}
_ERROR_ADVICE = {
    "too_long": "too long for the context or KV memory: shorten, or raise --max-model-len or --kv-memory",
    "duplicate_id": "with an id that was there before: make input.id unique",
    "internal": "without a finite answer from the model: please report this",
}


def bound_by(report: Mapping[str, Any]) -> str:
    """What most of the time went into, in a few words."""
    wall_s, seconds = report["wall_s"], report["seconds"]
    if not wall_s:
        return "nothing was run"
    for account, words in _OVERHEADS.items():
        if seconds.get(account, 0.0) > _OVERHEAD_SHARE * wall_s:
            return words
    if _lacks_kv_memory(report):
        return "KV memory"
    share = report["occupancy"]["sequences_share"]
    if share is not None and share < _HALF:
        return "too few sequences at a time"
    larger = max(("prefill", "decode"), key=lambda name: seconds.get(name, 0.0))
    return f"the model's own work, most of it {larger}"


def advice(report: Mapping[str, Any]) -> list[str]:
    """What to change, the most effective first."""
    return [*_settings_advice(report), *_rows_advice(report)]


def cut_off(report: Mapping[str, Any]) -> str:
    """What became of the rows whose structured outputs are not complete; "" if there are none."""
    found = report.get("structured") or {"incomplete": 0}
    if not found["incomplete"]:
        return ""
    rows = f"{found['incomplete']:,} of {counted(found['rows'], 'structured row')}"
    return f"{rows} ended before they were complete: raise max_tokens where finish_reason is length"


def _settings_advice(report: Mapping[str, Any]) -> Iterator[str]:
    occupancy, tail_s = report["occupancy"], report["tail_s"] or 0.0
    if _lacks_kv_memory(report):
        yield "KV memory bound: raise --kv-memory, or lower --max-num-seqs"
    elif (occupancy["sequences_share"] or 0.0) > _FULL_SHARE and (occupancy["kv_use"] or 0.0) < _HALF:
        most = occupancy["max_num_seqs"]
        yield f"all {most:,} places were taken and KV memory was left: try a higher --max-num-seqs"
    if tail_s > max(_TAIL_SHARE * report["wall_s"], _LEAST_TAIL_S):
        why = "waiting for the longest answers: give a run more rows, or lower max_tokens"
        yield f"the last {format_duration(tail_s)} ran less than half full, {why}"
    workers = report.get("workers", ())
    hours = sum(worker["worker_hours"] for worker in workers)
    idle = sum((1 - worker["busy_share"]) * worker["worker_hours"] for worker in workers) / (hours or 1.0)
    if idle > _IDLE_SHARE:
        yield f"workers had nothing to do for {idle:.0%} of their time: fewer of them would do, or give a run more rows"
    if bound_by(report) == _OVERHEADS["load"]:
        yield "loading took longer than it should pay for: give a run more rows"
    if "cublas" in report["numerics"].get("kernels", ""):
        yield "with cuBLAS a row's tokens may depend on its batch; with Triton --batch-invariant rules that out"


def _rows_advice(report: Mapping[str, Any]) -> Iterator[str]:
    if text := cut_off(report):
        yield text
    rows, incomplete = report["rows"], (report.get("structured") or {"incomplete": 0})["incomplete"]
    num_cut = report["finish_reasons"].get("length", 0) - incomplete
    generates = report["tokens"]["completion"] > 0  # a job that only scores cuts nothing off
    if generates and rows["done"] and num_cut > _CUT_OFF_SHARE * rows["done"]:
        yield f"{num_cut:,} of {rows['done']:,} answers were cut off by max_tokens or the context"
    others = 0
    for code, count in sorted(report["errors"].items(), key=lambda item: -item[1]):
        if code in _ERROR_ADVICE:
            yield f"{counted(count, 'row')} {_ERROR_ADVICE[code]}"
        else:
            others += count
    if others:
        yield f"{counted(others, 'row')} that could not run as written: errors.jsonl says why, by line"


def _lacks_kv_memory(report: Mapping[str, Any]) -> bool:
    is_full = (report["occupancy"]["max_kv_use"] or 0.0) > _FULL_KV
    return is_full and report["engine"].get("num_preemptions", 0) > _PREEMPTIONS_PER_ROW * report["rows"]["total"]
