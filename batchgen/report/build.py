"""``report.json``: the totals of a run, from its finished rows and the resources its invocations used.

Only times add up over invocations: interrupted runs report the same tokens. ``KEYS`` says what each key means.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.machine import processor_name
from batchgen.core.storage import read_regular, write_atomic
from batchgen.core.units import counted
from batchgen.core.version import build
from batchgen.report.rows import RowTotals
from batchgen.report.tables import render_report
from batchgen.report.usage import MALFORMED, device_s, split, tail_s, thin, usage_of, workers_section

REPORT_VERSION = 4
_PACKAGES = ("torch", "numpy", "numba", "tokenizers", "pyarrow")

KEYS = {
    "version": "of this format",
    "model": "model.path of the job",
    "adapter": "model.adapter of the job, where there is one",
    "input": "input.path of the job",
    "shard": 'which part of the rows, as "i/n"',
    "created_at": "when the first invocation began, ISO 8601",
    "finished_at": "when the report was written, ISO 8601",
    "numerics": "dtype, device and kernel set (instructions, library) the model ran in; absent: kernels "
    "if not known, weights, activations and kv_cache_dtype if not set",
    "threads": "CPU threads, of each worker; null if the last invocation loaded no model",
    "sizes": "what the engine worked with, chosen by the user or by auto: max_num_batched_tokens, max_num_seqs, "
    "block_size, num_blocks, kv_bytes, max_model_len, kv_cache_dtype, kernels and its policies, of a GPU "
    "max_device_bytes; null where not known",
    "rows": "rows done, failed and in all (total)",
    "errors": "failed rows by code",
    "finish_reasons": "samples of done rows by finish_reason; a row has n of them",
    "tokens": "of done rows: prompt, of them cached (found in the prefix cache, copies apart), completion (generated "
    "by all samples); total is prompt + completion",
    "duplicates": "rows that got a copy of an identical one's answer and were not computed",
    "copied_tokens": "their part of tokens: prompt, completion",
    "reused": "after an update or with output.reuse: rows kept from earlier results, and their part of tokens: prompt, "
    "completion",
    "wall_s": "seconds of all invocations, start to end; of a killed one, up to its last row",
    "device_s": "wall_s times the mean number of workers",
    "seconds": "wall_s by kind of work: load (checks, weights), read (reading, tokenizing), prefill, decode, mask (of "
    "structured outputs), sample, host (between the model's steps), write (journal, outputs, report), other; they sum "
    "to wall_s; of several workers, the times of their steps are means",
    "generate_s": "prefill + decode + mask + sample + host",
    "tokens_per_s": "prompt, completion, total tokens of computed rows (without copied and reused ones) over wall_s. "
    "Texts, and the gate of report --compare, have them over generate_s: neither loading nor compiling kernels counts",
    "latency_s": "p50, p90, p99 over computed rows of each of their timings",
    "histograms": "done rows by length, computed ones by latency: counts between logarithmic edges",
    "slowest": "the computed rows with the longest total_s",
    "preemptions": "sum over done rows",
    "computed_tokens": "what the engine computed: tokens of prompts and generated ones, lost work included, but "
    "for the last two seconds of a killed invocation",
    "recomputed_tokens": "of them, computed again after a preemption",
    "prefix_cache": "prompt tokens looked up (queried), found (hit), and their share (hit_rate); null where not used",
    "tail_s": "seconds at the end in which fewer than half of the largest number of sequences ran; null if unknown",
    "sessions": "how many invocations it took",
    "occupancy": "means over the time of steps: sequences, tokens_per_step, kv_use; sequences_share and tokens_share "
    "are of the limits max_num_seqs and max_num_batched_tokens, of one worker; max_kv_use is the fullest step. null "
    "where not measured",
    "series": "columns over time, at most 2,000 points of one or more steps: at_s (start), span_s, steps, tokens, "
    "prefill_tokens; sequences and kv_use are means; empty with workers",
    "engine": "what the engine counted, all invocations together; see EngineStats",
    "device_hours_per_million_output_tokens": "device_s over completion tokens of computed rows, for unit cpu times "
    "threads; null where nothing was generated",
    "device_hours_per_million_prompt_tokens": "the same over their prompt tokens",
    "max_rss_bytes": "most memory the process held, without its workers",
    "empty_fields": "done rows by field of the prompt's template that is empty there (null, or white space)",
    "workers": "where rows ran on workers, each one's name, place, rows, tokens out, busy_share (of the time that it "
    "was there), worker_hours, losses, rows_given_again to others, tokens_taken_over by these; invocations add up",
    "bound_by": "what most of the time went into, in words",
    "advice": "what to change, in sentences",
    "machine": "platform, processor, python",
    "versions": "of batchgen and what it stands on",
    "structured": "with structured outputs: rows, their samples, those that ended before they were complete "
    "(incomplete), tokens that were not sampled since the grammar left no choice (forced_tokens), and their share of "
    "all generated ones",
    "perplexity": "with prompt_logprobs: of all prompts together (value), where each token counts once, and the number "
    "of these tokens: all but the first of each prompt",
    "compared": "a digest of the ids and right answers of the rows that accuracy counts, in any order: report "
    "--compare judges accuracy over the same rows alone. null where none was compared",
    "accuracy": "with eval.expected: rows compared (total), those whose whole text or, with eval.extract, what it "
    "finds is the expected one (correct), their share (exact_match) and its 95% interval; up to five wrong rows; with "
    "eval.extract the rows in whose text none was found (without_answer). With n above 1 these "
    "are of the first sample, and samples has shares over rows: of right samples (mean), of rows whose most frequent "
    "answer is right (majority), of those with a right one (best). Where answers are labels ([classify], a "
    "classifier, structured_outputs.choice): of up to 96 labels, the most frequent first, rows where it is expected, "
    "found, and both (correct), precision and recall; the 144 most frequent confusions; and num_labels",
}
_OPTIONAL_KEYS = {"accuracy", "adapter", "device_s", "perplexity", "reused", "structured", "workers"}
_OPTIONAL_KEYS |= {"compared", "empty_fields"}  # reports of earlier versions may lack them
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


def build_report(rows: RowTotals, usage: Mapping[str, Any], job_facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json``; see ``KEYS``.

    ``usage`` adds up all invocations (``sessions``, ``wall_s``, ``seconds`` by account, ``engine`` counts with their
    ``series``); ``job_facts`` describe the job and the machine (model, input, numerics, threads, sizes).
    """
    engine = dict(usage.get("engine", {}))
    series = thin(engine.pop("series", {}))
    workers = workers_section(engine)
    engine.pop("workers", None)
    wall_s, accounts = usage.get("wall_s", 0.0), usage.get("seconds", {})
    generate_s, devices_s = accounts.get("generate", 0.0), device_s(usage)
    queried, hit = engine.get("num_queried_tokens", 0), engine.get("num_cached_tokens", 0)
    spared = rows.copied_tokens + rows.reused_tokens
    computed = {side: rows.tokens[side] - spared[side] for side in ("prompt", "completion")}
    computed["total"] = sum(computed.values())
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "sizes": None,
        **job_facts,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **rows.report_section(),
        "wall_s": round(wall_s, 3),
        "device_s": round(devices_s, 3),
        "seconds": {name: round(seconds, 3) for name, seconds in split(accounts, engine).items()},
        "generate_s": round(generate_s, 3),
        "tokens_per_s": {name: round(count / wall_s, 2) if wall_s else 0.0 for name, count in computed.items()},
        "prefix_cache": {"queried": queried, "hit": hit, "hit_rate": round(hit / queried, 4)} if queried else None,
        "computed_tokens": engine.get("num_prefill_tokens", 0) + engine.get("num_output_tokens", 0),
        "recomputed_tokens": engine.get("num_recomputed_tokens", 0),
        "tail_s": usage["tail_s"] if "tail_s" in usage else tail_s(series),
        "sessions": usage.get("sessions", 1),
        "occupancy": _occupancy(engine),
        "series": series,
        "engine": engine,
        "device_hours_per_million_output_tokens": _device_hours(job_facts, devices_s, computed["completion"]),
        "device_hours_per_million_prompt_tokens": _device_hours(job_facts, devices_s, computed["prompt"]),
        "max_rss_bytes": usage.get("max_rss_bytes", 0),
        "empty_fields": dict(sorted(usage.get("empty_fields", {}).items())),
        **machine_facts(),
    }
    if workers:
        report["workers"] = workers
    if rows.completeness:
        forced, generated = (engine.get(f"num_{name}_tokens", 0) for name in ("forced", "output"))
        report["structured"] = {
            "rows": rows.num_structured,
            "samples": rows.completeness.total(),
            "incomplete": rows.completeness[False],
            "forced_tokens": forced,
            "forced_share": round(forced / generated, 4) if generated else None,
        }
    return report | {"bound_by": bound_by(report), "advice": advice(report)}


def _occupancy(engine: Mapping[str, Any]) -> dict[str, Any] | None:
    steps_s = engine.get("steps_s", 0.0)
    if not steps_s:
        return None
    max_num_seqs, max_tokens = engine["max_num_seqs"], engine["max_num_batched_tokens"]
    sequences, tokens, kv_use = (engine[f"{name}_s"] / steps_s for name in ("sequences", "tokens", "kv_use"))
    return {
        "sequences": round(sequences, 2),
        "tokens_per_step": round(tokens, 2),
        "kv_use": round(kv_use, 4),
        "max_kv_use": round(engine["max_kv_use"], 4),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_tokens,
        "sequences_share": round(sequences / (max_num_seqs or 1), 4),
        "tokens_share": round(tokens / (max_tokens or 1), 4),
    }


def _device_hours(job_facts: Mapping[str, Any], devices_s: float, num_tokens: int) -> dict[str, Any]:
    is_gpu = job_facts.get("numerics", {}).get("device", "cpu") != "cpu"
    devices = 1 if is_gpu else job_facts.get("threads")
    hours = round(devices * devices_s / 3600 * 1e6 / num_tokens, 4) if devices and num_tokens else None
    return {"unit": "gpu" if is_gpu else "cpu", "hours": hours}


@lru_cache(maxsize=1)
def machine_facts() -> Mapping[str, Any]:
    """The platform, processor and Python, and versions of the package and of the libraries that compute."""
    versions = {"batchgen": build()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    system = {"platform": platform.platform(), "processor": processor_name(), "python": platform.python_version()}
    return {"machine": system, "versions": versions}


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Replace the file at ``path`` atomically. Raises StorageError."""
    write_atomic(path, json.dumps(json.loads(encode_json(report)), indent=2).encode() + b"\n")


def read_report_file(path: Path) -> dict[str, Any]:
    """A report that was written by this version. Raises UsageError for anything else."""
    try:
        report = json.loads(read_regular(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise UsageError(f"{path} is not a report: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a report: not valid JSON ({error})") from error
    version = report.get("version") if isinstance(report, dict) else None
    if version != REPORT_VERSION:
        was = f"is a report of version {version}" if isinstance(version, int) else "is not a report"
        raise UsageError(f"{path} {was}; this batchgen reads version {REPORT_VERSION}")
    if missing := sorted(KEYS.keys() - _OPTIONAL_KEYS - report.keys()):
        raise UsageError(f"{path} is incomplete: it lacks {', '.join(missing[:3])}")
    try:  # each reader of a report does one or the other
        render_report(report)
        sum(report["rows"][name] for name in ("total", "done", "failed"))
        build_report(RowTotals(), usage_of(report), report)
        datetime.fromisoformat(report["finished_at"])
    except MALFORMED as error:
        raise UsageError(f"{path} is not as it was written ({error!r}); was it edited?") from None
    return dict(report)


def bound_by(report: Mapping[str, Any]) -> str:
    """The kind of work that took most of the time or, if that was the model's, what kept its steps small."""
    seconds = report["seconds"]
    if not report["wall_s"]:
        return "nothing was run"
    spent: Counter[str] = Counter()
    for account, words in _WORK.items():
        spent[words] += seconds.get(account, 0.0)
    dominant, _ = spent.most_common(1)[0]
    if dominant != _WORK["prefill"]:
        return dominant
    if _lacks_kv_cache_memory(report):
        return "KV memory"
    occupancy = report["occupancy"] or dict.fromkeys(_BATCH_LIMITS, 0.0)
    name, limit = max(_BATCH_LIMITS.items(), key=lambda item: occupancy[item[0]])
    share = occupancy[name]
    filled = f"steps held {share:.0%} of {limit}"
    if report["occupancy"] and share < _HALF:
        return f"too few rows at a time: {filled}"
    larger = max(("prefill", "decode"), key=lambda name: seconds.get(name, 0.0))
    return f"{dominant}, most of it {larger}" + (f"; {filled}" if report["occupancy"] else "")


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
        yield f"{cut}: raise max_tokens where it is set, in the job or in rows; --update computes what that changes"


def _lacks_kv_cache_memory(report: Mapping[str, Any]) -> bool:
    occupancy, preemptions = report["occupancy"], report["engine"].get("num_preemptions", 0)
    is_full = bool(occupancy) and occupancy["max_kv_use"] > _FULL_KV
    return is_full and preemptions > _PREEMPTIONS_PER_ROW * report["rows"]["total"]
