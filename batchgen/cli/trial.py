"""The ``try`` command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import COUNT, JOB, GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import point_out_backslashes, say, say_next, show
from batchgen.core.errors import ExitCode
from batchgen.run.argument import load_spec

if TYPE_CHECKING:
    from batchgen.run.loader import EngineFactory


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
    flags = take_job_flags(values)
    point_out_backslashes(flags)
    if job is None and not flags:
        raise click.UsageError("give a job file, or data with --model and --prompt", click.get_current_context())
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
