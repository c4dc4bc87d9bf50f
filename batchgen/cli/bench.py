"""The ``bench`` command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from batchgen.bench.workload import LengthRange, Shape, from_file, hide_lengths
from batchgen.cli.options import COUNT, PATH, GroupedCommand, job_options, json_option, take_job_flags
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.machine import require_address_space

if TYPE_CHECKING:
    from batchgen.core.records import Request

_LENGTHS_HELP = "Whether the engine knows how long each answer will be [unknown]."


@click.command(cls=GroupedCommand)
@click.option("--workload", type=PATH, help="JSON Lines with prompt_token_ids, max_tokens.")
@click.option("--limit", type=COUNT, help="Take the first N rows of the workload.")
@click.option("--num-requests", type=COUNT, help="A made-up workload of N requests.")
@click.option("--input-len", metavar="A[:B]", help="Prompt length, or a range.")
@click.option("--output-len", metavar="C[:D]", help="Output length, or a range.")
@click.option("--ignore-eos", is_flag=True, help="Generate all max_tokens, as made-up requests do.")
@click.option("--lengths", type=click.Choice(["unknown", "known"]), default="unknown", help=_LENGTHS_HELP)
@click.option("--repeats", type=COUNT, default=3, metavar="R", help="Runs of the workload [3].")
@job_options("model", "engine", without=("tokenizer",))
@json_option()
def bench(as_json: bool, repeats: int, lengths: str, **values: Any) -> int:
    """Measure throughput, beside this machine's roofline.

    The roofline is the least time that the processor and memory of this machine allow. It is measured in the same
    process, with the model's own matrix products. Figures are medians over the repeats. On a CPU one more run comes
    first, which times each kernel.

    The workload is a file, or made up from a number of requests and their lengths. As in a real job the engine does
    not know how long an answer will be, unless --lengths known tells it.

    \b
    Examples:
      batchgen bench --model dummy:LFM2-350M --num-requests 256 \\
          --input-len 100:1024 --output-len 100:1024
      batchgen bench --model dummy:LFM2-350M --workload work.jsonl \\
          --ignore-eos --repeats 3 --json
    """
    from batchgen.config.load import load_job

    spec = load_job(None, take_job_flags(values), needs=("model",))
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
    workload, limit = values["workload"], values["limit"]
    lengths = [values[name] for name in ("num_requests", "input_len", "output_len")]
    if workload is not None:
        if any(value is not None for value in lengths):
            raise UsageError("--workload FILE is the whole workload: leave out --num-requests and the lengths")
        return from_file(workload, ignore_eos=values["ignore_eos"], limit=limit)
    if None in lengths:
        raise UsageError("give --workload FILE, or --num-requests with --input-len and --output-len")
    if limit is not None:
        raise UsageError("--limit is for rows of a file: it needs --workload FILE")
    inputs = LengthRange.parse(values["input_len"], "--input-len")
    outputs = LengthRange.parse(values["output_len"], "--output-len")
    return Shape(values["num_requests"], inputs, outputs).requests(vocab_size)
