"""The facts of a report as labelled texts and tables: labels, units and omissions are decided here, once.

A group of facts is a sequence of (label, text); texts with the same label become one. ``text`` and ``html`` lay them
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batchgen.core.units import counted, format_duration, shortened

Report = Mapping[str, Any]
Facts = Iterator[tuple[str, str]]

_ACCOUNTS = {"read": "reading", "load": "loading", "mask": "masks", "sample": "sampling", "host": "between steps"}
_ACCOUNTS |= {"write": "writing"}
_NUM_CODES = 10  # error codes named in a line
_NUM_WORKERS = 100  # named in a table
_ID_WIDTH = 40


class Table(NamedTuple):
    """A table of texts; one without a head lists facts."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class _Cost(NamedTuple):
    unit: str
    hours: str


def at(report: Report, path: str) -> Any:
    """The value at a path of keys such as ``tokens.total``; None where a key on the way is missing or null."""
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def joined(facts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Text by label, in order."""
    found: dict[str, str] = {}
    for label, text in facts:
        found[label] = f"{found[label]}, {text}" if label in found else text
    return found


def figures(report: Report) -> Facts:
    """The headline numbers, each by itself."""
    rows, tokens, rates = report["rows"], report["tokens"], report["tokens_per_s"]
    accuracy = report.get("accuracy")
    yield "wall time", format_duration(report["wall_s"])
    yield "tokens/s out", f"{rates['completion']:,.0f}"
    yield "tokens/s in and out", f"{rates['total']:,.0f}"
    yield "rows done", f"{rows['done']:,}"
    yield "rows failed", f"{rows['failed']:,}"
    yield "tokens in", f"{tokens['prompt']:,}"
    yield "tokens out", f"{tokens['completion']:,}"
    if accuracy and accuracy["total"]:
        yield "exact match", f"{accuracy['exact_match']:.1%}"
    if structured := report.get("structured"):
        yield "structured rows", f"{structured['rows']:,}"
        yield "not complete", f"{structured['incomplete']:,}"
        yield "tokens forced", f"{structured['forced_share'] or 0:.0%}"
    if cost := _device_hours(report):
        yield f"{cost.unit} / M tokens out", cost.hours


def outcome(report: Report) -> Facts:
    """How long a run took, how fast it was, what failed, and what it was bound by."""
    figure = dict(figures(report))
    over = f" over {report['sessions']} invocations" if report["sessions"] > 1 else ""
    yield "took", f"{figure['wall time']}{over}: {figure['rows done']} done, {figure['rows failed']} failed"
    yield "speed", f"{figure['tokens/s out']} tokens/s out, {figure['tokens/s in and out']} in and out"
    codes = ", ".join(f"{code} {count}" for code, count, _ in failures(report).rows[:_NUM_CODES])
    yield "failed", f"{figure['rows failed']} rows: {codes}" if codes else "no row"
    if accuracy := report.get("accuracy"):
        share = "no row has the expected column"
        if accuracy["total"]:
            share = f"{accuracy['exact_match']:.2%} ({accuracy['correct']:,} of {accuracy['total']:,})"
        yield "exact match", share
    if "structured" in report:
        lacking = f"{figure['not complete']} not complete" if report["structured"]["incomplete"] else "all complete"
        yield "structured", f"{figure['structured rows']} rows, {lacking}, {figure['tokens forced']} of tokens forced"
    if report.get("workers"):
        yield from _workers(report["workers"])
    yield "bound by", report["bound_by"]


def _workers(found: Sequence[Mapping[str, Any]]) -> Facts:
    hours, losses = (sum(worker[name] for worker in found) for name in ("worker_hours", "losses"))
    busy = sum(worker["busy_share"] * worker["worker_hours"] for worker in found) / (hours or 1.0)
    places = counted(len({worker["place"] for worker in found}), "machine")
    yield "workers", f"{len(found):,} on {places}, {busy:.0%} busy, {hours:,.2f} worker-hours"
    given, taken = (sum(worker[name] for worker in found) for name in ("rows_given_again", "tokens_taken_over"))
    if losses:
        yield "workers", f"{losses:,} lost"
    if given:
        yield "workers", f"{counted(given, 'row')} given to others with {taken:,} tokens"


def workers(report: Report) -> Table:
    """What each worker did, those that did most first."""
    head = ("worker", "place", "rows", "tokens out", "busy", "hours", "losses", "rows given again", "tokens taken over")
    found = sorted(report.get("workers", ()), key=lambda worker: -worker["tokens"])
    rows = [
        (
            *(shortened(worker[name], _ID_WIDTH) for name in ("name", "place")),
            *(f"{worker[name]:,}" for name in ("rows", "tokens")),
            f"{worker['busy_share']:.0%}",
            f"{worker['worker_hours']:,.3f}",
            *(f"{worker[name]:,}" for name in ("losses", "rows_given_again", "tokens_taken_over")),
        )
        for worker in found[:_NUM_WORKERS]
    ]
    title = "Workers" if len(rows) == len(found) else f"Workers: {len(rows)} of {len(found):,}"
    return Table(title, head, rows)


def work(report: Report) -> Facts:
    """What a run computed, what it was spared, and how its time and its batches were used."""
    tokens, cache, occupancy = report["tokens"], report["prefix_cache"], report["occupancy"]
    wall_s = report["wall_s"] or 1.0
    yield "tokens", f"{tokens['prompt']:,} in ({tokens['cached']:,} cached), {tokens['completion']:,} out"
    if cache and cache["hit"]:
        share = f"{cache['hit_rate']:.0%} of those looked up"
        yield "spared", f"{cache['hit']:,} prompt tokens by the prefix cache ({share})"
    drafts = report.get("drafts")  # not in older ones
    if drafts and drafts["steps_saved"] >= 1:
        right = f"{drafts['accepted']:,} of {drafts['drafted']:,} right"
        yield "spared", f"{counted(round(drafts['steps_saved']), 'step')} by drafts ({right})"
    if report["duplicates"]:
        yield "spared", f"{counted(report['duplicates'], 'row')} like another one"
    for reason, count in report["finish_reasons"].items():
        yield "finished by", f"{reason} {count:,}"
    for account, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        if seconds >= 0.005 * wall_s:
            yield "time went to", f"{_ACCOUNTS.get(account, account)} {seconds / wall_s:.0%}"
    if occupancy["sequences"] is not None:
        yield "batch", f"{occupancy['sequences']:,.1f} of {occupancy['max_num_seqs']:,} sequences"
        yield "batch", f"{occupancy['tokens_per_step']:,.1f} of {occupancy['max_num_batched_tokens']:,} tokens a step"
        yield "batch", f"KV {occupancy['kv_use']:.0%} used, {occupancy['max_kv_use']:.0%} at most"
    if report["preemptions"]:
        yield "batch", f"{report['preemptions']:,} preemptions ({report['recomputed_tokens']:,} tokens recomputed)"


def resources(report: Report) -> Facts:
    """What a run got out of its machine, what it cost, and what it ran on."""
    sizes = report["sizes"]
    for label, text in _tail_and_roofline(report):
        yield label, f"{text} ({report['tail_s'] / (report['wall_s'] or 1.0):.0%})" if label == "tail" else text
    if report["max_rss_bytes"]:
        yield "memory", f"{report['max_rss_bytes'] / 2**20:,.0f} MiB at most"
    if sizes:
        yield "memory", f"KV {_kv_memory(sizes)}"
    if cost := _device_hours(report):
        yield "cost", f"{cost.hours} {cost.unit} per million output tokens"
    yield "ran on", report["machine"]["processor"] or report["machine"]["platform"]
    if report["threads"]:
        yield "ran on", counted(report["threads"], "thread")
    if report["numerics"]:
        yield "ran on", numerics_text(report["numerics"])
    if "adapter" in report:
        yield "adapter", report["adapter"]
    if sizes:
        yield "ran on", f"{sizes['kernels']} kernels"


def run_and_machine(report: Report) -> Facts:
    """Where a run took place and how it used the machine."""
    occupancy, machine = report["occupancy"], report["machine"]
    yield "processor", machine["processor"] or "not known"
    yield "platform", f"{machine['platform']}, Python {machine['python']}"
    yield "threads", str(report["threads"] or "not known")
    yield "numerics", numerics_text(report["numerics"]) or "not known"
    if "adapter" in report:
        yield "adapter", report["adapter"]
    yield "versions", ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    yield "invocations", str(report["sessions"])
    yield "most memory", f"{report['max_rss_bytes'] / 2**20:,.0f} MiB"
    if occupancy["sequences"] is not None:
        mean = f"{occupancy['sequences']:,.1f} sequences, {occupancy['tokens_per_step']:,.1f} tokens"
        limits = f"limits {occupancy['max_num_seqs']:,} and {occupancy['max_num_batched_tokens']:,}"
        yield "mean step", f"{mean} ({limits})"
    if report["sizes"]:
        yield "KV memory", _kv_memory(report["sizes"])
    yield from _tail_and_roofline(report)


def failures(report: Report) -> Table:
    """Failed rows by code, most frequent first."""
    errors = sorted(report["errors"].items(), key=lambda item: -item[1])
    rows = [(code, f"{count:,}", f"{count / report['rows']['total']:.2%}") for code, count in errors]
    return Table("Failed rows", ("code", "rows", "share"), rows)


def latencies(report: Report) -> Table:
    """Percentiles of the timings of done rows."""
    rows = [
        (name.removesuffix("_s"), *(f"{value:,.3f}" for value in found.values()))
        for name, found in report["latency_s"].items()
        if None not in found.values()
    ]
    return Table("Latency of a row, seconds", ("", "p50", "p90", "p99"), rows)


def slowest(report: Report) -> Table:
    """The rows that took longest."""
    head = ("id", "in", "out", "queue s", "prefill s", "decode s", "total s", "preempted")
    keys = ("prompt_tokens", "completion_tokens", "queue_s", "prefill_s", "decode_s", "total_s", "preemptions")
    rows = [(shortened(str(row["id"]), _ID_WIDTH), *(_number(row[key]) for key in keys)) for row in report["slowest"]]
    return Table("Slowest rows", head, rows)


def _tail_and_roofline(report: Report) -> Facts:
    roofline = report["roofline"]
    if report["tail_s"]:
        yield "tail", f"{format_duration(report['tail_s'])} at the end with less than half of the sequences"
    if roofline and roofline["share"] is None:
        yield "roofline", "not known; batchgen bench measures it"
    elif roofline:
        source = f"{roofline['source']}, {roofline['measured_at'][:10]}"
        yield "roofline", f"{roofline['flops_share']:.0%} of {roofline['flops_per_s'] / 1e9:,.0f} GFLOP/s"
        moved = f"{roofline['bytes_share']:.0%} of {roofline['memory_bytes_per_s'] / 1e9:,.0f} GB/s"
        yield "roofline", f"{moved} while generating ({source})"
        if peak := roofline.get("peaks", {}).get(roofline.get("product")):
            yield "peak", f"{peak / 1e9:,.0f} GFLOP/s ({roofline['product']}) in registers"
            yield "peak", f"of which linears sustain {roofline['flops_per_s'] / peak:.0%}"
            read, copied = (roofline[f"{name}_bytes_per_s"] / 1e9 for name in ("read", "copy"))
            yield "peak", f"memory reads {read:,.0f} GB/s, copies {copied:,.0f} GB/s"


def _device_hours(report: Report) -> _Cost | None:
    found = report["device_hours_per_million_output_tokens"]
    return None if found["hours"] is None else _Cost(f"{found['unit'].upper()}-hours", f"{found['hours']:,.2f}")


def _kv_memory(sizes: Mapping[str, Any]) -> str:
    text = f"{sizes['kv_bytes'] / 2**20:,.0f} MiB in blocks of {sizes['block_size']} tokens"
    if most := sizes.get("max_device_bytes"):
        text += f"; {most / 2**20:,.0f} MiB of the GPU at most"
    return text


def numerics_text(numerics: Mapping[str, str]) -> str:
    """Dtype and device, what is kept in others, the kernels, and what guides texts, as far as they are known."""
    place = " on ".join(numerics[key] for key in ("dtype", "device") if key in numerics)
    named = ", ".join(filter(None, (place, integers_text(numerics))))
    named += f" ({numerics['kernels']})" if "kernels" in numerics else ""
    return f"{named}, llguidance {numerics['llguidance']}" if "llguidance" in numerics else named


def integers_text(numerics: Mapping[str, Any]) -> str:
    """What is kept in another type than it is computed in, and what is multiplied as integers; empty if nothing is."""
    words = {"weights": "weights", "activations": "activations", "kv_dtype": "keys and values"}
    return ", ".join(f"{numerics[key]} {name}" for key, name in words.items() if numerics.get(key, "auto") != "auto")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
