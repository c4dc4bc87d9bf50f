"""What held a run back and what its user can change, in a sentence each, read off the report's own numbers.

A handful of plain rules with their thresholds in sight. Where no rule speaks, the model's arithmetic was the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.units import counted, format_duration

_LARGE = 0.3  # of the wall time: what takes that much is worth a word
_BUSY = 0.9  # of the places for sequences: as full as it gets
_KV_FULL = 0.95
_OFTEN = 0.05  # preemptions per row
_ROOM = 0.5
_CUT_OFF = 0.1  # of the rows
_LONG_TAIL = 0.1  # of the wall time
_LEAST_TAIL_S = 1.0  # less is not worth a word

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
        if seconds.get(account, 0.0) > _LARGE * wall_s:
            return words
    if _lacks_kv_memory(report):
        return "KV memory"
    share = report["occupancy"]["sequences_share"]
    if share is not None and share < _ROOM:
        return "too few sequences at a time"
    larger = max(("prefill", "decode"), key=lambda name: seconds.get(name, 0.0))
    return f"the model's own work, most of it {larger}"


def advice(report: Mapping[str, Any]) -> list[str]:
    """What to change, most telling first."""
    found = []
    rows, occupancy = report["rows"], report["occupancy"]
    share = occupancy["sequences_share"]
    if _lacks_kv_memory(report):
        found.append("KV memory bound: raise --kv-memory, or lower --max-num-seqs")
    elif share is not None and share > _BUSY and (occupancy["kv_use"] or 0.0) < _ROOM:
        most = occupancy["max_num_seqs"]
        found.append(f"all {most:,} places were taken and KV memory was left: try a higher --max-num-seqs")
    tail_s = report["tail_s"] or 0.0
    if tail_s > max(_LONG_TAIL * report["wall_s"], _LEAST_TAIL_S):
        tail = format_duration(tail_s)
        why = "waiting for the longest answers: give a run more rows, or lower max_tokens"
        found.append(f"the last {tail} ran less than half full, {why}")
    if bound_by(report) == _OVERHEADS["load"]:
        found.append("loading took longer than it should pay for: give a run more rows")
    if report["numerics"].get("device") == "cuda":
        found.append("on a GPU a row's tokens may depend on what shared its batch; --batch-invariant rules that out")
    is_scoring = not report["tokens"]["completion"]  # a job that generates nothing cuts nothing off
    cut_off = 0 if is_scoring else report["finish_reasons"].get("length", 0)
    if rows["done"] and cut_off > _CUT_OFF * rows["done"]:
        found.append(f"{cut_off:,} of {rows['done']:,} answers were cut off by max_tokens or the context")
    others = 0
    for code, count in sorted(report["errors"].items(), key=lambda item: -item[1]):
        if code in _ERROR_ADVICE:
            found.append(f"{counted(count, 'row')} {_ERROR_ADVICE[code]}")
        else:
            others += count
    if others:
        found.append(f"{counted(others, 'row')} that could not run as written: errors.jsonl says why, by line")
    return found


def _lacks_kv_memory(report: Mapping[str, Any]) -> bool:
    occupancy, rows = report["occupancy"], report["rows"]
    is_full = occupancy["max_kv_use"] is not None and occupancy["max_kv_use"] > _KV_FULL
    return is_full and report["engine"].get("num_preemptions", 0) > _OFTEN * rows["total"]
