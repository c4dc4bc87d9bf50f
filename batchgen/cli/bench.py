"""The ``bench`` command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from batchgen.bench.workload import PRESETS, LengthRange, Shape, from_file, hide_lengths
from batchgen.cli.options import PATH, GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.machine import require_address_space

if TYPE_CHECKING:
    from batchgen.core.records import Request

_LENGTHS_HELP = "Whether the engine knows how long each answer will be [unknown]."


@click.command(cls=GroupedCommand)
@click.option("--workload", type=PATH, help="JSONL with prompt_token_ids, max_tokens.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Take the first N rows of the workload.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A synthetic workload.")
@click.option("--num-requests", type=click.IntRange(1), metavar="N", help="A synthetic workload of N requests.")
@click.option("--input-len", metavar="A[:B]", help="Prompt length, or a range.")
@click.option("--output-len", metavar="C[:D]", help="Output length, or a range.")
@click.option("--ignore-eos", is_flag=True, help="With --workload: generate all max_tokens.")
@click.option("--lengths", type=click.Choice(["unknown", "known"]), default="unknown", help=_LENGTHS_HELP)
@click.option("--repeats", type=click.IntRange(1), default=3, metavar="R", help="Runs of the workload [3].")
@job_options("model", "engine", without=("tokenizer",))
@json_option()
def bench(as_json: bool, repeats: int, lengths: str, **values: Any) -> int:
    """Measure throughput, beside this machine's roofline.

    The roofline is measured in the same process: the sustained rate of the model's own linears, and memory
    bandwidth. Beside it stands the CPU's peak, in loops that only multiply or only read. Prints medians over the
    repeats, with their range. On the CPU one more run comes first, which times each kernel.

    A real job does not know the lengths of its answers. So all rows get the largest max_tokens, and a stop that the
    engine does not know ends each at its own length; --lengths known gives each row its own max_tokens. With unknown
    lengths the longest prompt plus the largest max_tokens must fit in --kv-memory. Drafts are off unless --speculate
    auto is given: a model of random weights repeats itself as no other does.

    \b
    Examples:
      batchgen bench --model dummy:LFM2-350M --num-requests 256 \\
          --input-len 100:1024 --output-len 100:1024
      batchgen bench --model dummy:LFM2-350M --workload work.jsonl \\
          --ignore-eos --repeats 3 --json
    """
    from batchgen.config.load import load_job

    flags = take_job_flags(values)
    flags.setdefault("engine", {}).setdefault("speculate", "off")
    spec = load_job(None, flags, needs=("model",))
    require_address_space()
    from batchgen.bench import measure

    config, where = spec.engine, spec.model
    model = measure.load(where, config.threads)
    requests = _requests(values, model.config.vocab_size)
    if lengths == "unknown":
        requests = hide_lengths(requests)
    found = {**where.named, "lengths": lengths, **measure.benchmark(model, config, requests, repeats)}
    show(json.dumps(found, indent=2) if as_json else measure.render(found))
    return ExitCode.OK


def _requests(values: dict[str, Any], vocab_size: int) -> list[Request]:
    lengths = [values[name] for name in ("num_requests", "input_len", "output_len")]
    sources = [values["workload"] is not None, values["preset"] is not None, any(v is not None for v in lengths)]
    if sum(sources) != 1 or (sources[2] and None in lengths):
        raise UsageError("give --workload FILE, or --preset NAME, or --num-requests with --input-len and --output-len")
    if values["workload"] is not None:
        return from_file(values["workload"], ignore_eos=values["ignore_eos"], limit=values["limit"])
    if values["preset"] is not None:
        return PRESETS[values["preset"]].requests(vocab_size)
    inputs = LengthRange.parse(values["input_len"], "--input-len")
    outputs = LengthRange.parse(values["output_len"], "--output-len")
    return Shape(values["num_requests"], inputs, outputs).requests(vocab_size)
