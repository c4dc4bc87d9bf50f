"""The ``bench`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.bench.workload import NAMED, LengthRange, Shape, as_texts, from_file, hide_lengths
from batchgen.cli.console import say, show
from batchgen.cli.options import COUNT, GroupedCommand, Parsed, job_options, json_option, local_path, take_job_flags
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.machine import require_address_space
from batchgen.core.records import POOLINGS, Request, SamplingParams

if TYPE_CHECKING:
    from batchgen.text.tokenizer import Tokenizer

_WORKLOADS = (
    "give --workload nano-vllm, or --workload FILE, whose rows --limit and --max-tokens are for, or --num-requests "
    "with --input-len and --output-len"
)
_LENGTHS_HELP = "Whether the engine knows how long each answer will be [unknown]."


@click.command(cls=GroupedCommand)
@click.option(
    "--workload",
    type=Parsed("FILE", lambda text: text if text in NAMED else str(local_path(text))),
    help="JSON Lines of prompts, or the name nano-vllm.",
)
@click.option("--limit", type=COUNT, help="Take the first N rows of the workload.")
@click.option("--num-requests", type=COUNT, help="A synthetic workload of N requests.")
@click.option("--input-len", metavar="A[:B]", help="Prompt length, or a range.")
@click.option("--output-len", metavar="C[:D]", help="Output length, or a range.")
@click.option(
    "--texts",
    "pooling",
    is_flag=False,
    flag_value="auto",
    type=click.Choice(["auto", *POOLINGS]),
    metavar="[POOLING]",
    help="Embeddings of the prompts, no answers [as the checkpoint pools, or mean].",
)
@click.option("--max-tokens", type=COUNT, metavar="N", help="Maximum number of tokens of an answer in FILE [256].")
@click.option("--ignore-eos", is_flag=True, help="Generate all max_tokens, as synthetic requests do.")
@click.option("--lengths", type=click.Choice(["unknown", "known"]), default="unknown", help=_LENGTHS_HELP)
@click.option("--repeats", type=COUNT, default=3, metavar="R", help="Runs of the workload [3].")
@job_options("model", "engine", without=("tokenizer",))
@json_option()
def bench(as_json: bool, repeats: int, lengths: str, pooling: str | None, **values: Any) -> int:
    """Measure throughput, next to this machine's roofline.

    The roofline is the least time that the processor and memory of this machine allow. It is measured in the same
    process, with the model's own matrix products. Figures are medians over the repeats.

    The workload is a file, or made up from a number of requests and their lengths. A row of a file has a prompt,
    messages or prompt_token_ids, and perhaps max_tokens. The model's own EOS token ends an answer, or with --ignore-eos
    its max_tokens. As in a real job the engine does not know how long an answer will be, unless --lengths known
    says so. nano-vllm names the workload of that engine's own benchmark: 256 requests of 100 to 1024 tokens in and out.
    With --texts nothing is generated: each prompt becomes an embedding.

    \b
    Examples:
      batchgen bench --model dummy:LFM2-350M --num-requests 256 \\
          --input-len 100:1024 --output-len 100:1024
      batchgen bench --model LiquidAI/LFM2-350M --workload chats.jsonl
      batchgen bench --model dummy:LFM2-350M --workload work.jsonl \\
          --ignore-eos --repeats 3 --json
    """
    from batchgen.config.load import load_job

    spec = load_job(None, take_job_flags(values), needs=("model",))
    require_address_space()
    from batchgen.bench import measure
    from batchgen.model.registry import load_config

    model_spec = spec.model
    tokenizer = None if values["workload"] in (None, *NAMED) else measure.load_tokenizer(model_spec)
    config = load_config(model_spec.path, model_spec.revision)
    if not (config.has_head or pooling):
        raise UsageError(f"{model_spec.path} gives embeddings, not text: add --texts")
    if pooling and values["num_requests"] is not None:
        values["output_len"] = values["output_len"] or "1"
    requests = _requests(values, config.vocab_size, tokenizer)
    if pooling:
        requests = as_texts(requests, measure.pooling_of(model_spec) if pooling == "auto" else pooling)
    _note("loading the model")
    model = measure.load(model_spec, spec.engine.threads, has_head=not pooling)
    is_forced = all(request.params.ignore_eos for request in requests)
    if lengths == "unknown" and is_forced:
        requests = hide_lengths(requests)
    ends = frozenset(model.config.eos_token_ids + (tokenizer.eos_token_ids if tokenizer else ()))
    result = measure.benchmark(measure.Bench(model, spec.engine, ends, _note), requests, repeats)
    ends_by = "none" if pooling else "forced" if is_forced else "model"
    result = {**model_spec.named, "lengths": lengths, "ends": ends_by, **result}
    show(json.dumps(result, indent=2) if as_json else measure.render(result))
    return ExitCode.OK


def _note(text: str) -> None:
    say(f"{text} ...")


def _requests(values: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None) -> list[Request]:
    workload, limit = values["workload"], values["limit"]
    lengths = [values[name] for name in ("num_requests", "input_len", "output_len")]
    without = lengths if workload is not None else [limit]
    without += [values["max_tokens"]] if workload in (None, *NAMED) else []
    if any(value is not None for value in without) or (workload is None and None in lengths):
        raise UsageError(_WORKLOADS)
    if workload in NAMED:
        return NAMED[workload](vocab_size)[:limit]
    if workload is not None:
        default = SamplingParams(max_tokens=values["max_tokens"] or 256, ignore_eos=values["ignore_eos"])
        return from_file(Path(workload), default, limit=limit, tokenizer=tokenizer)
    inputs = LengthRange.parse(values["input_len"], "--input-len")
    outputs = LengthRange.parse(values["output_len"], "--output-len")
    return Shape(values["num_requests"], inputs, outputs).requests(vocab_size)
