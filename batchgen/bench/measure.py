"""Runs a workload several times and compares its speed with the machine's own ceilings.

Machines drift, so the ceilings are measured again around each repeat, and medians are reported with their range.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from batchgen.bench.workload import EndAfter, error_message
from batchgen.config.job import ModelSpec
from batchgen.core.errors import BatchgenError, UsageError
from batchgen.core.machine import peak_bytes
from batchgen.core.model_files import TOKENIZER_FILES, resolve_model, tokenizer_folder
from batchgen.core.numerics import Numerics
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.generation import TextTools
from batchgen.engine.load import load_weights
from batchgen.engine.pooler import Pooler
from batchgen.engine.sampler import Sampler
from batchgen.engine.sizes import reported_sizes, use_threads
from batchgen.engine.stats import EngineStats
from batchgen.model.decoder import Decoder
from batchgen.model.rates import measure, weight_bytes
from batchgen.model.registry import is_dummy, load_config
from batchgen.model.roofline import Ceilings, Costs, Work, excess_reason
from batchgen.model.vector_files import read_vector_files
from batchgen.model.vectors import VectorHead, VectorSettings
from batchgen.text.tokenizer import Tokenizer

_NOTE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with the engine's settings; ``note`` shows progress. ``eos_token_ids``: by default the model config's."""

    model: Decoder
    config: EngineConfig
    eos_token_ids: frozenset[int] | None = None
    note: Callable[[str], None] = lambda text: None


def load_tokenizer(model_spec: ModelSpec) -> Tokenizer | None:
    """The tokenizer of the model, if it has one. Raises ModelError."""
    if is_dummy(model_spec.path):
        return None
    folder = tokenizer_folder(resolve_model(model_spec.path, model_spec.revision, TOKENIZER_FILES))
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def pooling_of(model_spec: ModelSpec) -> str:
    """The pooling that the model's checkpoint names, or "mean". Raises ModelError."""
    if is_dummy(model_spec.path):
        return "mean"
    return read_vector_files(resolve_model(model_spec.path, model_spec.revision, ("*.json",))).pooling or "mean"


def load(model_spec: ModelSpec, threads: int | None, *, has_head: bool = True) -> Decoder:
    """The loaded model; without a head it gives hidden states, from which vectors are made."""
    use_threads(threads, load_config(model_spec.path, model_spec.revision))
    return load_weights(model_spec, has_head=has_head)


def benchmark(bench: Bench, requests: list[Request], times: int) -> dict[str, Any]:
    """Run the workload ``times`` times after a short warm-up, each time with a new engine.

    Returns plain data: medians under the metrics' names, the metrics of each repeat under ``runs``.
    """
    model = bench.model
    short = SamplingParams(max_tokens=0 if requests[0].pooling else 2)
    few = [Request(r.key, r.prompt_token_ids[:16], short, pooling=r.pooling) for r in requests[:8]]
    _run(bench, few, "warming up")
    runs, stats, sizes = zip(*_repeats(bench, requests, times), strict=True)
    return {
        **model.numerics,
        "threads": torch.get_num_threads(),
        "backend": model.kernels.name,
        "num_requests_tokens": {"prompt": _num_prompt_tokens(requests), "output": stats[0].num_output_tokens},
        **{name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]},
        "engine": sizes[-1],
        "num_steps": stats[0].num_steps,
        "num_preemptions": stats[0].num_preemptions,
        "peak_memory_bytes": peak_bytes(),
        "runs": list(runs),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }


def _repeats(
    bench: Bench, requests: list[Request], times: int
) -> Iterator[tuple[dict[str, float], EngineStats, dict[str, Any]]]:
    """Metrics, counts and engine sizes of each repeat."""
    model = bench.model
    bench.note("measuring the rates of this machine")
    before = measure(model)
    for number in range(times):
        wall_s, stats, sizes = _run(bench, requests, f"run {number + 1} of {times}")
        after = measure(model)
        costs = Costs.of(model.config, model.dtype.itemsize, weight_bytes(model), sizes["kv_cache_dtype"])
        work = costs.work(stats.to_dict())
        yield _metrics(wall_s, requests, stats, work, before.mean(after)), stats, sizes
        before = after


def _metrics(
    wall_s: float, requests: list[Request], stats: EngineStats, work: Work, ceilings: Ceilings
) -> dict[str, float]:
    """Metrics, whose medians are reported; ``roofline_s`` is the shortest time that the ceilings allow."""
    roofline_s = work.floor_s(ceilings)
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": stats.num_output_tokens / wall_s,
        "total_tokens_per_s": (_num_prompt_tokens(requests) + stats.num_output_tokens) / wall_s,
        "requests_per_s": len(requests) / wall_s,
        "roofline_s": roofline_s,
        "roofline_share": roofline_s / wall_s,
        "roofline_flops_per_s": ceilings.flops_per_s,
        "memory_bytes_per_s": ceilings.memory_bytes_per_s,
    }


def _num_prompt_tokens(requests: list[Request]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)


def _run(bench: Bench, requests: list[Request], name: str) -> tuple[float, EngineStats, dict[str, Any]]:
    """Wall time, counts and sizes of a new engine, which is freed, so that the next one gets the same memory."""
    bench.note(name)
    model = bench.model
    sampler: Callable[..., Sampler] = Sampler
    if requests[0].pooling:
        head = VectorHead(VectorSettings(normalize=True), model.kernels, model.config.hidden_size, model.dtype)
        sampler = partial(Pooler, head)
    text, ends = TextTools(EndAfter), bench.eos_token_ids
    engine = Engine(model, bench.config, text=text, eos_token_ids=ends, sampler=sampler)
    start = noted_at = time.monotonic()
    num_results = 0
    for result in engine.run(requests):
        num_results += 1
        if (now := time.monotonic()) - noted_at > _NOTE_EVERY_S:
            noted_at, counts = now, engine.stats
            rate = (counts.num_prefill_tokens + counts.num_output_tokens) / (now - start)
            bench.note(f"{name}: {num_results:,} of {len(requests):,} requests, {rate:,.0f} tokens/s in and out")
        if result.error is not None:
            raise UsageError(f"request {result.key} of the workload: {error_message(result.error, requests)}")
    wall_s = time.monotonic() - start
    if num_results != len(requests):
        raise BatchgenError(f"{len(requests)} requests gave {num_results} results")
    return wall_s, engine.stats, reported_sizes(engine.config, model)


def render(result: dict[str, Any]) -> str:
    """The result of a benchmark, with its ``model`` and ``lengths``, as text for a person, within 80 columns."""
    integers = Numerics.of(result).integers
    name = " + ".join(result[key] for key in ("model", "adapter") if key in result)
    walls = [run["wall_s"] for run in result["runs"]]
    lengths = f"{result['lengths']} to the engine" if result["ends"] == "forced" else "up to the model's own end token"
    tokens, sizes = result["num_requests_tokens"], result["engine"]
    lines = [
        f"{name}  {result['dtype']} on {result['device']}, "
        f"{counted(result['threads'], 'thread')}, {result['backend']} kernels",
        *([f"  linears          {integers}"] if integers else []),
        f"  tokens           {tokens['prompt']:,} in, {tokens['output']:,} out, {result['num_steps']:,} steps",
        *([] if result["ends"] == "none" else [f"  output lengths   {lengths}"]),
        f"  wall time        {result['wall_s']:.2f} s  ({min(walls):.2f} to {max(walls):.2f} in {len(walls)} runs)",
        f"  texts/s          {result['requests_per_s']:.1f}"
        if result["ends"] == "none"
        else f"  output tokens/s  {result['output_tokens_per_s']:.1f}",
        f"  total tokens/s   {result['total_tokens_per_s']:.1f}",
        f"  roofline         {result['roofline_s']:.2f} s at {result['roofline_flops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{result['memory_bytes_per_s'] / 1e9:.0f} GB/s",
        f"  share of it      {result['roofline_share']:.1%}",
        *([f"    ({why})"] if (why := excess_reason(result["roofline_share"])) else []),
        f"  a step at most   {sizes['max_num_batched_tokens']:,} tokens, {sizes['max_num_seqs']:,} sequences",
        f"  KV memory        {sizes['kv_bytes'] / 2**20:,.0f} MiB in blocks of {sizes['block_size']} tokens"
        + ("" if sizes["kv_cache_dtype"] == "auto" else f", {sizes['kv_cache_dtype']}"),
        f"  peak memory      {result['peak_memory_bytes'] / 2**20:,.0f} MiB"
        + (f", {sizes['max_device_bytes'] / 2**20:,.0f} MiB of the GPU" if "max_device_bytes" in sizes else ""),
    ]
    return "\n".join(lines)
