"""What limited a run and what its user can change, one sentence each, derived from the numbers of its report.

Plain rules with their thresholds. Where no rule applies, the model's arithmetic was the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.core.units import counted, format_duration

_FULL_SHARE = 0.9  # of a limit of the batch: it was as full as it gets
_FULL_KV = 0.95
_PREEMPTIONS_PER_ROW = 0.05
_HALF = 0.5
_CUT_OFF_SHARE = 0.1  # of the rows
_TAIL_SHARE = 0.1  # of the wall time
_LEAST_TAIL_S = 1.0
_SHOWN_PARTS = 4  # of a schema
_IDLE_SHARE = 0.3  # of the time that workers were there

_WORK = {  # words for the accounts of the time; those with the same words are one
    "load": "loading the model",
    "read": "reading and tokenizing",
    "write": "writing",
    "host": "work between the model's steps",
    "sample": "sampling",
    "mask": "masks of structured outputs",
    "other": "work outside of the engine",
    "prefill": "the model's own work",
    "decode": "the model's own work",
}
BARE_ANSWERS = (
    "whole texts are compared, so let the model give bare ones: by choices, structured_outputs or a system prompt"
)
_BATCH_LIMITS = {"sequences_share": "max_num_seqs", "tokens_share": "the token budget"}
_ERROR_ADVICE = {
    "too_long": "exceeded the context or KV memory: shorten, or raise --max-model-len or --kv-memory",
    "duplicate_id": "repeated the id of an earlier row: make input.id unique",
    "internal": "failed because of batchgen or the machine: run again with --update; if they fail again, report a bug",
}


def bound_by(report: Mapping[str, Any]) -> str:
    """What most of the time went into, in a few words; of the model's own work, what kept a step from being larger."""
    seconds = report["seconds"]
    if not report["wall_s"]:
        return "nothing was run"
    spent: Counter[str] = Counter()
    for account, words in _WORK.items():
        spent[words] += seconds.get(account, 0.0)
    most, _ = spent.most_common(1)[0]
    if most != _WORK["prefill"]:
        return most
    if _lacks_kv_memory(report):
        return "KV memory"
    limit, share = fullest(report)
    filled = f"steps held {share:.0%} of {limit}"
    if limit and share < _HALF:
        return f"too few rows at a time: {filled}"
    larger = max(("prefill", "decode"), key=lambda name: seconds.get(name, 0.0))
    return f"{most}, most of it {larger}" + (f"; {filled}" if limit else "")


def fullest(report: Mapping[str, Any]) -> tuple[str, float]:
    """The limit of the batch that its steps were nearest to, and how near; "" where that was not measured."""
    if not (occupancy := report["occupancy"]):
        return "", 0.0
    return max(((limit, occupancy[name]) for name, limit in _BATCH_LIMITS.items()), key=lambda item: item[1])


def advice(report: Mapping[str, Any]) -> list[str]:
    """What to change, the most effective first."""
    return [*_settings_advice(report), *_rows_advice(report)]


def warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """What makes answers, or the count of right ones, not what was asked for."""
    for name, count in report.get("empty_fields", {}).items():
        yield f"{counted(count, 'row')} ran with an empty {name} in the prompt"
    found = report.get("structured") or {"incomplete": 0}
    if found["incomplete"]:
        answers = f"{found['incomplete']:,} of {counted(found['samples'], 'structured answer')}"
        whole = "it was complete" if found["incomplete"] == 1 else "they were complete"
        remedy = "raise max_tokens where finish_reason is length"
        if parts := report.get("open_schema"):
            more = ", …" if len(parts) > _SHOWN_PARTS else ""
            remedy = f"limit lists and strings in the schema ({'; '.join(parts[:_SHOWN_PARTS])}{more})"
        yield f"{answers} ended before {whole}: {remedy}"
    accuracy = report.get("accuracy")
    if accuracy and not accuracy["total"]:
        yield "nothing was compared: no row that is done has a value in the column that [output] expected names"
    elif accuracy and not accuracy["correct"]:
        yield _none_right(accuracy)
    num_cut = report["finish_reasons"].get("length", 0) - found["incomplete"]
    num_answers = sum(report["finish_reasons"].values())
    generates = report["tokens"]["completion"] > 0  # a job that only scores cuts nothing off
    if generates and num_cut > _CUT_OFF_SHARE * num_answers:
        said = f"{num_cut:,} of {num_answers:,} answers were cut off by max_tokens or the context"
        yield f"{said}: raise max_tokens in the job and run it with --update, which computes these alone"


def _none_right(accuracy: Mapping[str, Any]) -> str:
    """Why no row may be right, and the setting that would help."""
    of_all = f"0 of {accuracy['total']:,}"
    if (lacking := accuracy.get("without_answer")) is not None:
        where = f"; in {counted(lacking, 'text')} the rule [output] answer finds no answer" if lacking else ""
        return f"no answer equals [output] expected ({of_all}){where}"
    found, helped = f"no text equals [output] expected ({of_all})", accuracy.get("helped") or {}
    holding = f", {accuracy['holding']:,} hold it" if accuracy.get("holding") else ""
    if helped:
        rule, count = next(iter(helped.items()))
        return f'{found}{holding}: with [output] answer = "{rule}" {count:,} would be right'
    if holding:
        return f'{found}{holding}: [output] answer = "REGEX" compares what its group ( ) finds'
    return f"{found}; {BARE_ANSWERS}"


def _settings_advice(report: Mapping[str, Any]) -> Iterator[str]:
    occupancy, tail_s, (limit, share) = report["occupancy"], report["tail_s"] or 0.0, fullest(report)
    if _lacks_kv_memory(report):
        yield "KV memory bound: raise --kv-memory, or lower --max-num-seqs"
    elif limit == "max_num_seqs" and share > _FULL_SHARE and occupancy["kv_use"] < _HALF:
        most = occupancy["max_num_seqs"]
        yield f"max_num_seqs = {most:,} rows ran at once and KV memory was left: raise --max-num-seqs"
    if tail_s > max(_TAIL_SHARE * report["wall_s"], _LEAST_TAIL_S):
        why = "because a few answers were long: give a run more rows, or lower max_tokens"
        yield f"for the last {format_duration(tail_s)} less than half of the rows were running, {why}"
    workers = report.get("workers", ())
    hours = sum(worker["worker_hours"] for worker in workers)
    idle = sum((1 - worker["busy_share"]) * worker["worker_hours"] for worker in workers) / (hours or 1.0)
    if idle > _IDLE_SHARE:
        yield f"workers had nothing to do for {idle:.0%} of their time: fewer of them would do, or give a run more rows"
    if bound_by(report) == _WORK["load"]:
        yield "loading the model took most of the time: give a run more rows"
    if "cublas" in report["numerics"].get("kernels", ""):
        yield "with cuBLAS a row's tokens may depend on its batch: with Triton, leave out --no-batch-invariant"


def _rows_advice(report: Mapping[str, Any]) -> Iterator[str]:
    yield from warnings(report)
    others = 0
    for code, count in sorted(report["errors"].items(), key=lambda item: -item[1]):
        if code in _ERROR_ADVICE:
            yield f"{counted(count, 'row')} {_ERROR_ADVICE[code]}"
        else:
            others += count
    if others:
        yield f"{counted(others, 'row')} could not run: see errors.jsonl"


def _lacks_kv_memory(report: Mapping[str, Any]) -> bool:
    occupancy, preemptions = report["occupancy"], report["engine"].get("num_preemptions", 0)
    is_full = bool(occupancy) and occupancy["max_kv_use"] > _FULL_KV
    return is_full and preemptions > _PREEMPTIONS_PER_ROW * report["rows"]["total"]
