"""The commands on run directories: ``run``, ``status`` and ``merge``."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.console import point_out_backslashes, say, say_next, show
from batchgen.cli.options import (
    CLOCK,
    COUNT,
    DURATION,
    JOB,
    PATH,
    SHARD,
    SHARE,
    GroupedCommand,
    job_options,
    json_option,
    run_option,
    take_job_flags,
)
from batchgen.config.job import POLICIES
from batchgen.core.errors import ExitCode
from batchgen.core.units import counted
from batchgen.run.argument import is_run_folder, load_spec

if TYPE_CHECKING:
    from batchgen.run.invocation import RunOptions
    from batchgen.run.loader import EngineFactory
    from batchgen.run.outcome import Outcome

_HEARTBEAT_HELP = "Interval of progress lines without a terminal [30s]."
_MIXED_HELP = "Continue a run begun on another CPU type."


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, metavar="[JOB.toml|DATA|DIR]", type=JOB)
@job_options("model", "input", "sampling", "classify", "embed", "engine", "output", "eval", "cluster")
@run_option("--overwrite", is_flag=True, help="Discard previous results and start again.")
@run_option("--update", is_flag=True, help="Reuse results that are still valid, even if few are.")
@run_option("--max-error-rate", type=SHARE, help="Stop when more of the rows read fail, such as 5%.")
@run_option("--deadline", type=CLOCK, help="Stop at this time: 05:55 or 2026-01-31T05:55.")
@run_option("--max-runtime", type=DURATION, help="Stop after this long, such as 55m.")
@run_option("--max-total-tokens", type=COUNT, hidden=True, help="Stop after computing N tokens.")
@run_option("--shard", type=SHARD, help="Run the I-th of N parts of the rows [1/1].")
@run_option("--allow-mixed-kernels", is_flag=True, hidden=True, help=_MIXED_HELP)
@run_option("--without", multiple=True, hidden=True, type=click.Choice(POLICIES))  # for measurements; not shown in help
@run_option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@run_option("--json-progress", is_flag=True, hidden=True, help="Progress as JSON lines on stderr.")
@run_option("--heartbeat", "heartbeat_s", type=DURATION, default="30s", help=_HEARTBEAT_HELP, hidden=True)
@click.pass_obj
def run(engine_factory: EngineFactory | None, /, job: str | None, **values: Any) -> int:
    """Run a job; run it again to resume, or after the input has changed.

    A finished job exits at once with the code it ended with: 0, or 3 if rows failed. If the input has changed, only new
    and changed rows are computed; if the job has changed, --update keeps the rows that cannot differ. Every key of the
    job file has a flag, and flags win. In place of a job file, give a run directory, which has a job, or data, whose
    outputs go into runs/NAME. SIGTERM or Ctrl-C stops it within 10 seconds with exit code 75 and loses nothing.

    \b
    Examples:
      batchgen run jobs/quickstart.toml
      batchgen run data.csv -m LiquidAI/LFM2-350M -p 'Summarize: {text}'
      batchgen run jobs/nightly.toml --deadline 05:55
      batchgen run job.toml --max-tokens 1024 --update
      batchgen run job.toml --structured-outputs '{"choice": ["yes", "no"]}'
      zcat prompts.txt.gz | batchgen run job.toml --input - --input-format text
    """
    flags = take_job_flags(values, job)
    point_out_backslashes(flags)
    spec, values["shard"] = load_spec(job, flags, values["shard"])
    from batchgen.run.stop import Limits
    from batchgen.workers.placement import run_placed

    limits = Limits(values["deadline"], values["max_runtime"], values["max_total_tokens"])
    keeps_stdin = is_run_folder(job) and "path" not in flags.get("input", {})
    options = replace(_run_options(values), limits=limits, keeps_stdin=keeps_stdin)
    outcome = run_placed(spec.without(values["without"]), options, engine_factory=engine_factory)
    return _conclude(outcome, values, Path(spec.output.path))


def _run_options(values: dict[str, Any]) -> RunOptions:
    from batchgen.run.invocation import RunOptions

    options = {item.name: values[item.name] for item in fields(RunOptions) if item.name in values}
    return RunOptions(progress="quiet" if values["quiet"] else "json" if values["json_progress"] else "auto", **options)


def _conclude(outcome: Outcome, values: dict[str, Any], folder: Path) -> int:
    from batchgen.run.outcome import short

    if values["json_progress"]:  # a program reads the event "end" and the report
        return outcome.exit_code
    for line in outcome.failures if values["quiet"] else outcome.lines:
        say(line)
    if outcome.report and not values["quiet"]:
        say_next("report", short(folder))
    return outcome.exit_code


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@json_option("JSON instead of text; with --watch one object per line.")
@click.option("--watch", is_flag=True, help="Update every 2 s until the run ends.")
def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Show the progress of a run, whether it is running or not.

    Read-only: takes no lock and does not disturb the run.

    \b
    Examples:
      batchgen status runs/questions
      batchgen status runs/questions --watch
    """
    from batchgen.run.status import read_status, render_status, watch_status

    if not watch:
        state = read_status(folder)
        show(json.dumps(state, indent=2) if as_json else render_status(state))
        return ExitCode.OK
    for state in watch_status(folder):
        if sys.stdout.isatty() and not as_json:
            click.clear()
        show(json.dumps(state) if as_json else render_status(state))
    return ExitCode.OK


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option(
    "-o", "--output", metavar="DIR", required=True, type=PATH, help="Folder for the joined run; must not exist."
)
@click.option("--allow-mixed-kernels", is_flag=True, help="Join shards that ran on different CPU types.")
def merge(folders: tuple[Path, ...], output: Path, allow_mixed_kernels: bool) -> int:
    """Join the shards of one job into one run.

    All shards must be finished, and no row may be missing or appear twice: this is checked before anything is
    written. An interrupted merge resumes when run again, and a finished one says so. Exits 3 if rows failed.
    Shards that have changed since are merged again in place. Nothing is published: for that, run the job once more with
    the new folder as --output and --publish.

    \b
    Example:
      for i in 1 2; do batchgen run job.toml --shard $i/2 --output part$i; done
      batchgen merge part1 part2 -o whole
    """
    from batchgen.run.merge import merge as merge_shards

    counts, problems = merge_shards(folders, output, allow_mixed_kernels=allow_mixed_kernels)
    if counts is None:
        say(f"already done: {counted(len(folders), 'shard')} in {output}")
    else:
        done = f"{counted(counts.results, 'row')} done, {counts.errors:,} failed"
        say(f"{done}, of {counted(len(folders), 'shard')}, into {output}")
    for problem in problems:
        say(f"no report of the merged run: {problem}")
    if not problems:
        say_next("report", output)
    return ExitCode.ROWS_FAILED if (output / "errors.jsonl").exists() else ExitCode.OK
