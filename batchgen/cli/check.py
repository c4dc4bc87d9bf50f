"""The ``check`` command."""

from __future__ import annotations

import json
from typing import Any

import click

from batchgen.cli.options import GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import say, show
from batchgen.config.job import KEYS
from batchgen.core.errors import ExitCode, GateFailed
from batchgen.core.machine import require_address_space
from batchgen.core.units import counted

_SIZES = tuple(name for name in KEYS["engine"] if name != "threads")  # the proofs choose these
_MAX_PROMPTS = 16  # of a file without --limit


@click.command(cls=GroupedCommand)
@click.option("--prompts", metavar="FILE", help="Rows with prompts; - for stdin [synthetic ones].")
@json_option()
@job_options("model", "engine", without=_SIZES)
@job_options("input", without=("path", "format", "id", "keep_columns"))
def check(prompts: str | None, as_json: bool, **values: Any) -> int:
    """Prove on this machine that no way of running changes a result.

    Prompts run one by one, greedy and sampled by turns; then all together, in chunks, from cached prefixes, preempted,
    and as whole texts. Every logit must be the same to the bit. Last, the fast kernels are compared with plain torch,
    where a small gap is allowed. If any proof fails, exits 4 and says where it fails first. Of a file the first 16
    rows are taken, or --limit.

    \b
    Examples:
      batchgen check --model LiquidAI/LFM2-350M
      batchgen check --model my/model --prompts rows.jsonl --prompt '{question}'
    """
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    if prompts is not None:
        flags["input"] = {"limit": _MAX_PROMPTS, **flags.get("input", {}), "path": [prompts]}
    spec = load_job(None, flags, needs=("model",))
    require_address_space()
    from batchgen.check.report import run_check

    found = run_check(spec, has_input=prompts is not None, log=say, show=(lambda line: None) if as_json else show)
    if as_json:
        show(json.dumps(found, indent=2))
    if not found["ok"]:
        first, more = found["failed"][0], len(found["failed"]) - 1
        raise GateFailed(first + (f" (and {counted(more, 'more proof')})" if more else ""))
    return ExitCode.OK
