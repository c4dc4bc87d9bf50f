"""``report.json``: what a run amounted to, from its finished rows and what each invocation spent.

Totals come from the rows themselves, so a run interrupted ten times reports the same tokens as an undisturbed one;
only times add up over invocations. ``KEYS`` says what every key means. It never sees the engine or the input.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
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
from batchgen.report.usage import split, tail_s, thin

REPORT_VERSION = 3
_PACKAGES = ("torch", "numpy", "numba", "tokenizers", "pyarrow")

KEYS = {
    "version": "of this format",
    "model": "model.path of the job",
    "input": "input.path of the job",
    "shard": 'which part of the rows, as "i/n"',
    "created_at": "when the first invocation began, ISO 8601",
    "finished_at": "when the report was written, ISO 8601",
    "numerics": "dtype, device and kernel set (instructions, library) the model ran in; kernels is absent if not known",
    "threads": "CPU threads; null if the last invocation loaded no model",
    "sizes": "what the engine worked with, chosen by the user or by auto: max_num_batched_tokens, max_num_seqs, "
    "block_size, num_blocks, kv_bytes, max_model_len, kernels and its policies; null where not known",
    "rows": "rows done, failed and in all (total)",
    "errors": "failed rows by code",
    "finish_reasons": "done rows by finish_reason",
    "tokens": "of done rows: prompt, of them cached, completion; total is prompt + completion",
    "wall_s": "seconds of all invocations, start to end",
    "seconds": "wall_s by kind of work: load (checks, weights), read (reading, tokenizing), prefill, decode, sample, "
    "host (between the model's steps), write (journal, outputs, report), other; they sum to wall_s",
    "generate_s": "prefill + decode + sample + host",
    "tokens_per_s": "each of tokens over wall_s",
    "latency_s": "p50, p90, p99 over done rows of each of their timings",
    "histograms": "done rows by length and latency: counts between logarithmic edges",
    "slowest": "the rows with the longest total_s",
    "preemptions": "sum over done rows",
    "recomputed_tokens": "computed again after a preemption",
    "prefix_cache": "prompt tokens looked up (queried), found (hit), and their share (hit_rate); null where not used",
    "duplicates": "rows that got the answer of an identical one without being computed",
    "tail_s": "seconds at the end in which fewer than half of the largest number of sequences ran; null if unknown",
    "sessions": "how many invocations it took",
    "occupancy": "means over steps: sequences, tokens_per_step, kv_use; sequences_share and tokens_share are of the "
    "limits max_num_seqs and max_num_batched_tokens; max_kv_use is the fullest step. null where not measured",
    "series": "columns over time, at most 2,000 points of one or more steps: at_s (start), span_s, steps, tokens, "
    "prefill_tokens; sequences and kv_use are means",
    "engine": "what the engine counted, all invocations together; see EngineStats",
    "roofline": "flops and bytes the steps needed at least, the rates measured on this machine (flops_per_s, "
    "memory_bytes_per_s; source and measured_at say how and when), floor_s at those rates, and what was reached in "
    "generate_s: flops_share, bytes_share, share (the larger); costs are those of one unit of what the engine counts. "
    "Rates and shares are null where nothing was measured, all is null where the engine does not count",
    "device_hours_per_million_output_tokens": "unit cpu: threads x wall_s; unit gpu: wall_s; over completion tokens",
    "max_rss_bytes": "most memory the process held",
    "bound_by": "what most of the time went into, in words",
    "advice": "what to change, in sentences",
    "machine": "platform, processor, python",
    "versions": "of batchgen and what it stands on",
    "accuracy": "with output.expected: rows compared (total), correct ones, and their share (exact_match)",
}
_OPTIONAL_KEYS = {"accuracy"}


def build_report(rows: RowTotals, spent: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json``; see ``KEYS``.

    ``spent`` holds what all invocations together spent (``sessions``, ``wall_s``, ``seconds`` by account, ``engine``
    counts with their ``series``); ``about`` says what ran where (model, input, numerics).
    """
    tokens = {
        "prompt": rows.prompt_tokens,
        "cached": rows.cached_tokens or spent.get("engine", {}).get("num_cached_tokens", 0),
        "completion": rows.completion_tokens,
        "total": rows.prompt_tokens + rows.completion_tokens,
    }
    wall_s = spent.get("wall_s", 0.0)
    engine = dict(spent.get("engine", {}))
    series = thin(engine.pop("series", {}))
    accounts = spent.get("seconds", {})
    generate_s = accounts.get("generate", 0.0)
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "sizes": None,
        **about,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **_rows(rows),
        "tokens": tokens,
        "wall_s": round(wall_s, 3),
        "seconds": {name: round(seconds, 3) for name, seconds in split(accounts, engine).items()},
        "generate_s": round(generate_s, 3),
        "tokens_per_s": {name: round(tokens[name] / wall_s, 2) if wall_s else 0.0 for name in tokens},
        **_saved_and_lost(engine),
        "tail_s": spent["tail_s"] if "tail_s" in spent else tail_s(series),
        "sessions": spent.get("sessions", 1),
        "occupancy": _occupancy(engine),
        "series": series,
        "engine": engine,
        "roofline": roofline_section(about.get("roofline"), engine, generate_s),
        "device_hours_per_million_output_tokens": _device_hours(about, wall_s, rows.completion_tokens),
        "max_rss_bytes": spent.get("max_rss_bytes", 0),
        **_machine(),
    }
    return report | {"bound_by": bound_by(report), "advice": advice(report)}


def _rows(rows: RowTotals) -> dict[str, Any]:
    """What the rows alone tell."""
    failed = rows.errors.total()
    found: dict[str, Any] = {
        "rows": {"total": rows.num_results + failed, "done": rows.num_results, "failed": failed},
        "errors": dict(sorted(rows.errors.items())),
        "finish_reasons": dict(sorted(rows.finish_reasons.items())),
        "latency_s": {name: distribution.percentiles() for name, distribution in rows.latencies.items()},
        "histograms": rows.histograms(),
        "slowest": rows.slowest,
        "preemptions": rows.preemptions,
    }
    if rows.expected is not None:
        share = round(rows.correct / rows.compared, 6) if rows.compared else None
        found["accuracy"] = {"correct": rows.correct, "total": rows.compared, "exact_match": share}
    return found


def _machine() -> dict[str, Any]:
    return {
        "machine": {
            "platform": platform.platform(),
            "processor": processor_name(),
            "python": platform.python_version(),
        },
        "versions": {"batchgen": __version__} | {name: found for name in _PACKAGES if (found := _version(name))},
    }


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
        raise UsageError(f"{path} is no report: not valid JSON ({error})") from error
    found = report.get("version") if isinstance(report, dict) else None
    if found != REPORT_VERSION:
        was = f"is a report of version {found}" if isinstance(found, int) else "is no report"
        raise UsageError(f"{path} {was}; this batchgen reads version {REPORT_VERSION}")
    if missing := sorted(KEYS.keys() - _OPTIONAL_KEYS - report.keys()):
        raise UsageError(f"{path} is not whole: it lacks {', '.join(missing[:3])}")
    return dict(report)


def _occupancy(engine: Mapping[str, Any]) -> dict[str, Any]:
    steps = engine.get("num_steps", 0)
    if not steps or "sum_sequences" not in engine:
        return dict.fromkeys((*_OCCUPANCY, "sequences_share", "tokens_share"))
    sequences = engine["sum_sequences"] / steps
    tokens = (engine["num_prefill_tokens"] + engine["num_decode_tokens"]) / steps
    known = {
        "sequences": round(sequences, 2),
        "tokens_per_step": round(tokens, 2),
        "kv_use": round(engine["sum_kv_use"] / steps, 4),
        "max_kv_use": round(engine["max_kv_use"], 4),
        "max_num_seqs": engine["max_num_seqs"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
    }
    shares = {"sequences_share": sequences / (known["max_num_seqs"] or 1)}
    shares["tokens_share"] = tokens / (known["max_num_batched_tokens"] or 1)
    return known | {name: round(share, 4) for name, share in shares.items()}


_OCCUPANCY = ("sequences", "tokens_per_step", "kv_use", "max_kv_use", "max_num_seqs", "max_num_batched_tokens")


def _saved_and_lost(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Work the engine was spared, and work it had to do twice."""
    queried, hit = engine.get("num_queried_tokens", 0), engine.get("num_cached_tokens", 0)
    cache = {"queried": queried, "hit": hit, "hit_rate": round(hit / queried, 4)} if queried else None
    return {
        "prefix_cache": cache,
        "duplicates": engine.get("num_shared_requests", 0),
        "recomputed_tokens": engine.get("num_recomputed_tokens", 0),
    }


def _device_hours(about: Mapping[str, Any], wall_s: float, completion_tokens: int) -> dict[str, Any]:
    is_gpu = about.get("numerics", {}).get("device") == "cuda"
    devices = 1 if is_gpu else about.get("threads")
    hours = round(devices * wall_s / 3600 * 1e6 / completion_tokens, 4) if devices and completion_tokens else None
    return {"unit": "gpu" if is_gpu else "cpu", "hours": hours}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
