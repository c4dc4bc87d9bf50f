"""What a run amounted to: ``report.json`` and its text, from the finished rows and the seconds each invocation spent.

Totals come from the rows themselves, so a run interrupted ten times reports the same tokens as an undisturbed one;
only times add up over invocations. It reads records and plain numbers, never the engine or the input.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from batchgen import __version__
from batchgen.data.files import write_atomic
from batchgen.data.json_line import encode_json
from batchgen.data.rundir import RunDir
from batchgen.errors import UsageError
from batchgen.units import format_duration

REPORT_VERSION = 1
_LATENCIES = ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s")
_PACKAGES = ("torch", "numpy", "numba", "tokenizers", "pyarrow")
_BUCKETS_PER_E = 100  # buckets of durations one percent wide


class Distribution:
    """Durations in seconds, kept as counts in buckets one percent wide: bounded memory, percentiles within 1 %."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()

    def add(self, seconds: float) -> None:
        """Count one duration; zero and less are kept apart."""
        self._counts[round(math.log(seconds) * _BUCKETS_PER_E) if seconds > 0 else None] += 1

    def percentile(self, share: float) -> float | None:
        """The duration that ``share`` of all (of one) do not exceed; None while there are none."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts, key=lambda b: -math.inf if b is None else b):
            rank -= self._counts[bucket]
            if rank <= 0:
                return 0.0 if bucket is None else round(math.exp(bucket / _BUCKETS_PER_E), 6)
        return None


@dataclass
class RowTotals:
    """What the rows add up to. ``expected`` names the column whose text an output is compared with, if any."""

    expected: str | None = None
    num_results: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    correct: int = 0
    compared: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Distribution] = field(default_factory=lambda: {name: Distribution() for name in _LATENCIES})

    def add_result(self, record: Mapping[str, Any]) -> None:
        """Take in an output record as journalled, or a row of OpenAI batch outputs, which has no timings."""
        if "response" in record:
            body = record["response"]["body"]
            record = {**body["choices"][0], "usage": body["usage"]}
        usage, timings = record["usage"], record.get("timings", {})
        self.num_results += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cached_tokens += timings.get("cached_tokens", 0)
        self.preemptions += timings.get("preemptions", 0)
        self.finish_reasons[record["finish_reason"]] += 1
        for name in self.latencies.keys() & timings.keys():
            self.latencies[name].add(timings[name])
        if self.expected is not None and record.get(self.expected) is not None:
            self.compared += 1
            self.correct += record.get("text", "").strip() == str(record[self.expected]).strip()

    def add_error(self, dead_letter: Mapping[str, Any]) -> None:
        """Take in a line of ``errors.jsonl``; an OpenAI error file nests the code."""
        self.errors[(dead_letter.get("error") or dead_letter)["code"]] += 1


def add_up(totals: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of two invocations as one: ``max_*`` keys take the larger, others the sum, nested alike."""
    result = dict(totals)
    for key, value in more.items():
        known = result.get(key)
        if isinstance(value, Mapping):
            result[key] = add_up(known if isinstance(known, Mapping) else {}, value)
        elif isinstance(value, int | float) and isinstance(known, int | float):
            result[key] = max(known, value) if key.startswith("max_") else known + value
        else:
            result[key] = value
    return result


def spent_in(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the invocations behind a report spent, to be added to."""
    return {key: report[key] for key in ("sessions", "wall_s", "seconds", "engine")}


def build_report(rows: RowTotals, spent: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json``.

    ``spent`` holds what all invocations together spent (``sessions``, ``wall_s``, ``seconds`` by kind of work,
    ``engine`` counts); ``about`` says what ran where (model, input, numerics).
    """
    failed = rows.errors.total()
    tokens = {
        "prompt": rows.prompt_tokens,
        "cached": rows.cached_tokens,
        "completion": rows.completion_tokens,
        "total": rows.prompt_tokens + rows.completion_tokens,
    }
    wall_s = spent.get("wall_s", 0.0)
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        **about,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": {"total": rows.num_results + failed, "done": rows.num_results, "failed": failed},
        "errors": dict(sorted(rows.errors.items())),
        "finish_reasons": dict(sorted(rows.finish_reasons.items())),
        "tokens": tokens,
        "wall_s": round(wall_s, 3),
        "seconds": {name: round(seconds, 3) for name, seconds in spent.get("seconds", {}).items()},
        "tokens_per_s": {name: round(tokens[name] / wall_s, 2) if wall_s else 0.0 for name in tokens},
        "generate_s": round(spent.get("seconds", {}).get("generate", 0.0), 3),
        "latency_s": {name: _percentiles(distribution) for name, distribution in rows.latencies.items()},
        "preemptions": rows.preemptions,
        "sessions": spent.get("sessions", 1),
        "engine": spent.get("engine", {}),
        "machine": {"platform": platform.platform(), "processor": processor_name(), "python": platform.python_version()},
        "versions": {"batchgen": __version__} | {name: found for name in _PACKAGES if (found := _version(name))},
    }
    if rows.expected is not None:
        share = round(rows.correct / rows.compared, 6) if rows.compared else None
        report["accuracy"] = {"correct": rows.correct, "total": rows.compared, "exact_match": share}
    return report


def write_report(run_dir: RunDir, report: Mapping[str, Any]) -> None:
    """Replace ``report.json``, atomically. Raises StorageError."""
    write_atomic(run_dir.report, json.dumps(json.loads(encode_json(report)), indent=2).encode() + b"\n")


def read_report(run_dir: RunDir) -> dict[str, Any]:
    """The report of a finished run. Raises UsageError where there is none."""
    try:
        report = json.loads(run_dir.report.read_bytes())
    except FileNotFoundError:
        hint = "the run is not finished: see batchgen status" if run_dir.manifest.exists() else "not a run directory"
        raise UsageError(f"no report.json in {run_dir.path} ({hint})") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {run_dir.report}: {error}") from error
    if not isinstance(report, dict) or report.get("version") != REPORT_VERSION:
        raise UsageError(f"{run_dir.report} is not a report of version {REPORT_VERSION}")
    return report


def render_report(report: Mapping[str, Any]) -> str:
    """The report as text for a person, 80 columns wide at most."""
    rows, tokens, rates = report["rows"], report["tokens"], report["tokens_per_s"]
    sessions = report["sessions"]
    lines = [
        ("rows", f"{rows['done']:,} done, {rows['failed']:,} failed, {rows['total']:,} in all"),
        ("errors", ", ".join(f"{code} {count:,}" for code, count in report["errors"].items())),
        ("finished by", ", ".join(f"{reason} {count:,}" for reason, count in report["finish_reasons"].items())),
        ("exact match", _render_accuracy(report.get("accuracy"))),
        ("tokens", f"{tokens['prompt']:,} in ({tokens['cached']:,} cached), {tokens['completion']:,} out"),
        ("tokens/s", f"{rates['prompt']:,.0f} in, {rates['completion']:,.0f} out, {rates['total']:,.0f} total"),
        ("wall time", format_duration(report["wall_s"]) + (f" over {sessions} invocations" if sessions > 1 else "")),
        ("spent on", _wrapped(f"{name} {format_duration(s)}" for name, s in report["seconds"].items() if s >= 0.05)),
    ]
    lines = [(name, text) for name, text in lines if text]
    table = ["", f"{'seconds':<12} {'p50':>9} {'p90':>9} {'p99':>9}"]
    for name, found in report["latency_s"].items():
        if found["p50"] is not None:
            table.append(
                f"{name.removesuffix('_s'):<12} " + " ".join(f"{found[p]:>9.3f}" for p in ("p50", "p90", "p99"))
            )
    return "\n".join([*(f"{name:<12} {text}" for name, text in lines), *(table if len(table) > 2 else [])])


def _render_accuracy(accuracy: Mapping[str, Any] | None) -> str:
    if accuracy is None:
        return ""
    if not accuracy["total"]:
        return "no row has the expected column"
    return f"{accuracy['exact_match']:.2%} ({accuracy['correct']:,} of {accuracy['total']:,})"


def _wrapped(parts: Iterable[str]) -> str:
    """Parts joined by commas, in lines that fit behind the label."""
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > 64:
            lines.append("")
        lines[-1] += f"{part}, "
    return f"\n{'':<13}".join(line.rstrip() for line in lines).rstrip(",")


def _percentiles(distribution: Distribution) -> dict[str, float | None]:
    return {f"p{share:.0f}": distribution.percentile(share / 100) for share in (50, 90, 99)}


def processor_name() -> str:
    """What this machine's processor calls itself; empty where it does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a device of the kernel, read by line
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
