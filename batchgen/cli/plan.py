"""The ``plan`` command: parse, survey the job, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from batchgen.cli.options import GroupedCommand, LocalPath, job_options, take, take_job_flags
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode
from batchgen.core.units import parse_count, parse_duration, parse_shard


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, metavar="[JOB.toml]", type=LocalPath())
@click.option("--calibrate", is_flag=True, help="Time real steps of the model for about 10 s.")
@click.option("--fail-if-over", metavar="DURATION", help="Exit 4 if the job would take longer.")
@click.option("--expect-output", metavar="N", help="Tokens a row is expected to generate.")
@click.option("--shard", metavar="I/N", help="Plan the I-th of N parts of the rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@job_options("model", "input", "sampling", "engine", "output")
def plan(job: Path | None, as_json: bool, **values: Any) -> int:
    """Read a job's whole input and say what running it would take.

    Nothing is written and no weights are needed: rows, bad rows by line, token counts, repeated prompts, KV memory.
    The time is estimated from the last run's report, or with --calibrate from real steps of the model.

    \b
    Examples:
      batchgen plan jobs/quickstart.toml
      batchgen plan jobs/nightly.toml --calibrate --fail-if-over 2h
      batchgen plan job.toml --json | jq -r '.bad_rows[] | "\\(.line) \\(.code)"'
    """
    limit_s = take(values, "fail_if_over", parse_duration)
    shard = take(values, "shard", parse_shard) or (1, 1)
    output_tokens = take(values, "expect_output", parse_count)
    flags = take_job_flags(values)
    if job is None and not flags:
        raise click.UsageError("give a job file, or --model and --input", click.get_current_context())
    if job is None:
        flags.setdefault("output", {}).setdefault("path", ".")  # a plan writes nothing
    from batchgen.config.load import load_job
    from batchgen.plan.dry_run import PlanOptions, check_time, make_plan
    from batchgen.plan.text import render_plan

    found = make_plan(load_job(job, flags), PlanOptions(values["calibrate"], output_tokens, shard))
    show(json.dumps(found, indent=2) if as_json else render_plan(found))
    if limit_s is not None:
        check_time(found, limit_s)
    return ExitCode.OK
