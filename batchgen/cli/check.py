"""The ``check`` command: parse, run the proofs, print."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import click

from batchgen.cli.options import GroupedCommand, job_options, take_job_flags
from batchgen.cli.say import say, show
from batchgen.config.job import EngineSpec
from batchgen.core.errors import ExitCode, GateFailed, UsageError
from batchgen.core.machine import require_address_space
from batchgen.core.units import counted

_SIZES = tuple(item.name for item in fields(EngineSpec) if item.name != "threads")  # the proofs choose these
_MAX_PROMPTS = 16  # of a file, unless told otherwise


@click.command(cls=GroupedCommand)
@click.option("--prompts", metavar="FILE", help="Rows with prompts; - for stdin [made up].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@job_options("model", "engine", without=_SIZES)
@job_options("input", without=("path", "format", "id", "keep_columns"))
def check(prompts: str | None, as_json: bool, **values: Any) -> int:
    """Prove on this machine that no way of running changes a result.

    Prompts are run one by one, greedy and sampled by turns; then all together, in chunks, from cached prefixes,
    preempted, and as whole texts. Every logit must be the same to the bit. Last, the fast kernels are held against
    plain torch, where a small gap is allowed. Exits 4 if any proof fails and says where
    first. Of a file the first 16 rows are taken, or --limit.

    \b
    Examples:
      batchgen check --model LiquidAI/LFM2-350M
      batchgen check --model my/model --prompts rows.jsonl --prompt '{question}'
    """
    flags = take_job_flags(values)
    if "path" not in flags.get("model", {}):
        raise UsageError("--model is missing: a folder, a Hub id or dummy:NAME")
    from batchgen.config.load import load_job

    flags["input"] = {"limit": _MAX_PROMPTS, **flags.get("input", {}), "path": [prompts or "-"]}
    spec = load_job(None, {**flags, "output": {"path": "."}})  # a check writes nothing
    require_address_space()
    from batchgen.check.report import run_check

    found = run_check(spec, has_input=prompts is not None, say=say, tell=_nothing if as_json else show)
    if as_json:
        show(json.dumps(found, indent=2))
    if not found["ok"]:
        first, more = found["failed"][0], len(found["failed"]) - 1
        raise GateFailed(first + (f" (and {counted(more, 'more proof')})" if more else ""))
    return ExitCode.OK


def _nothing(line: str) -> None:
    """Text is not wanted."""
