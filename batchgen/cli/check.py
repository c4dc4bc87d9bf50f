"""The ``check`` command."""

from __future__ import annotations

import json
from typing import Any

import click

from batchgen.cli.options import SHARE, GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import say, show
from batchgen.config.job import KEYS, JobSpec
from batchgen.core.errors import ExitCode, GateFailed, UsageError
from batchgen.core.machine import require_address_space
from batchgen.core.units import counted

_SIZES = tuple(name for name in KEYS["engine"] if name not in ("threads", "kv_dtype"))  # the proofs choose these
_NOT_EXPECTED = tuple(name for name in KEYS["output"] if name != "expected")
_NOT_ON_MACHINES = ("patience", "numerics")
_MAX_PROMPTS, _MAX_ROWS = 16, 100  # of a file without --limit; with --against
_MAX_TOKENS = 256  # of an answer
_AGAINST_HELP = "Compare with the model in this dtype without integers."
_MOST_DIFFERENT_HELP = "With --against: exit 4 if more rows differ, such as 1%."


@click.command(cls=GroupedCommand)
@click.option(
    "--prompts", "--input", "prompts", metavar="FILE", help="Rows with prompts; - for stdin [synthetic ones]."
)
@click.option("--against", type=click.Choice(KEYS["model"]["dtype"].kind.choices), help=_AGAINST_HELP)
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", help=f"With --against: tokens per answer [{_MAX_TOKENS}]."
)
@click.option("--max-different-rows", "most_different", type=SHARE, help=_MOST_DIFFERENT_HELP)
@json_option()
@job_options("model", "engine", without=_SIZES)
@job_options("input", without=("path", "format", "id", "keep_columns"))
@job_options("output", without=_NOT_EXPECTED)
@job_options("cluster", without=_NOT_ON_MACHINES)
def check(
    prompts: str | None,
    as_json: bool,
    against: str | None,
    max_tokens: int | None,
    most_different: float | None,
    **values: Any,
) -> int:
    """Prove on this machine that no way of running changes a result.

    Prompts run one by one, greedy and sampled by turns; then all together, in chunks, from cached prefixes, preempted,
    behind right and wrong drafts, and as whole texts. Every logit must be the same to the bit. Last, the fast kernels
    are compared with plain torch, where a small gap is allowed. If any proof fails, exits 4 and says where it fails
    first. Of a file the first 16 rows are taken, or --limit.

    With --against nothing is proved. Rows are answered by the model as given, such as with --weights int8, and by the
    model without integers: how many answers are the same, and how likely both find the column --expected, or else the
    baseline's answers (perplexity). Of the file 100 rows are taken.

    With --ray the prompts run one by one on each machine of a cluster, or on --workers of them, and every logit must be
    that of the first machine.

    \b
    Examples:
      batchgen check --model LiquidAI/LFM2-350M
      batchgen check --model my/model --prompts rows.jsonl --prompt '{question}'
      batchgen check --model my/model --weights int8 --against bfloat16 \\
          --prompts rows.jsonl --prompt '{question}' --expected answer
      batchgen check --model my/model --ray auto
    """
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    if prompts is not None:
        limit = _MAX_PROMPTS if against is None else _MAX_ROWS
        flags["input"] = {"limit": limit, **flags.get("input", {}), "path": [prompts]}
    spec = load_job(None, flags, needs=("model",))
    if against is not None and prompts is None:
        raise UsageError("--against needs --prompts FILE, with rows of the kind that the model is for")
    if against is None:
        _refuse_unused(spec.output.expected, max_tokens, most_different)
    if spec.cluster.workers and not spec.cluster.ray:
        raise UsageError("--workers are machines to compare: it needs --ray")
    if spec.cluster.ray and against is not None:
        raise UsageError("--ray compares machines and --against forms of a model: give one of them")
    if spec.cluster.ray:
        return _check_machines(spec, has_input=prompts is not None, as_json=as_json)
    require_address_space()
    if against is not None:
        return _compare_forms(spec, against, max_tokens, most_different, as_json=as_json)
    from batchgen.check.report import run_check

    found = run_check(spec, has_input=prompts is not None, log=say, show=(lambda line: None) if as_json else show)
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


def _check_machines(spec: JobSpec, *, has_input: bool, as_json: bool) -> int:
    from batchgen.check.machines import Comparison, bits_here
    from batchgen.check.report import prompts_of
    from batchgen.executors.ray_cluster import Cluster, Needs
    from batchgen.run.loader import read_model

    prompts = prompts_of(spec, read_model(spec), has_input=True) if has_input else None
    cluster, found = Cluster(spec.cluster.ray), Comparison()
    try:
        needs = Needs.of(spec.cluster, spec.model.device, cluster.nodes)
        fit = [node for node in cluster.nodes if needs.most_on(node)][: spec.cluster.bounds and spec.cluster.bounds[1]]
        if not fit:
            raise UsageError(f"no machine of the cluster has {needs}")
        say(f"running the prompts on {counted(len(fit), 'machine')}")
        for name, bits in cluster.everywhere(bits_here, (spec, prompts), needs, fit):
            line = found.add(name, bits)
            if not as_json:
                show(line)
    finally:
        cluster.close()
    show(json.dumps({"ok": not found.failed, "machines": found.machines}, indent=2) if as_json else found.conclusion())
    if found.failed:
        raise GateFailed(found.failed[0])
    return ExitCode.OK


def _refuse_unused(expected: str | None, max_tokens: int | None, most_different: float | None) -> None:
    """Raises UsageError for flags of a comparison without one: a script would take its gate for passed."""
    given = {"--expected": expected, "--max-tokens": max_tokens, "--max-different-rows": most_different}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is for a comparison: it needs --against DTYPE")
