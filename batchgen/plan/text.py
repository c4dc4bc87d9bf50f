"""Renders a plan as text for a person, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.core.errors import NOT_READ
from batchgen.core.units import counted, format_duration, labelled, shortened

_SHOWN_BAD_ROWS = 5
_BAR_WIDTH = 30
_LOGPROBS = ("mean_row", "max_row", "total", "running")
_SHOWN_CHARS = 300  # of a message
_ANSWERS = {True: "yes", False: "no"}

Plan = Mapping[str, Any]
Lines = Iterator[tuple[str, str]]  # label and text; an empty label continues the line before


def render_plan(plan: Plan) -> str:
    """The whole text; ``plan`` is what ``make_plan`` returned."""
    lines = [*_rows(plan), *(_tokens(plan) if plan["rows"]["good"] else ()), *_estimate(plan)]
    return "\n".join(labelled(lines))


def _rows(plan: Plan) -> Lines:
    rows, read = plan["rows"], plan["read"]
    yield "rows", f"{rows['total']:,}, {rows['good'] + rows.get('reused', 0):,} can run, {rows['bad']:,} bad"
    if "reused" in rows:
        yield "", f"{rows['reused']:,} kept, {rows['good']:,} to compute"
        yield from (("", shortened(line, _SHOWN_CHARS)) for line in plan["reuse"])
    for code, count in plan["errors"].items():
        listed = [row for row in plan["bad_rows"] if row["code"] == code]
        places = ", ".join(f"{row['line']}" for row in listed[:_SHOWN_BAD_ROWS])
        more = ", …" if count > _SHOWN_BAD_ROWS else ""
        yield "", f"{code} {count:,}: line {places}{more}"
        messages = sorted((row["message"] for row in listed), key=lambda text: NOT_READ not in text)
        yield "", shortened(messages[0], _SHOWN_CHARS) if messages else "(not listed)"
    if plan["errors"]:
        yield "", "all of them: --json, bad_rows"
    for name, count in plan["empty_fields"].items():
        yield "empty", f"{name} in {counted(count, 'row')}, whose prompts are made without it"
    yield from (("note", line) for line in plan["notes"])
    if plan["template"]:
        yield "template", ", ".join(f"{part} {_ANSWERS[is_shown]}" for part, is_shown in plan["template"].items())
    yield "read in", f"{format_duration(read['wall_s'])} ({read['rows_per_s']:,.0f} rows/s)"


def _tokens(plan: Plan) -> Lines:
    prompts, outputs, turns = plan["prompt_tokens"], plan["output_tokens"], plan["turns"]
    if turns:
        yield "turns", f"{turns['total']:,} to generate, {turns['max']:,} at most in a chat"
    spread = f"p50 {prompts['p50']:,}, p90 {prompts['p90']:,}, p99 {prompts['p99']:,}, max {prompts['max']:,} a row"
    yield "tokens in", f"{prompts['total']:,}; {spread}"
    most = max(bucket["rows"] for bucket in prompts["histogram"])
    for bucket in prompts["histogram"]:
        bar = "█" * max(1, round(_BAR_WIDTH * bucket["rows"] / most))
        yield "", f"{bucket['from']:>7,}+ {bar} {bucket['rows']:,}"
    if not outputs["at_most"]:
        yield "tokens out", "none"
    elif outputs["expected"] == outputs["at_most"]:
        yield "tokens out", f"{outputs['at_most']:,} ({outputs['basis']})"
    else:
        yield "tokens out", f"{outputs['expected']:,} expected ({outputs['basis']}), {outputs['at_most']:,} at most"
    if logprobs := plan["logprobs"]:
        mean, most, total, running = (_size(logprobs[f"{name}_bytes"]) for name in _LOGPROBS)
        yield "logprobs", f"{mean} a row, {most} the longest, {total} in all, at most and not compressed"
        advice = "" if logprobs["fits"] else ", too much for this machine: lower max_num_seqs"
        yield "", f"{running} in memory for the rows that run at once{advice}"
    yield from _kv(plan["kv"])


def _kv(kv: Mapping[str, Any]) -> Lines:
    row = f"{_size(kv['bytes_per_token'])} a token, {_size(kv['mean_row_bytes'])} a row of mean length ({kv['dtype']})"
    yield "KV memory", row
    if kv["memory_bytes"] is None:
        yield "", 'kv_cache_memory "auto" on a GPU: --calibrate measures the free memory'
        return
    fits = f"{_size(kv['memory_bytes'])} hold {kv['tokens_that_fit']:,} tokens, {kv['rows_that_fit']:,} such rows"
    yield "", f"{fits}; max_num_seqs {kv['max_num_seqs']:,}"
    if kv["is_auto"]:
        yield "", 'kv_cache_memory "auto", by what is free now; the run asks again'


def _size(num_bytes: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while num_bytes >= 1024 and unit != "GiB":
        num_bytes, unit = num_bytes / 1024, next(units)
    return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def _estimate(plan: Plan) -> Lines:
    estimate = plan["estimate"]
    if estimate is None:
        yield "estimate", f"none: {plan['no_estimate']}"
        return
    bound = " at most" if plan["output_tokens"]["basis"].startswith("max_tokens") else ""
    yield "estimate", f"about {format_duration(estimate['wall_s'])}{bound} ({estimate['basis']})"
    if workers := plan["workers"]:
        pays = f"beyond {workers['at_most']:,} some are idle: fewer than 4 full batches each"
        yield "workers", f"{workers['number'] or 1:,} computing at once; {pays}"
    if plan["rows"]["good"]:
        yield "tokens/s", f"{estimate['output_tokens_per_s']:,.0f} out, {estimate['total_tokens_per_s']:,.0f} total"
