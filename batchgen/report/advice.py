"""Advice on a run: its bound, and one sentence for each thing to change, derived from the numbers of its report.

Plain rules with their thresholds. If no rule applies, the model's arithmetic was the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.core.units import counted

_FULL_KV = 0.95
_PREEMPTIONS_PER_ROW = 0.05
_HALF = 0.5
_CUT_OFF_SHARE = 0.1  # of the rows

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
_BATCH_LIMITS = {"sequences_share": "max_num_seqs", "tokens_share": "the token budget"}


def bound_by(report: Mapping[str, Any]) -> str:
    """The work that took most of the time; for the model's own work also the limit that kept its steps small."""
    seconds = report["seconds"]
    if not report["wall_s"]:
        return "nothing was run"
    spent: Counter[str] = Counter()
    for account, words in _WORK.items():
        spent[words] += seconds.get(account, 0.0)
    most, _ = spent.most_common(1)[0]
    if most != _WORK["prefill"]:
        return most
    if _lacks_kv_cache_memory(report):
        return "KV memory"
    occupancy = report["occupancy"] or dict.fromkeys(_BATCH_LIMITS, 0.0)
    name, limit = max(_BATCH_LIMITS.items(), key=lambda item: occupancy[item[0]])
    share = occupancy[name]
    filled = f"steps held {share:.0%} of {limit}"
    if report["occupancy"] and share < _HALF:
        return f"too few rows at a time: {filled}"
    larger = max(("prefill", "decode"), key=lambda name: seconds.get(name, 0.0))
    return f"{most}, most of it {larger}" + (f"; {filled}" if report["occupancy"] else "")


def advice(report: Mapping[str, Any]) -> list[str]:
    """Changes that would help, the most effective first."""
    settings = []
    if _lacks_kv_cache_memory(report):
        settings.append("KV memory bound: raise --kv-cache-memory, or lower --max-num-seqs")
    if bound_by(report) == _WORK["load"]:
        settings.append("loading the model took most of the time: give a run more rows")
    return [*settings, *warnings(report)]


def warnings(report: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why answers, or the count of right ones, may not be as intended."""
    for name, count in report.get("empty_fields", {}).items():
        yield f"{counted(count, 'row')} ran with an empty {name} in the prompt"
    structured = report.get("structured") or {"incomplete": 0}
    if structured["incomplete"]:
        answers = f"{structured['incomplete']:,} of {counted(structured['samples'], 'structured answer')}"
        whole = "it was complete" if structured["incomplete"] == 1 else "they were complete"
        remedy = "raise max_tokens, or limit the lists (maxItems) and strings (maxLength) in the schema"
        yield f"{answers} ended before {whole}: {remedy}"
    accuracy = report.get("accuracy")
    if accuracy and not accuracy["total"]:
        yield "nothing was compared: the column of [eval] expected is empty in all finished rows"
    elif accuracy and not accuracy["correct"]:
        remedy = "get bare answers by [classify] labels, structured_outputs or a system prompt, or set [eval] extract"
        if "without_answer" in accuracy or "num_labels" in accuracy or "structured" in report:  # one of these is set
            remedy = "its wrong rows show both"
        yield f"no answer equals [eval] expected (0 of {accuracy['total']:,}); {remedy}"
    num_cut = report["finish_reasons"].get("length", 0) - structured["incomplete"]
    num_answers = sum(report["finish_reasons"].values())
    generates = report["tokens"]["completion"] > 0  # a job that only scores cuts nothing off
    if generates and num_cut > _CUT_OFF_SHARE * num_answers:
        verb = "was" if num_cut == 1 else "were"
        cut = f"{num_cut:,} of {counted(num_answers, 'answer')} {verb} cut off by max_tokens or the context"
        if report.get("cut_by_job", 0) < num_cut:  # by limits of rows, by the context, or one of several samples
            yield f"{cut}: raise max_tokens where it is set, in the job or in rows; --update computes what that changes"
        else:
            yield f"{cut}: raise max_tokens in the job and run it with --update, which computes only these"


def _lacks_kv_cache_memory(report: Mapping[str, Any]) -> bool:
    occupancy, preemptions = report["occupancy"], report["engine"].get("num_preemptions", 0)
    is_full = bool(occupancy) and occupancy["max_kv_use"] > _FULL_KV
    return is_full and preemptions > _PREEMPTIONS_PER_ROW * report["rows"]["total"]
