"""One check: reads the rows, loads the model, runs the proofs and reports them, for a person and for a script."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchgen.check.logits import Divergence
from batchgen.check.proofs import GREEDY, Check, Proof, Write, made_up_prompts, read_prompts
from batchgen.config.job import JobSpec
from batchgen.core.numerics import Numerics
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine.sizes import use_threads
from batchgen.run.loader import read_model

_PROVEN = "each operation of the kernels gives what plain torch gives, but for rounding"


def run_check(spec: JobSpec, *, has_input: bool, log: Write, show: Write) -> dict[str, Any]:
    """Run every proof on the model of ``spec``, with the prompts of its input if it ``has_input``.

    ``log`` takes messages about progress, ``show`` the lines of the result as they come. Returns the result as plain
    data: ``backend`` names the kernels, ``kernels`` their variant, ``digest`` all logits of the prompts run one by one,
    ``failed`` says where a proof fails, ``plain_operations`` which operations plain torch computes, and why.

    Raises:
        UsageError: model or input cannot be used.
        GateFailed: a request ends with an error.
    """
    info = read_model(spec)
    prompts = made_up_prompts(info.config.vocab_size, info.max_model_len)
    if has_input:
        params = GREEDY if info.config.has_head else SamplingParams()
        prompts = read_prompts(spec, info, params)
    threads = use_threads(spec.engine.threads, info.config)
    title = " + ".join(spec.model.named.values())
    log(f"loading {title}")
    check = Check(spec.model, prompts, spec.engine.kv_cache_dtype)
    facts: dict[str, Any] = {
        **spec.model.named,
        **check.model.numerics,
        "backend": check.model.kernels.name,
        **({} if check.kv_cache_dtype == "auto" else {"kv_cache_dtype": check.kv_cache_dtype}),
        "threads": threads,
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
    }
    named = str(Numerics.of(facts).base)
    show(f"{title}: {named}, {counted(threads, 'thread')}")
    num_tokens = counted(facts["num_prompt_tokens"], "token")
    kinds = "greedy and sampled by turns" if info.config.has_head else "their hidden states compared"
    show(f"{counted(len(prompts), 'prompt')} of {num_tokens}, {kinds}")
    if check.model.kernels.name != "plain":
        show("\n".join(check.model.kernels.notes) or _PROVEN)
    proofs = []
    facts["plain_operations"] = dict(check.model.kernels.faults)
    for proof in check.proofs(log):
        show(render(proof, check.requests))
        proofs.append(proof)
    failed = [f"{p.name}: {_place(p.divergence, check.requests)}" for p in proofs if p.divergence is not None]
    show(f"{len(failed)} of {counted(len(proofs), 'proof')} failed" if failed else f"all {len(proofs)} proofs hold")
    verdict = {"ok": not failed, "failed": failed, "digest": check.solo.digest}
    return facts | verdict | {"proofs": [asdict(proof) for proof in proofs]}


def render(proof: Proof, requests: list[Request]) -> str:
    """One line if the proof holds, three if it does not."""
    head = f"{proof.name:<24} {counted(proof.num_tokens, 'token'):>12}  "
    share, tolerance = f"{100 * proof.largest_share:.2g}%", f"{100 * proof.tolerance:.2g}%"
    if proof.divergence is not None:
        gap = f"largest gap {proof.largest_gap:.2g}, {share} of the logits"
        allowed = f", {tolerance} allowed" if proof.tolerance else ""
        return f"{head}DIVERGES\n  {_place(proof.divergence, requests)}\n  {gap}{allowed}"
    verdict = f"gap {share} of {tolerance}" if proof.tolerance else "equal to the bit"
    return f"{head}{verdict}" + (f", {proof.note}" if proof.note else "")


def _place(at: Divergence, requests: list[Request]) -> str:
    request = requests[at.key]
    kind = "greedy" if request.params.is_greedy else "sampled"
    became = "stays" if at.got == at.expected else f"becomes {'none' if at.got is None else at.got}"
    prompt = f"prompt {at.key} ({counted(len(request.prompt_token_ids), 'token')}, {kind})"
    return f"{prompt}, output {at.index}: {at.expected} {became}, gap {at.gap:.2g}"
