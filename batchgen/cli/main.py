"""The command line: parse, call one function, print, exit with the code scripts rely on. No logic lives here.

Whatever is slow to import is imported by the command that needs it, so that help and status start at once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from batchgen.cli.bench import bench
from batchgen.cli.check import check
from batchgen.cli.options import TITLES, F, GroupedCommand, GroupedOption, LocalPath, job_options, take, take_job_flags
from batchgen.cli.plan import plan
from batchgen.cli.report import report
from batchgen.cli.say import is_of_stdout, say, settle, show
from batchgen.core.errors import BatchgenError, ExitCode
from batchgen.core.machine import memory_errors
from batchgen.core.units import counted, parse_clock, parse_count, parse_duration, parse_shard, parse_share
from batchgen.core.version import __version__

if TYPE_CHECKING:
    from batchgen.run import Outcome, RunOptions
    from batchgen.run.loader import EngineFactory

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
RUN_TITLE = TITLES["run"]
MIXED_HELP = "Go on with rows of other kernels, whose tokens may differ."


def call(argv: Sequence[str] | None = None, engine_factory: EngineFactory | None = None) -> int:
    """Run a command and return its exit code; every error becomes a line or two on stderr.

    ``engine_factory`` replaces the model's own engine (see ``run_job``).
    """
    try:
        return _call(argv, engine_factory)
    finally:
        settle()


def _call(argv: Sequence[str] | None, engine_factory: EngineFactory | None) -> int:
    try:
        with memory_errors("running this command"):
            return int(cli.main(argv, prog_name="batchgen", standalone_mode=False, obj=engine_factory) or ExitCode.OK)
    except click.exceptions.NoArgsIsHelpError as error:
        show(error.format_message())
        return ExitCode.USAGE
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        hint = f"; try '{ctx.command_path} --help'" if ctx else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", ExitCode.STOPPED)
    except BatchgenError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        return _unforeseen(error)


def _unforeseen(error: BaseException) -> int:
    """The last resort: a person gets a line, the traceback goes where it can be found."""
    if isinstance(error, OSError) and is_of_stdout(error):
        if isinstance(error, BrokenPipeError):  # what read the output has gone, and asks for no message
            return ExitCode.CRASH
        return _fail(f"cannot write to standard output: {error.strerror or error}", ExitCode.CRASH)
    return _fail(f"{type(error).__name__}: {error} ({_keep_traceback()})", ExitCode.CRASH)


def _fail(message: str, code: ExitCode) -> int:
    say(f"error: {message}")
    return code


def _keep_traceback() -> str:
    if os.environ.get("BATCHGEN_DEBUG"):
        with suppress(OSError, ValueError):
            traceback.print_exc()
        return "traceback above"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="batchgen-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except (OSError, ValueError):
        return "this is a bug; BATCHGEN_DEBUG=1 shows the traceback"
    return f"this is a bug; traceback in {file.name}, BATCHGEN_DEBUG=1 shows it"


def _conclude(outcome: Outcome, values: Mapping[str, Any]) -> int:
    if _progress_kind(values) == "auto":  # for a program, the event "end" and the report say it
        for line in outcome.lines:
            say(line)
    return outcome.exit_code


def _run_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, heading=RUN_TITLE, **attributes)


def _progress_options(command: F) -> F:
    for option in (
        _run_option("--heartbeat", metavar="DURATION", default="30s", help="Time between lines off a terminal [30s]."),
        _run_option("--json-progress", is_flag=True, help="Progress as JSON lines on stderr."),
        _run_option("-q", "--quiet", is_flag=True, help="Say nothing but errors."),
    ):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, message="batchgen %(version)s")
def cli() -> None:
    """Run a language model over a whole dataset, offline, and never lose or repeat a row.

    \b
    Example:
      batchgen run jobs/quickstart.toml

    Exit codes: 0 all rows done, 1 crash, 2 usage or resume mismatch, 3 finished with failed rows, 4 a gate failed,
    5 locked by another run, 75 stopped early: run again to resume.
    """


@cli.command(cls=GroupedCommand)
@click.argument("job", required=False, metavar="[JOB.toml]", type=LocalPath())
@job_options("model", "input", "sampling", "engine", "output")
@_run_option("--overwrite", is_flag=True, help="Start anew, dropping what the run directory holds.")
@_run_option("--strict", is_flag=True, help="Refuse to start on any bad row.")
@_run_option(
    "--max-error-rate", metavar="SHARE", help="Stop when more rows fail, such as 5% of those read (or of 100)."
)
@_run_option("--deadline", metavar="HH:MM", help="Stop when the clock next shows this; or at an ISO date and time.")
@_run_option("--max-runtime", metavar="DURATION", help="Stop after such as 55m.")
@_run_option("--max-total-tokens", metavar="N", help="Stop after computing N tokens.")
@_run_option("--shard", metavar="I/N", help="Run the I-th of N parts of the rows.")
@_run_option("--allow-mixed-kernels", is_flag=True, help=MIXED_HELP)
@_run_option("--metrics-file", metavar="FILE", type=LocalPath(), help="Prometheus metrics at the end.")
@_progress_options
@click.pass_obj
def run(engine_factory: EngineFactory | None, /, job: Path | None, **values: Any) -> int:
    """Run a job; run it again to resume.

    A job that is done exits at once, with the code it ended with: 0, or 3 if rows failed. Every key of the job file
    has a flag, and flags win; without a job file --model, --input and --output are needed. SIGTERM or Ctrl-C stop
    within 10 seconds and exit 75, nothing lost.

    \b
    Examples:
      batchgen run jobs/quickstart.toml
      batchgen run jobs/nightly.toml --deadline 05:55
      batchgen run --model LiquidAI/LFM2-350M --input questions.jsonl \\
          --prompt '{question}' --max-tokens 64 --output runs/questions
      batchgen run jobs/nightly.toml --metrics-file metrics/nightly.prom
      zcat prompts.txt.gz | batchgen run job.toml --input - --input-format text
    """
    options = _run_options(values)
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    if job is None and not flags:
        raise click.UsageError("give a job file, or --model, --input and --output", click.get_current_context())
    spec = load_job(job, flags)
    from batchgen.run import run_job
    from batchgen.run.reports import check_metrics_file, write_metrics

    metrics_file: Path | None = values["metrics_file"]
    if metrics_file is not None:
        check_metrics_file(metrics_file, spec.output.path)
    outcome = run_job(spec, options, engine_factory=engine_factory)
    if metrics_file is not None:
        write_metrics(metrics_file, spec.output.path, spec.model.path, outcome.report, outcome.exit_code)
    return _conclude(outcome, values)


def _progress_kind(values: Mapping[str, Any]) -> Literal["auto", "json", "quiet"]:
    return "quiet" if values["quiet"] else "json" if values["json_progress"] else "auto"


def _run_options(values: dict[str, Any]) -> RunOptions:
    from batchgen.run.options import RunOptions
    from batchgen.run.stop import Limits

    limits = Limits(
        take(values, "deadline", lambda text: parse_clock(text, datetime.now().astimezone())),
        take(values, "max_runtime", parse_duration),
        take(values, "max_total_tokens", parse_count),
    )
    return RunOptions(
        overwrite=values["overwrite"],
        strict=values["strict"],
        max_error_rate=take(values, "max_error_rate", parse_share),
        shard=take(values, "shard", parse_shard) or (1, 1),
        allow_mixed_kernels=values["allow_mixed_kernels"],
        limits=limits,
        progress=_progress_kind(values),
        heartbeat_s=take(values, "heartbeat", parse_duration),
    )


@cli.command()
@click.argument("folder", metavar="DIR", type=LocalPath())
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text; with --watch an object a line.")
@click.option("--watch", is_flag=True, help="Show it anew every 2 s until the run ends.")
def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Show how far a run is, running or not.

    Takes no lock and disturbs nobody.

    \b
    Examples:
      batchgen status runs/questions
      batchgen status runs/questions --watch
    """
    from batchgen.run.status import read_status, render_status, watch_status

    if not watch:
        found = read_status(folder)
        show(json.dumps(found, indent=2) if as_json else render_status(found))
        return ExitCode.OK
    for found in watch_status(folder):
        if sys.stdout.isatty() and not as_json:
            click.clear()
        show(json.dumps(found) if as_json else render_status(found))
    return ExitCode.OK


@cli.command(cls=GroupedCommand)
@click.argument("folder", metavar="DIR", type=LocalPath())
@job_options("engine")
@_run_option("--allow-mixed-kernels", is_flag=True, help=MIXED_HELP)
@_progress_options
@click.pass_obj
def retry(engine_factory: EngineFactory | None, /, folder: Path, **values: Any) -> int:
    """Run failed rows again and merge those that now succeed.

    Rows are taken from errors.jsonl as they stand there: mend a "row" by hand and retry runs the mended one.
    Interrupted, it resumes when run again. Exits 3 while rows still fail.

    \b
    Examples:
      batchgen retry runs/questions
      batchgen retry runs/questions --kv-memory 8GiB
    """
    heartbeat_s = take(values, "heartbeat", parse_duration)
    progress = _progress_kind(values)
    from batchgen.run.options import RunOptions
    from batchgen.run.retry import retry_job

    mixed = values["allow_mixed_kernels"]
    options = RunOptions(allow_mixed_kernels=mixed, progress=progress, heartbeat_s=heartbeat_s)
    outcome = retry_job(folder, options, take_job_flags(values), engine_factory=engine_factory)
    return _conclude(outcome, values)


@cli.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=LocalPath())
@click.option("-o", "--output", metavar="DIR", required=True, type=LocalPath(), help="A new folder.")
@click.option("--allow-mixed-kernels", is_flag=True, help="Join rows of different kernels, whose tokens may differ.")
def merge(folders: tuple[Path, ...], output: Path, allow_mixed_kernels: bool) -> int:
    """Join the shards of one job into one run.

    All shards must be finished; that no row is missing or there twice is proved before anything appears. Interrupted,
    it goes on when run again; done already, it says so. Exits 3 if rows have failed.

    \b
    Example:
      for i in 1 2; do batchgen run job.toml --shard $i/2 --output part$i; done
      batchgen merge part1 part2 -o whole
    """
    from batchgen.run.merge import merge as merge_shards
    from batchgen.run.merge_report import write_merged_report

    counts = merge_shards(folders, output, allow_mixed_kernels=allow_mixed_kernels)
    if counts is None:
        say(f"already done: {counted(len(folders), 'shard')} in {output}")
    else:
        done = f"{counted(counts.results, 'row')} done, {counts.errors:,} failed"
        say(f"{done}, of {counted(len(folders), 'shard')}, into {output}")
    for problem in write_merged_report(folders, output):
        say(f"no report of the whole: {problem}")
    return ExitCode.ROWS_FAILED if (output / "errors.jsonl").exists() else ExitCode.OK


cli.add_command(bench)
cli.add_command(check)
cli.add_command(plan)
cli.add_command(report)
