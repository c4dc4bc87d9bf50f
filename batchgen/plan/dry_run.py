"""Dry run of a job: surveys its input, by the code of a run, and reports what a run would take, for ``batchgen plan``.

It writes nothing, and imports torch only to calibrate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import NOT_READ, GateFailed, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.logprobs import JSON_BYTES, PACKED_BYTES
from batchgen.core.machine import available_bytes, processor_name
from batchgen.core.units import WHOLE, Shard, counted, format_duration, labelled, shortened
from batchgen.core.version import RESULTS
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.plan.estimate import (
    Estimate,
    ExpectedLengths,
    Forecast,
    Survey,
    comparable,
    forecast_from_report,
    kv_plan,
    workers_plan,
)
from batchgen.report.rows import PERCENTS, percentile
from batchgen.run.earlier_results import EarlierResults, earlier_runs, rendered_at
from batchgen.run.loader import ModelInfo
from batchgen.run.opened import OpenJob, open_job
from batchgen.run.reports import read_report
from batchgen.run.update import FolderJobs
from batchgen.run.vectors import cut_note

PLAN_VERSION = 1
_NO_RATE = "the output folder has no finished run that {made} with this model on this machine: "
_NO_RATE += "--calibrate runs a sample of rows"
_NO_WORKERS = "the plan does not ask the Ray cluster how many workers fit: give --workers"
_SHOWN_BAD_ROWS = 5
_BAR_WIDTH = 30
_LOGPROBS = ("mean_row", "max_row", "total", "running")
_SHOWN_CHARS = 300  # of a message
_ANSWERS = {True: "yes", False: "no"}
Plan = Mapping[str, Any]
Lines = Iterator[tuple[str, str]]  # label and text; an empty label continues the line before


def make_plan(
    spec: JobSpec,
    *,
    calibrates: bool = False,
    output_tokens: int | None = None,
    shard: Shard = WHOLE,
    overwrites: bool = False,
) -> dict[str, Any]:
    """Survey the job's input and estimate a run; the plan as plain data for ``--json`` and ``render_plan``.

    ``output_tokens`` is the mean length of answers to expect. Rows with results count as kept, unless the job
    ``overwrites`` them. Raises UsageError as ``run`` does, ModelError for unusable weights when calibrating.
    """
    run_dir = RunDir(Path(spec.output.path))
    jobs = FolderJobs(run_dir, overwrites=overwrites or not spec.output.path)
    base = jobs.base
    at = base.rendered_at if base else rendered_at(spec)
    with open_job(spec, run_dir, at) as job:
        notes = [line for line in (job.model.recommended_hint(spec), *job.check_columns()) if line]
        spec, model = job.spec, job.model
        now = _manifest(job, base, shard, at)
        results = EarlierResults(job, now, run_dir if base else None)
        with job.validator(shard) as validator, closing(results):
            survey = Survey(validator, model.max_model_len, lambda row: results.find(row)[0] is not None)
            survey.take(job.rows(shard).read())
    lengths = ExpectedLengths.around("as given", output_tokens) if output_tokens else None
    plan = _content(spec, model, survey, _forecast(spec, model, survey, lengths, calibrates=calibrates))
    cut_at = job.builder.cut_at
    plan["notes"] = [*notes, *cut_note(survey.prompt_lengths[cut_at or 0], cut_at)]
    if spec.output.reuse or base:
        plan["rows"] |= {"reused": survey.num_reused, "total": plan["rows"]["total"] + survey.num_reused}
        plan |= {"reuse": results.lines, "needs_update": bool(jobs.changes(now) or jobs.edited(job.digests))}
    return plan


def _manifest(job: OpenJob, base: Manifest | None, shard: Shard, at: datetime | None) -> Manifest:
    """The job's manifest without numerics, which only a run can find."""
    spec = job.spec
    runs = [run for _, run in earlier_runs(spec)] + ([base] if base else [])
    job.digests = Digests(runs[-1].file_states if runs else None)
    fingerprints = {"model": job.model.files.fingerprint(job.digests) if runs else {}, "code": {"results": RESULTS}}
    return Manifest(spec.to_dict(), spec.output_keys(), fingerprints, shard, rendered_at=at)


def check_time(plan: dict[str, Any], limit_s: float) -> None:
    """Raises GateFailed if the plan's estimate is over ``limit_s`` seconds, UsageError if the plan lacks one."""
    estimate = plan["estimate"]
    if estimate is None:
        raise UsageError(f"--fail-if-over needs an estimate: {plan['no_estimate']}")
    if estimate["wall_s"] > limit_s:
        duration, limit = format_duration(estimate["wall_s"]), format_duration(limit_s)
        raise GateFailed(f"the job would take about {duration} ({estimate['basis']}), more than the {limit} allowed")


def _forecast(
    spec: JobSpec, model: ModelInfo, survey: Survey, lengths: ExpectedLengths | None, *, calibrates: bool
) -> Forecast:
    if calibrates and survey.num_good:
        began = time.monotonic()
        from batchgen.plan.calibrate import calibrate

        return calibrate(spec, model, survey, lengths, began=began)
    with suppress(UsageError):  # the report may be missing
        report = read_report(RunDir(Path(spec.output.path)))
        if comparable(report, spec, processor_name()):
            return forecast_from_report(report, survey, lengths)
    return Forecast(lengths or ExpectedLengths.limits(survey))


def _content(spec: JobSpec, model: ModelInfo, survey: Survey, forecast: Forecast) -> dict[str, Any]:
    num_good, num_bad = survey.num_good, survey.errors.total()
    rows_per_s = (num_good + num_bad + survey.num_reused) / survey.read_s if survey.read_s else 0.0
    lengths, estimate = forecast.lengths, forecast.estimate
    output_tokens = lengths.total(survey)
    kv = kv_plan(spec, model.config, (survey.prompt_tokens + output_tokens) / max(num_good, 1), forecast)
    no_rate = _NO_RATE.format(made="made embeddings" if spec.embed.is_on else "wrote text")
    no_estimate = None if estimate else no_rate if num_good else "no row is to be computed"
    workers = workers_plan(spec, num_good, kv["max_num_seqs"])
    if estimate and workers and workers.number is None:
        estimate, no_estimate = None, _NO_WORKERS
    elif estimate and workers and workers.number:
        estimate = estimate.on_workers(min(workers.number, workers.at_most))
    return {
        "version": PLAN_VERSION,
        **spec.model.named,
        "input": spec.input.shown_path,
        "rows": {"total": num_good + num_bad, "good": num_good, "bad": num_bad},
        "errors": dict(sorted(survey.errors.items())),
        "empty_fields": dict(sorted(survey.empty_fields.items())),
        "bad_rows": [
            {"source": row.source, "line": row.line, "index": row.index, "id": row.id}
            | {"code": str(row.error.code), "message": row.error.message}
            for row in survey.bad_rows
            if row.error is not None
        ],
        "template": _template(spec, model),
        "turns": _turns(survey),
        "prompt_tokens": _prompt_tokens(survey),
        "output_tokens": {
            "at_most": ExpectedLengths("").total(survey),
            "expected": output_tokens,
            "basis": lengths.basis,
        },
        "logprobs": _logprobs(spec, survey, kv["max_num_seqs"]),
        "kv": kv,
        "workers": workers and asdict(workers),
        "estimate": estimate and _estimate(estimate, survey.prompt_tokens, output_tokens),
        "no_estimate": no_estimate,
        "read": {"wall_s": round(survey.read_s, 3), "rows_per_s": round(rows_per_s, 1)},
    }


def _template(spec: JobSpec, model: ModelInfo) -> dict[str, bool] | None:
    """The parts of a chat that the chat template shows; None if no chat is rendered."""
    caps = model.tokenizer and model.tokenizer.template_caps
    has_chats = spec.input.is_templated and not spec.input.prompt_token_ids and not spec.embed.is_on
    return dict(caps.table) if caps and has_chats else None


def _turns(survey: Survey) -> dict[str, int] | None:
    """Turns to be generated, and the most of one chat; None if rows have one answer."""
    total = sum(count * chats for count, chats in survey.turns.items())
    return {"total": total, "max": max(survey.turns)} if survey.turns else None


def _prompt_tokens(survey: Survey) -> dict[str, Any]:
    """Totals, exact percentiles, and counts in bins that double: from 2**k to 2**(k+1) - 1 tokens."""
    lengths = sorted(survey.prompt_lengths.items())
    bins: dict[int, int] = {}
    for length, count in lengths:
        low = 1 << (length.bit_length() - 1)
        bins[low] = bins.get(low, 0) + count
    return {
        "total": survey.prompt_tokens,
        "mean": round(survey.prompt_tokens / survey.num_good, 1) if survey.num_good else None,
        **{f"p{percent}": percentile(lengths, survey.num_good, percent) for percent in PERCENTS},
        "max": lengths[-1][0] if lengths else None,
        "histogram": [{"from": low, "to": 2 * low - 1, "rows": count} for low, count in bins.items()],
    }


def _logprobs(spec: JobSpec, survey: Survey, max_num_seqs: int) -> dict[str, Any] | None:
    """Most bytes of log-probabilities, of records before compression and of rows that run at once; None without any."""
    if not survey.logprob_bytes:
        return None
    longest = survey.max_logprob_bytes // (1 if spec.packs_logprobs else JSON_BYTES // PACKED_BYTES)
    running = longest * min(max_num_seqs, survey.num_good)
    return {
        "mean_row_bytes": survey.logprob_bytes // survey.num_good,
        "max_row_bytes": survey.max_logprob_bytes,
        "total_bytes": survey.logprob_bytes,
        "running_bytes": running,
        "fits": running <= available_bytes() // 2,
    }


def _estimate(estimate: Estimate, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    wall_s = max(estimate.wall_s, 1e-9)
    return {
        "basis": estimate.basis,
        "wall_s": round(estimate.wall_s, 3),
        "engine_s": round(estimate.engine_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / wall_s, 2),
    }


def render_plan(plan: Plan) -> str:
    """The whole text; ``plan`` is what ``make_plan`` returned."""
    lines = [*_rows(plan), *(_tokens(plan) if plan["rows"]["good"] else ()), *_estimated(plan)]
    return "\n".join(labelled(lines))


def _rows(plan: Plan) -> Lines:
    rows, read = plan["rows"], plan["read"]
    yield "rows", f"{rows['total']:,}, {rows['good'] + rows.get('reused', 0):,} can run, {rows['bad']:,} bad"
    if "reused" in rows:
        yield "", f"{rows['reused']:,} kept, {rows['good']:,} to compute"
        yield from (("", shortened(line, _SHOWN_CHARS)) for line in plan["reuse"])
    for code, count in plan["errors"].items():
        listed = [row for row in plan["bad_rows"] if row["code"] == code]
        lines = ", ".join(f"{row['line']}" for row in listed[:_SHOWN_BAD_ROWS])
        more = ", …" if count > _SHOWN_BAD_ROWS else ""
        yield "", f"{code} {count:,}: line {lines}{more}"
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
    max_rows = max(bucket["rows"] for bucket in prompts["histogram"])
    for bucket in prompts["histogram"]:
        bar = "█" * max(1, round(_BAR_WIDTH * bucket["rows"] / max_rows))
        yield "", f"{bucket['from']:>7,}+ {bar} {bucket['rows']:,}"
    if not outputs["at_most"]:
        yield "tokens out", "none"
    elif outputs["expected"] == outputs["at_most"]:
        yield "tokens out", f"{outputs['at_most']:,} ({outputs['basis']})"
    else:
        yield "tokens out", f"{outputs['expected']:,} expected ({outputs['basis']}), {outputs['at_most']:,} at most"
    if logprobs := plan["logprobs"]:
        mean, longest, total, running = (_size(logprobs[f"{name}_bytes"]) for name in _LOGPROBS)
        yield "logprobs", f"{mean} a row, {longest} the longest, {total} in all, at most and not compressed"
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


def _estimated(plan: Plan) -> Lines:
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
