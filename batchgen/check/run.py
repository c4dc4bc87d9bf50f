"""One check: reads the rows, loads the model, compares its runs and reports them, for a person and for a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.numerics import Numerics
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine
from batchgen.engine.invariants import Comparison, Divergence, Prompt, Routing, Runs, Trace, made_up_prompts, texts_for
from batchgen.engine.load import load_weights
from batchgen.engine.sizes import cache_dtype, use_threads
from batchgen.input.rows import prepared
from batchgen.input.source import open_source
from batchgen.kernels.plain import PlainKernels
from batchgen.run.loader import ModelInfo, read_model
from batchgen.run.opened import OpenJob
from batchgen.run.stdin import stdin_as_file

# Largest gap between fast kernels and plain torch as a share of a row's largest logit. Both round every activation to
# the dtype, in another order, and the differences add up over the layers: 5 % in bfloat16 over the 16 of the 350M.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-3, torch.float16: 2**-6}
# Added to it where keys, values or inputs are rounded once more, and a last bit decides how: most rows are as near as
# before, and a few are 5 % apart in float32.
KV_TOLERANCE = {"auto": 0.0, "bfloat16": 2**-6, "int8": 2**-6}
ACTIVATIONS_TOLERANCE = {"auto": 0.0, "int8": 2**-3}
LENGTHS = (1, 5, 40, 100, 520)  # of made-up prompts: below a KV block, above one, above a CPU's step
PREFIX, SUFFIXES = 80, (0, 10, 25)  # lengths of those with a common prefix
_MAX_TOKENS = 16  # generated per request
GREEDY = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
_DRAWN = replace(GREEDY, temperature=1.0, top_k=50, top_p=0.95, seed=1)
_PENALIZED = replace(_DRAWN, repetition_penalty=1.05, presence_penalty=0.2)
_TESTED = "self-test of the kernels: holds"
_NOTES: dict[str, Callable[[Engine], str]] = {
    "batched = solo": lambda engine: f"up to {engine.stats.max_running} at once",
    "chunked = whole": lambda engine: counted(engine.stats.num_steps, "step"),
    "cached = cold": lambda engine: f"{counted(engine.stats.num_cached_tokens, 'token')} cached",
    "preempted = undisturbed": lambda engine: counted(engine.stats.num_preemptions, "preemption"),
}

Write = Callable[[str], None]


def run_check(spec: JobSpec, *, has_input: bool, log: Write, show: Write) -> dict[str, Any]:
    """Run every proof on the model of ``spec``, on prompts of its input if it ``has_input``; the result as plain data.

    ``log`` takes messages about progress, ``show`` the lines of the result. In the result, ``kernels`` names the
    variant of the ``backend``, ``digest`` covers all logits of the prompts run one by one, and ``failed`` lists where
    proofs fail. Raises UsageError if model or input cannot be used, GateFailed if a request ends with an error.
    """
    info = read_model(spec)
    prompts = made_up_prompts(info.config.vocab_size, room(info.max_model_len), LENGTHS, PREFIX, SUFFIXES)
    if has_input:
        prompts = read_prompts(spec, info, GREEDY if info.config.has_head else SamplingParams())
    threads = use_threads(spec.engine.threads, info.config)
    title = " + ".join(spec.model.named.values())
    log(f"loading {title}")
    model = load_weights(spec.model, kv_cache_dtype=spec.engine.kv_cache_dtype)
    requests = requests_for(prompts) if info.config.has_head else texts_for(prompts)
    runs = Runs(model, requests, cache_dtype(spec.engine.kv_cache_dtype, model))
    facts: dict[str, Any] = {
        **spec.model.named,
        **model.numerics,
        "backend": model.kernels.name,
        **({} if runs.kv_cache_dtype == "auto" else {"kv_cache_dtype": runs.kv_cache_dtype}),
        "threads": threads,
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
        "notes": [*model.kernels.notes],
    }
    named = str(Numerics.of(facts).base)
    show(f"{title}: {named}, {counted(threads, 'thread')}")
    num_tokens = counted(facts["num_prompt_tokens"], "token")
    modes = "alternately greedy and sampled" if info.config.has_head else "their hidden states compared"
    show(f"{counted(len(prompts), 'prompt')} of {num_tokens}, {modes}")
    if notes := "\n".join(facts["notes"]) or (_TESTED if model.kernels.name != "plain" else ""):
        show(notes)
    log(f"running {counted(len(requests), 'request')} one by one")
    solo, proofs = runs.solo(requests), []
    del model  # memory may not hold it and the one in plain torch
    for proof in _proofs(spec, runs, solo, log):
        show(render(proof, requests))
        proofs.append(proof)
    failed = [f"{p.name}: {_location(p.divergence, requests)}" for p in proofs if p.divergence is not None]
    show(f"{len(failed)} of {counted(len(proofs), 'proof')} failed" if failed else f"all {len(proofs)} proofs hold")
    verdict = {"ok": not failed, "failed": failed, "digest": solo.digest}
    return facts | verdict | {"proofs": [asdict(proof) for proof in proofs]}


def _proofs(spec: JobSpec, runs: Runs, solo: Trace, log: Write) -> Iterator[Comparison]:
    """Comparisons of other runs with ``solo``; for the last one, ``runs.model`` is loaded again in plain torch."""
    for name, note in _NOTES.items() if runs.model.config.has_head else [*_NOTES.items()][:1]:
        log(f"proving {name}")
        trace, engine = runs.together(name)
        yield Comparison(solo, trace, name, note=note(engine))
        del engine
    routing, name = Routing(), "decoded = prefilled"
    if runs.model.config.has_head:
        log(f"proving {name}")
    if runs.model.config.has_head or runs.model.config.feed_forward == "experts":
        trace = runs.prefilled(solo.tokens, routing)
    if runs.model.config.has_head:
        yield Comparison(solo, trace, name)
    name, model, dtype = "kernels ~ plain torch", spec.model, runs.model.dtype
    if isinstance(runs.model.kernels, PlainKernels):
        return
    log(f"proving {name}")
    plain = PlainKernels(runs.model.device, dtype, weights=model.weights, activations=model.activations)
    del runs.model
    runs.model = load_weights(model, plain)
    tolerance = TOLERANCE[dtype] + KV_TOLERANCE[runs.kv_cache_dtype] + ACTIVATIONS_TOLERANCE[model.activations]
    yield Comparison(solo, runs.prefilled(solo.tokens, routing), name, tolerance)


def room(max_model_len: int) -> int:
    """Most tokens of a made-up prompt."""
    return max(max_model_len - _MAX_TOKENS, max_model_len // 2)


def read_prompts(spec: JobSpec, info: ModelInfo, params: SamplingParams) -> list[Prompt]:
    """The prompts of a job's input, tokenized as in a run.

    Raises UsageError if the input is unreadable, lacks a named column, has no rows, or has a row that could not run.
    """
    with stdin_as_file(spec.input) as readable:
        spec = replace(spec, sampling=params, max_tokens_unset=False)
        job = OpenJob(info.resolved(spec), info, open_source(readable))
        job.check_columns()
        prompts = []
        for row, request in prepared(job.source.read(), job.builder.build):
            if row.error is not None:
                raise UsageError(f"{row.source}:{row.line}: {row.error.code}: {row.error.message}")
            prompts += [request.prompt_token_ids] if request else []
    if not prompts:
        raise UsageError(f"--input {spec.input.path[0]}: holds no rows")
    return prompts


def requests_for(prompts: list[Prompt]) -> list[Request]:
    """A request per prompt: every other one greedy, the others sampled, with penalties or without."""
    params = (GREEDY, _PENALIZED, GREEDY, _DRAWN)
    return [Request(key, prompt, params[key % 4]) for key, prompt in enumerate(prompts)]


def render(proof: Comparison, requests: list[Request]) -> str:
    """One line if the proof holds, three if it does not."""
    head = f"{proof.name:<24} {counted(proof.num_tokens, 'token'):>12}  "
    share, tolerance = f"{100 * proof.largest_share:.2g}%", f"{100 * proof.tolerance:.2g}%"
    if proof.divergence is not None:
        gap = f"largest gap {proof.largest_gap:.2g}, {share} of the logits"
        allowed = f", {tolerance} allowed" if proof.tolerance else ""
        return f"{head}DIVERGES\n  {_location(proof.divergence, requests)}\n  {gap}{allowed}"
    verdict = f"gap {share} of {tolerance}" if proof.tolerance else "equal to the bit"
    flipped = f"{counted(proof.num_flipped, 'near tie')} flipped" if proof.num_flipped else ""
    return ", ".join(filter(None, (f"{head}{verdict}", proof.note or flipped)))


def _location(at: Divergence, requests: list[Request]) -> str:
    request = requests[at.key]
    num_tokens, mode = len(request.prompt_token_ids), "greedy" if request.params.is_greedy else "sampled"
    prompt = f"prompt {at.key} ({counted(num_tokens, 'token')}, {mode})"
    if request.pooling:
        return f"{prompt}, state {at.position - 1}: gap {at.gap:.2g}"
    became = "stays" if at.got == at.expected else f"becomes {'none' if at.got is None else at.got}"
    return f"{prompt}, output {at.position - num_tokens}: {at.expected} {became}, gap {at.gap:.2g}"
