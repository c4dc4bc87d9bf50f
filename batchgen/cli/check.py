"""The commands about this machine: ``check`` and ``env``."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from batchgen.cli.console import say, show
from batchgen.cli.options import GroupedCommand, job_options, json_option, take_job_flags
from batchgen.config.job import KEYS
from batchgen.core.errors import ExitCode, GateFailed
from batchgen.core.machine import available_bytes, num_usable_cpus, require_address_space, total_bytes, visible_gpus
from batchgen.core.units import counted, labelled

_SIZES = tuple(name for name in KEYS["engine"] if name not in ("threads", "kv_cache_dtype"))  # the proofs choose these
_MAX_PROMPTS = 16  # of a file without --limit
# Environment variables that change what a run does and do not hold secrets.
_VARIABLES = ("BATCHGEN_DEBUG", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "RAY_AUTH_MODE")


@click.command(cls=GroupedCommand)
@click.option("--input", "path", metavar="FILE", help="Rows with prompts; - for stdin [synthetic ones].")
@json_option()
@job_options("model", "engine", without=_SIZES)
@job_options("input", without=("path", "format", "id", "columns"))
def check(path: str | None, as_json: bool, **values: Any) -> int:
    """Test on this machine that batching and caching change no result.

    Prompts run one by one, alternately greedy and sampled. Then they run again, and every logit must be the same to the
    bit: all together (batched = solo), in small parts (chunked = whole), from cached prefixes (cached = cold), thrown
    out and run again (preempted = undisturbed), and with their answers as one text (decoded = prefilled). Last, the
    fast kernels are compared with plain torch, and a small gap is allowed. If a test fails, exits 4 and says where it
    fails first. The kernels' self-test comes first, as in a run: if it fails, plain torch is checked. Two machines
    compute the same bits if the digest of all logits in --json is the same. --limit sets how many rows of a file are
    used [16].

    \b
    Examples:
      batchgen check --model LiquidAI/LFM2-350M
      batchgen check --model my/model --input rows.jsonl --prompt '{question}'
      srun -N 8 batchgen check --model my/model --json | jq -c .digest | uniq -c
    """
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    if path is not None:
        flags["input"] = {"limit": _MAX_PROMPTS, **flags.get("input", {}), "path": [path]}
    spec = load_job(None, flags, needs=("model",))
    require_address_space()
    from batchgen.check.run import run_check

    result = run_check(spec, has_input=path is not None, log=say, show=(lambda line: None) if as_json else show)
    if as_json:
        show(json.dumps(result, indent=2))
    if not result["ok"]:
        first, more = result["failed"][0], len(result["failed"]) - 1
        raise GateFailed(first + (f" (and {counted(more, 'more proof')})" if more else ""))
    return ExitCode.OK


@click.command()
@json_option()
def env(as_json: bool) -> int:
    """Show versions and machine, for the report of a bug.

    \b
    Example:
      batchgen env --json
    """
    from batchgen.report.build import machine_facts

    require_address_space()
    from batchgen.kernels.processor import cpu_obstacle, processor_variant

    facts = machine_facts()
    content = {
        **facts["machine"],
        "kernels": cpu_obstacle() or processor_variant(),
        "cpus": num_usable_cpus(),
        "memory_bytes": total_bytes(),
        "available_bytes": available_bytes(),
        "gpus": len(visible_gpus("auto")),
        "versions": facts["versions"],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if as_json:
        show(json.dumps(content, indent=2))
        return ExitCode.OK
    sizes = f"{content['available_bytes'] / 2**30:.1f} GiB free of {content['memory_bytes'] / 2**30:.1f}"
    lines = [(name, str(content[name])) for name in ("platform", "processor", "python", "kernels", "cpus")]
    lines += [("memory", sizes), ("gpus", str(content["gpus"]))]
    lines += [(name, value) for part in ("versions", "variables") for name, value in content[part].items()]
    show("\n".join(labelled(lines)))
    return ExitCode.OK
