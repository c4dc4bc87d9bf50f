"""Renders a plan as text for a person, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from batchgen.core.units import format_duration, printable, shortened

_SHOWN_BAD_ROWS = 5
_SHOWN_LONGEST = 3
_BAR_WIDTH = 30
_WIDTH = 80

Plan = Mapping[str, Any]


def render_plan(plan: Plan) -> str:
    """The whole text; ``plan`` is what ``make_plan`` returned."""
    rows, prompts, outputs = plan["rows"], plan["prompt_tokens"], plan["output_tokens"]
    read = plan["read"]
    lines = [
        _line("rows", f"{rows['total']:,}, {rows['good']:,} can run, {rows['bad']:,} bad"),
        *_bad_rows(plan),
        _line("read in", f"{format_duration(read['wall_s'])} ({read['rows_per_s']:,.0f} rows/s)"),
    ]
    if not rows["good"]:
        return "\n".join(map(printable, [*lines, *_estimate(plan)]))
    spread = f"p50 {prompts['p50']:,}, p90 {prompts['p90']:,}, p99 {prompts['p99']:,}, max {prompts['max']:,} a row"
    lines += [
        _line("tokens in", f"{prompts['total']:,}; {spread}"),
        *_histogram(prompts["histogram"]),
        _line("longest", ", ".join(f"{row['id']} ({row['tokens']:,})" for row in plan["longest"][:_SHOWN_LONGEST])),
        _line("tokens out", _outputs(outputs)),
        *_repeats(plan),
        *_kv(plan["kv"]),
        *_estimate(plan),
    ]
    return "\n".join(shortened(printable(line), _WIDTH) for line in lines)


def _line(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _bad_rows(plan: Plan) -> list[str]:
    lines = []
    for code, count in plan["errors"].items():
        listed = [row for row in plan["bad_rows"] if row["code"] == code]
        places = ", ".join(f"{row['line']}" for row in listed[:_SHOWN_BAD_ROWS])
        more = ", …" if count > _SHOWN_BAD_ROWS else ""
        lines.append(_line("", f"{code} {count:,}: line {places}{more}"))
        lines.append(_line("", f"  {listed[0]['message']}" if listed else "  (not listed)"))
    if plan["errors"]:
        lines.append(_line("", "all of them: --json, bad_rows"))
    return lines


def _histogram(bins: list[Mapping[str, int]]) -> list[str]:
    most = max(found["rows"] for found in bins)
    return [
        _line("", f"{found['from']:>7,}+ {'█' * max(1, round(_BAR_WIDTH * found['rows'] / most))} {found['rows']:,}")
        for found in bins
    ]


def _outputs(outputs: Mapping[str, Any]) -> str:
    if outputs["expected"] == outputs["at_most"]:
        return f"{outputs['at_most']:,} ({outputs['basis']})"
    return f"{outputs['expected']:,} expected ({outputs['basis']}), {outputs['at_most']:,} at most"


def _repeats(plan: Plan) -> list[str]:
    repeats, total = plan["repeats"], plan["prompt_tokens"]["total"]
    if not repeats["shared_prefix_tokens"] and not repeats["duplicate_prompts"]:
        return [_line("repeated", "no prompt comes twice, no two share a whole block of tokens")]
    least = "" if repeats["is_exact"] else "at least "
    share = repeats["shared_prefix_tokens"] / total
    prefix = f"{least}{repeats['shared_prefix_tokens']:,} tokens in shared prefixes ({share:.0%} of the input)"
    alike = f"{least}{repeats['duplicate_prompts']:,} prompts ({repeats['duplicate_prompt_tokens']:,} tokens) twice"
    lines = [_line("repeated", prefix), _line("", alike)]
    lines.append(_line("", "computed once while memory lasts; whole rows only where greedy and alike"))
    if repeats["common_prefix_tokens"]:
        lines.append(_line("", f"all prompts begin with the same {repeats['common_prefix_tokens']:,} tokens"))
    return lines


def _kv(kv: Mapping[str, Any]) -> list[str]:
    row = f"{_size(kv['bytes_per_token'])} a token, {_size(kv['mean_row_bytes'])} a row of mean length ({kv['dtype']})"
    if kv["memory_bytes"] is None:
        return [_line("KV memory", row), _line("", 'kv_memory "auto" on a GPU: --calibrate asks it what is free')]
    fits = f"{_size(kv['memory_bytes'])} hold {kv['tokens_that_fit']:,} tokens, {kv['rows_that_fit']:,} such rows"
    lines = [_line("KV memory", row), _line("", f"{fits}; max_num_seqs {kv['max_num_seqs']:,}")]
    if kv["is_auto"]:
        lines.append(_line("", 'kv_memory "auto", by what is free now; the run asks again'))
    return lines


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def _estimate(plan: Plan) -> list[str]:
    estimate = plan["estimate"]
    if estimate is None:
        first, *rest = textwrap.wrap(f"none: {plan['no_estimate']}", _WIDTH - 13)
        return [_line("estimate", first), *(_line("", text) for text in rest)]
    rates = f"{estimate['output_tokens_per_s']:,.0f} out, {estimate['total_tokens_per_s']:,.0f} total"
    bound = " at most" if plan["output_tokens"]["basis"].startswith("max_tokens") else ""
    return [
        _line("estimate", f"about {format_duration(estimate['wall_s'])}{bound} ({estimate['basis']})"),
        _line("tokens/s", rates),
    ]
