"""The commands that show what a run would do: ``plan`` and ``try``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.console import point_out_backslashes, say, say_next, show
from batchgen.cli.options import (
    COUNT,
    DURATION,
    JOB,
    SHARD,
    GroupedCommand,
    job_options,
    json_option,
    run_option,
    take_job_flags,
)
from batchgen.core.errors import ExitCode
from batchgen.run.argument import load_spec

if TYPE_CHECKING:
    from batchgen.run.loader import EngineFactory


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, metavar="[JOB.toml|DATA|DIR]", type=JOB)
@click.option("--calibrate", is_flag=True, help="Run some rows in the real engine, up to 20 s.")
@click.option("--fail-if-over", type=DURATION, help="Exit 4 if the job would take longer.")
@click.option("--expect-output", type=COUNT, help="Expected tokens per answer [as in the last run].")
@click.option("--shard", type=SHARD, help="Plan the I-th of N parts of the rows [1/1].")
@run_option("--overwrite", is_flag=True, hidden=True, help="As for run: earlier results are dropped.")
@json_option()
@job_options("model", "input", "sampling", "classify", "embed", "engine", "output", "eval", "cluster")
def plan(job: str | None, as_json: bool, **values: Any) -> int:
    """Read a job's whole input and estimate what running it takes.

    Writes nothing and needs no weights. Shows rows, rows with results in the output folder, bad rows by line, token
    counts and KV memory. The time is estimated from the last run's report, or with --calibrate from up to 64 rows of
    the input, within about 25 %. All flags of run are accepted; those that say how to run, such as --deadline, have no
    effect here.

    \b
    Examples:
      batchgen plan jobs/quickstart.toml
      batchgen plan jobs/nightly.toml --calibrate --fail-if-over 2h
      batchgen plan job.toml --calibrate --ray auto --workers 64
      batchgen plan job.toml --json | jq -r '.bad_rows[] | "\\(.line) \\(.code)"'
    """
    flags = take_job_flags(values, job)
    point_out_backslashes(flags)
    from batchgen.plan.dry_run import check_time, make_plan, render_plan
    from batchgen.run.earlier_results import refuse_own_rows

    spec, shard = load_spec(job, flags, values["shard"], needs=("model", "input"))
    if values["overwrite"]:
        refuse_own_rows(spec)
    options = {"output_tokens": values["expect_output"], "shard": shard, "overwrites": values["overwrite"]}
    result = make_plan(spec, calibrates=values["calibrate"], **options)
    show(json.dumps(result, indent=2) if as_json else render_plan(result))
    if values["fail_if_over"] is not None:
        check_time(result, values["fail_if_over"])
    if not as_json:
        say_next("run", job, flags, needs_update=result.get("needs_update", False))
    return ExitCode.OK


@click.command("try", cls=GroupedCommand)
@click.argument("job", required=False, metavar="[JOB.toml|DATA|DIR]", type=JOB)
@click.option("-n", "--num-rows", type=COUNT, default="3", help="Rows to try, from the first on [3].")
@json_option("One JSON object per row instead of text.")
@job_options("model", "input", "sampling", "classify", "embed", "engine", "output", "eval")
@click.pass_obj
def try_command(
    engine_factory: EngineFactory | None, /, job: str | None, num_rows: int, as_json: bool, **values: Any
) -> int:
    """Show the first prompts as the model sees them, with its answers.

    Special tokens of the prompt are shown. Nothing is written: no folder, no results. Exits 3 if a row failed.

    \b
    Examples:
      batchgen try jobs/quickstart.toml
      batchgen try data.csv -m LiquidAI/LFM2-350M -p 'Summarize: {text}' -n 1
      batchgen try job.toml --temperature 0.3 --max-tokens 400
    """
    flags = take_job_flags(values, job)
    point_out_backslashes(flags)
    spec, _ = load_spec(job, flags, None, needs=("model", "input"), writes=False)
    from batchgen.plan.trial import try_job

    code = ExitCode.OK
    for number, tried in enumerate(try_job(spec, num_rows, say, engine_factory)):
        if as_json:
            show(json.dumps(tried.to_dict(), ensure_ascii=False))
        else:
            show(f"\n{tried.text()}" if number else tried.text())
        code = ExitCode.ROWS_FAILED if "code" in tried.record else code
    if not as_json:
        say_next("run", job, flags)
    return code
