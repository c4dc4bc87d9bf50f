"""The ``check`` command."""

from __future__ import annotations

import json
from typing import Any

import click

from batchgen.cli.options import COUNT, SHARE, GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import say, show
from batchgen.config.job import KEYS, JobSpec
from batchgen.core.errors import ExitCode, GateFailed, UsageError
from batchgen.core.machine import require_address_space
from batchgen.core.units import counted

_SIZES = tuple(name for name in KEYS["engine"] if name not in ("threads", "kv_dtype"))  # the proofs choose these
_NOT_EXPECTED = tuple(name for name in KEYS["output"] if name != "expected")
_MAX_PROMPTS, _MAX_ROWS = 16, 100  # of a file without --limit; with --against
_MAX_TOKENS = 256  # of an answer
_AGAINST_HELP = "Compare with the model in this dtype without integers."
_MOST_DIFFERENT_HELP = "With --against: exit 4 if more rows differ, such as 1%."


@click.command(cls=GroupedCommand)
@click.option("--input", "path", metavar="FILE", help="Rows with prompts; - for stdin [made-up ones].")
@click.option("--against", type=click.Choice(KEYS["model"]["dtype"].kind.choices), help=_AGAINST_HELP)
@click.option("--max-tokens", type=COUNT, help=f"With --against: tokens per answer [{_MAX_TOKENS}].")
@click.option("--max-different-rows", "most_different", type=SHARE, help=_MOST_DIFFERENT_HELP)
@json_option()
@job_options("model", "engine", without=_SIZES)
@job_options("input", without=("path", "format", "id", "columns"))
@job_options("output", without=_NOT_EXPECTED)
def check(
    path: str | None,
    as_json: bool,
    against: str | None,
    max_tokens: int | None,
    most_different: float | None,
    **values: Any,
) -> int:
    """Test on this machine that batching and caching change no result.

    Prompts run one by one, greedy and sampled by turns. Then they run again, and every logit must be the same to the
    bit: all together (batched = solo), in small parts (chunked = whole), from cached prefixes (cached = cold), thrown
    out and run anew (preempted = undisturbed), and with their answers as one text (decoded = prefilled). Last, the
    fast kernels are compared with plain torch, where a small gap is allowed. If a test fails, exits 4 and says where
    it fails first. Before, each operation of the kernels is held against plain torch, which takes the place of what
    differs, here and in later runs. The digest in --json is that of all logits: two machines compute the same bits if
    it is the same. Of a file the first 16 rows are taken, or --limit.

    With --against DTYPE nothing is tested. The rows are answered twice: by the model as given, such as with --weights
    int8, and by the model in that dtype without integers. The result says how many answers are the same. It also says
    how likely each of the two finds the texts of the column --expected, or else the second one's answers (perplexity).
    Of the file 100 rows are taken, or --limit.

    \b
    Examples:
      batchgen check --model LiquidAI/LFM2-350M
      batchgen check --model my/model --input rows.jsonl --prompt '{question}'
      batchgen check --model my/model --weights int8 --against bfloat16 \\
          --input rows.jsonl --prompt '{question}' --expected answer
      srun -N 8 batchgen check --model my/model --json | jq -c .digest | uniq -c
    """
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    if path is not None:
        limit = _MAX_PROMPTS if against is None else _MAX_ROWS
        flags["input"] = {"limit": limit, **flags.get("input", {}), "path": [path]}
    spec = load_job(None, flags, needs=("model",))
    if against is not None and path is None:
        raise UsageError("--against needs --input FILE, with rows of the kind that the model is for")
    if against is None:
        _refuse_unused(spec.output.expected, max_tokens, most_different)
    require_address_space()
    if against is not None:
        return _compare_forms(spec, against, max_tokens, most_different, as_json=as_json)
    from batchgen.check.run import run_check

    found = run_check(spec, has_input=path is not None, log=say, show=(lambda line: None) if as_json else show)
    if as_json:
        show(json.dumps(found, indent=2))
    if not found["ok"]:
        first, more = found["failed"][0], len(found["failed"]) - 1
        raise GateFailed(first + (f" (and {counted(more, 'more proof')})" if more else ""))
    return ExitCode.OK


def _compare_forms(
    spec: JobSpec, against: str, max_tokens: int | None, most_different: float | None, *, as_json: bool
) -> int:
    from batchgen.check.against import compare_forms, render

    compared = compare_forms(spec, against, max_tokens or _MAX_TOKENS, log=say)
    show(json.dumps(compared, indent=2) if as_json else render(compared))
    different = 1 - compared["num_same_rows"] / compared["num_rows"]
    if most_different is not None and different > most_different:
        raise GateFailed(f"{different:.1%} of the rows differ, more than the {most_different:.1%} allowed")
    return ExitCode.OK


def _refuse_unused(expected: str | None, max_tokens: int | None, most_different: float | None) -> None:
    """Raises UsageError for flags of a comparison without one: a script would take its gate for passed."""
    given = {"--expected": expected, "--max-tokens": max_tokens, "--max-different-rows": most_different}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is for a comparison: it needs --against DTYPE")
