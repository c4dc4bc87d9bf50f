"""``report.json``: the totals of a run, from its finished rows and the resources its invocations used.

Totals come from the rows themselves, so a run interrupted ten times reports the same tokens as an undisturbed one;
only times add up over invocations. ``KEYS`` says what each key means. The engine and the input are never read here.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.machine import processor_name
from batchgen.core.storage import write_atomic
from batchgen.core.version import __version__
from batchgen.model.roofline import roofline_section
from batchgen.report.advice import advice, bound_by
from batchgen.report.rows import RowTotals
from batchgen.report.usage import device_s, split, tail_s, thin, workers_section

REPORT_VERSION = 3
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
    "if not known, weights, activations and kv_dtype if not set",
    "threads": "CPU threads, of each worker; null if the last invocation loaded no model",
    "sizes": "what the engine worked with, chosen by the user or by auto: max_num_batched_tokens, max_num_seqs, "
    "block_size, num_blocks, kv_bytes, max_model_len, kv_dtype, kernels and its policies, of a GPU max_device_bytes; "
    "null where not known",
    "rows": "rows done, failed and in all (total)",
    "errors": "failed rows by code",
    "finish_reasons": "done rows by finish_reason",
    "tokens": "of done rows: prompt, of them cached, completion; total is prompt + completion",
    "wall_s": "seconds of all invocations, start to end",
    "device_s": "wall_s times the mean number of workers",
    "seconds": "wall_s by kind of work: load (checks, weights), read (reading, tokenizing), prefill, decode, mask (of "
    "structured outputs), sample, host (between the model's steps), write (journal, outputs, report), other; they sum "
    "to wall_s; of several workers, the times of their steps are means",
    "generate_s": "prefill + decode + mask + sample + host",
    "tokens_per_s": "each of tokens over wall_s",
    "latency_s": "p50, p90, p99 over done rows of each of their timings",
    "histograms": "done rows by length and latency: counts between logarithmic edges",
    "slowest": "the rows with the longest total_s",
    "preemptions": "sum over done rows",
    "recomputed_tokens": "computed again after a preemption",
    "prefix_cache": "prompt tokens looked up (queried), found (hit), and their share (hit_rate); null where not used",
    "drafts": "tokens computed ahead (drafted), those of them that were what the model chose (accepted), their share "
    "(accepted_rate), and steps_saved: the plain steps that would have given as many tokens; null where not used",
    "duplicates": "rows that got the answer of an identical one without being computed",
    "tail_s": "seconds at the end in which fewer than half of the largest number of sequences ran; null if unknown",
    "sessions": "how many invocations it took",
    "occupancy": "means over steps: sequences, tokens_per_step, kv_use; sequences_share and tokens_share are of the "
    "limits max_num_seqs and max_num_batched_tokens, of one worker; max_kv_use is the fullest step. null where not "
    "measured",
    "series": "columns over time, at most 2,000 points of one or more steps: at_s (start), span_s, steps, tokens, "
    "prefill_tokens; sequences and kv_use are means, over workers too",
    "engine": "what the engine counted, all invocations together; see EngineStats",
    "roofline": "flops and bytes the steps needed at least, the rates measured on this machine (flops_per_s, "
    "memory_bytes_per_s; source and measured_at say how and when), floor_s at those rates, and what was reached in "
    "generate_s, by as many machines as there were workers: flops_share, bytes_share, share (the larger); costs are "
    "those of one unit of what the engine counts. "
    "For comparison alone: peaks (FLOP/s of loops in registers, by type; product is what the linears multiply), "
    "read_bytes_per_s and copy_bytes_per_s. "
    "Rates and shares are null where nothing was measured, all is null where the engine does not count",
    "device_hours_per_million_output_tokens": "device_s over completion tokens, for unit cpu times threads",
    "max_rss_bytes": "most memory the process held, without its workers",
    "workers": "where rows ran on workers, each one's name, place, rows, tokens out, busy_share (of the time that it "
    "was there), worker_hours, losses, rows_given_again to others, tokens_taken_over by these; invocations add up",
    "bound_by": "what most of the time went into, in words",
    "advice": "what to change, in sentences",
    "machine": "platform, processor, python",
    "versions": "of batchgen and what it stands on",
    "structured": "with structured outputs: rows, those that ended before they were complete (incomplete), tokens that "
    "were not sampled since the grammar left no choice (forced_tokens), and their share of all generated ones",
    "accuracy": "with output.expected: rows compared (total), correct ones, and their share (exact_match)",
}
_OPTIONAL_KEYS = {"accuracy", "adapter", "device_s", "structured", "workers"}
_OCCUPANCY = (
    "sequences",
    "tokens_per_step",
    "kv_use",
    "max_kv_use",
    "max_num_seqs",
    "max_num_batched_tokens",
    "sequences_share",
    "tokens_share",
)


def build_report(rows: RowTotals, usage: Mapping[str, Any], job_facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json``; see ``KEYS``.

    ``usage`` is that of all invocations together (``sessions``, ``wall_s``, ``seconds`` by account, ``engine`` counts
    with their ``series``); ``job_facts`` are what ran and where (model, input, numerics, threads, sizes, roofline).
    """
    engine = dict(usage.get("engine", {}))
    series = thin(engine.pop("series", {}))
    workers = workers_section(engine)
    engine.pop("workers", None)
    wall_s, accounts = usage.get("wall_s", 0.0), usage.get("seconds", {})
    generate_s, devices_s = accounts.get("generate", 0.0), device_s(usage)
    num_devices = devices_s / wall_s if wall_s else 1.0
    queried, hit = engine.get("num_queried_tokens", 0), engine.get("num_cached_tokens", 0)
    tokens = {
        "prompt": rows.prompt_tokens,
        "cached": rows.cached_tokens or hit,
        "completion": rows.completion_tokens,
        "total": rows.prompt_tokens + rows.completion_tokens,
    }
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "sizes": None,
        **job_facts,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **rows.report_section(),
        "tokens": tokens,
        "wall_s": round(wall_s, 3),
        "device_s": round(devices_s, 3),
        "seconds": {name: round(seconds, 3) for name, seconds in split(accounts, engine).items()},
        "generate_s": round(generate_s, 3),
        "tokens_per_s": {name: round(tokens[name] / wall_s, 2) if wall_s else 0.0 for name in tokens},
        "prefix_cache": {"queried": queried, "hit": hit, "hit_rate": round(hit / queried, 4)} if queried else None,
        "drafts": _drafts(engine),
        "duplicates": engine.get("num_shared_requests", 0),
        "recomputed_tokens": engine.get("num_recomputed_tokens", 0),
        "tail_s": usage["tail_s"] if "tail_s" in usage else tail_s(series),
        "sessions": usage.get("sessions", 1),
        "occupancy": _occupancy(engine),
        "series": series,
        "engine": engine,
        "roofline": roofline_section(job_facts.get("roofline"), engine, generate_s * num_devices),
        "device_hours_per_million_output_tokens": _device_hours(job_facts, devices_s, rows.completion_tokens),
        "max_rss_bytes": usage.get("max_rss_bytes", 0),
        **_machine(),
    }
    if workers:
        report["workers"] = workers
    if rows.num_structured:
        forced, generated = (engine.get(f"num_{name}_tokens", 0) for name in ("forced", "output"))
        report["structured"] = {
            "rows": rows.num_structured,
            "incomplete": rows.num_incomplete,
            "forced_tokens": forced,
            "forced_share": round(forced / generated, 4) if generated else None,
        }
    return report | {"bound_by": bound_by(report), "advice": advice(report)}


def _occupancy(engine: Mapping[str, Any]) -> dict[str, Any]:
    steps = engine.get("num_steps", 0)
    if not steps or "sum_sequences" not in engine:
        return dict.fromkeys(_OCCUPANCY)
    max_num_seqs, max_tokens = engine["max_num_seqs"], engine["max_num_batched_tokens"]
    sequences = engine["sum_sequences"] / steps
    tokens = (engine["num_prefill_tokens"] + engine["num_decode_tokens"]) / steps
    return {
        "sequences": round(sequences, 2),
        "tokens_per_step": round(tokens, 2),
        "kv_use": round(engine["sum_kv_use"] / steps, 4),
        "max_kv_use": round(engine["max_kv_use"], 4),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_tokens,
        "sequences_share": round(sequences / (max_num_seqs or 1), 4),
        "tokens_share": round(tokens / (max_tokens or 1), 4),
    }


def _drafts(engine: Mapping[str, Any]) -> dict[str, Any] | None:
    drafted, accepted = (engine.get(f"num_{name}_tokens", 0) for name in ("drafted", "accepted"))
    if not drafted:
        return None
    saved = round(engine.get("sum_steps_saved", 0.0), 1)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "accepted_rate": round(accepted / drafted, 4),
        "steps_saved": saved,
    }


def _device_hours(job_facts: Mapping[str, Any], devices_s: float, completion_tokens: int) -> dict[str, Any]:
    is_gpu = job_facts.get("numerics", {}).get("device") == "cuda"
    devices = 1 if is_gpu else job_facts.get("threads")
    hours = round(devices * devices_s / 3600 * 1e6 / completion_tokens, 4) if devices and completion_tokens else None
    return {"unit": "gpu" if is_gpu else "cpu", "hours": hours}


def _machine() -> dict[str, Any]:
    versions = {"batchgen": __version__}
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
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a report: not valid JSON ({error})") from error
    found = report.get("version") if isinstance(report, dict) else None
    if found != REPORT_VERSION:
        was = f"is a report of version {found}" if isinstance(found, int) else "is not a report"
        raise UsageError(f"{path} {was}; this batchgen reads version {REPORT_VERSION}")
    if missing := sorted(KEYS.keys() - _OPTIONAL_KEYS - report.keys()):
        raise UsageError(f"{path} is not whole: it lacks {', '.join(missing[:3])}")
    return dict(report)
