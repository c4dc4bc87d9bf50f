"""The ``env`` command."""

from __future__ import annotations

import json
import os

import click

from batchgen.cli.options import json_option
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode
from batchgen.core.units import labelled

# Of the variables that change what a run does, those that hold no secret.
_VARIABLES = ("BATCHGEN_DEBUG", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "RAY_AUTH_MODE")


@click.command()
@json_option()
def env(as_json: bool) -> int:
    """Show versions and machine, for the report of a bug.

    \b
    Example:
      batchgen env --json
    """
    from batchgen.core.machine import available_bytes, require_address_space, total_bytes, visible_gpus
    from batchgen.report.build import machine_facts

    require_address_space()
    from batchgen.core.machine import num_usable_cpus
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
