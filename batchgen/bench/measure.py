"""Runs a workload several times and puts each figure beside the machine's own ceilings, measured in between.

Machines drift, so the ceilings are taken anew around every repeat, and medians are printed with their spread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from batchgen.bench.timed import TimedKernels
from batchgen.bench.workload import EndAfter, explained
from batchgen.config.job import ModelSpec
from batchgen.core.errors import BatchgenError, UsageError
from batchgen.core.memory import peak_bytes
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.facts import engine_sizes, model_key
from batchgen.engine.load import use_threads
from batchgen.kernels.select import select
from batchgen.model import load_config
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model, resolve_device, resolve_dtype
from batchgen.model.rates import measure
from batchgen.model.roofline import Ceilings, Costs, Work, remember


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of the workload: seconds, what it computed, and the ceilings around it."""

    wall_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    work: Work
    ceilings: Ceilings
    split_s: dict[str, float]
    sizes: dict[str, Any]

    @property
    def roofline_s(self) -> float:
        """The shortest time these ceilings allow."""
        return self.work.floor_s(self.ceilings)

    def figures(self) -> dict[str, float]:
        """The numbers whose medians are printed."""
        tokens = self.num_prompt_tokens + self.num_output_tokens
        return {
            "wall_s": self.wall_s,
            "output_tokens_per_s": self.num_output_tokens / self.wall_s,
            "total_tokens_per_s": tokens / self.wall_s,
            "roofline_s": self.roofline_s,
            "roofline_share": self.roofline_s / self.wall_s,
            "roofline_flops_per_s": self.ceilings.flops_per_s,
            "memory_bytes_per_s": self.ceilings.memory_bytes_per_s,
        }


def load_timed(where: ModelSpec, threads: int | None) -> tuple[Decoder, TimedKernels | None]:
    """A model whose kernels keep time where that means something (on the CPU; elsewhere None)."""
    config, device = load_config(where.path, where.revision), resolve_device(where.device)
    use_threads(threads, config)
    timed = TimedKernels(select(device, resolve_dtype(where.dtype, config, device)))
    kept = timed if device.type == "cpu" else None
    model = load_model(
        where.path,
        where.revision,
        dtype=where.dtype,
        device=where.device,
        batch_invariant=where.batch_invariant,
        kernels=kept,
    )
    return model, kept


def repeats(
    model: Decoder, timed: TimedKernels | None, config: EngineConfig, requests: list[Request], times: int
) -> Iterator[Repeat]:
    """Run the workload ``times`` times after a short warm-up, each with a fresh engine.

    Where kernels are timed one by one, which slows them down, that is done in one more run before.
    """
    warm_up = [Request(r.key, r.prompt_token_ids[:16], SamplingParams(max_tokens=2)) for r in requests[:8]]
    _run(model, config, warm_up)
    split_s = _timed_run(model, timed, config, requests) if timed is not None else {}
    before = measure(model)
    for _ in range(times):
        wall_s, engine = _run(model, config, requests)
        after = measure(model)
        stats = engine.stats
        yield Repeat(
            wall_s=wall_s,
            num_prompt_tokens=sum(len(r.prompt_token_ids) for r in requests),
            num_output_tokens=stats.num_output_tokens,
            num_steps=stats.num_steps,
            num_preemptions=stats.num_preemptions,
            work=Costs.of(model.config, model.dtype.itemsize).work(stats.to_dict()),
            ceilings=before.mean(after),
            split_s=split_s or dict(stats.phase_s),
            sizes=engine_sizes(engine),
        )
        before = after
        remember(model_key(model), after.measured_by("measured by batchgen bench"))


def _run(model: Decoder, config: EngineConfig, requests: list[Request]) -> tuple[float, Engine]:
    engine = Engine(model, config, stop_watch=EndAfter)
    start = time.monotonic()
    num_results = 0
    for result in engine.run(requests):
        num_results += 1
        if result.error is not None:
            raise UsageError(f"request {result.key} of the workload: {explained(result.error, requests)}")
    wall_s = time.monotonic() - start
    if num_results != len(requests):
        raise BatchgenError(f"{len(requests)} requests gave {num_results} results")
    return wall_s, engine


def _timed_run(model: Decoder, timed: TimedKernels, config: EngineConfig, requests: list[Request]) -> dict[str, float]:
    """Seconds by kind of work; "host" is what no kernel took."""
    timed.seconds.clear()
    timed.is_timing = True
    try:
        wall_s, _ = _run(model, config, requests)
    finally:
        timed.is_timing = False
    split_s = dict(timed.seconds)
    return split_s | {"host": wall_s - sum(split_s.values())}


def summarize(model_name: str, model: Decoder, runs: list[Repeat], lengths: str) -> dict[str, Any]:
    """One JSON-able object: medians under the plain names, every repeat's figures under ``runs``.

    ``lengths`` says whether the engine was told those of the answers: "known" or "unknown".
    """
    figures = [run.figures() for run in runs]
    median = {name: statistics.median(f[name] for f in figures) for name in figures[0]}
    return {
        "model": model_name,
        **model.numerics,
        "threads": torch.get_num_threads(),
        "backend": model.kernels.name,
        "num_requests_tokens": {"prompt": runs[0].num_prompt_tokens, "output": runs[0].num_output_tokens},
        "lengths": lengths,
        **median,
        "engine": runs[-1].sizes,
        "num_steps": runs[0].num_steps,
        "num_preemptions": runs[0].num_preemptions,
        "split_s": {k: statistics.median(r.split_s.get(k, 0.0) for r in runs) for k in runs[0].split_s},
        "peak_memory_bytes": peak_bytes(),
        "runs": figures,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }


def render(summary: dict[str, Any]) -> str:
    """The summary as text for a person, within 80 columns."""
    walls = [run["wall_s"] for run in summary["runs"]]
    tokens, sizes = summary["num_requests_tokens"], summary["engine"]
    lines = [
        f"{summary['model']}  {summary['dtype']} on {summary['device']}, "
        f"{counted(summary['threads'], 'thread')}, {summary['backend']} kernels",
        f"  tokens           {tokens['prompt']:,} in, {tokens['output']:,} out, {summary['num_steps']:,} steps",
        f"  output lengths   {summary['lengths']} to the engine",
        f"  wall time        {summary['wall_s']:.2f} s  ({min(walls):.2f} to {max(walls):.2f} in {len(walls)} runs)",
        f"  output tokens/s  {summary['output_tokens_per_s']:.1f}",
        f"  total tokens/s   {summary['total_tokens_per_s']:.1f}",
        f"  roofline         {summary['roofline_s']:.2f} s at {summary['roofline_flops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{summary['memory_bytes_per_s'] / 1e9:.0f} GB/s",
        f"  share of it      {summary['roofline_share']:.1%}",
        f"  a step at most   {sizes['max_num_batched_tokens']:,} tokens, {sizes['max_num_seqs']:,} sequences",
        f"  KV memory        {sizes['kv_bytes'] / 2**20:,.0f} MiB in blocks of {sizes['block_size']} tokens",
        f"  peak memory      {summary['peak_memory_bytes'] / 2**20:,.0f} MiB",
        "  time by work" + (", in a run that timed each kernel" if "host" in summary["split_s"] else ""),
    ]
    total_s = sum(summary["split_s"].values())
    for kind, seconds in sorted(summary["split_s"].items(), key=lambda item: -item[1]):
        lines.append(f"    {kind:<15}{seconds:8.2f} s  {seconds / total_s:6.1%}")
    return "\n".join(lines)
