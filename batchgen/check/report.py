"""A whole check: load, prove, and say how it came out, for a person in 80 columns and for a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from batchgen.check.proofs import Check, Proof
from batchgen.check.requests import made_up_prompts, read_prompts
from batchgen.check.witness import Divergence
from batchgen.config.job import JobSpec
from batchgen.core.records import Request
from batchgen.core.units import counted
from batchgen.engine.load import use_threads
from batchgen.model import load_model
from batchgen.model.decoder import Decoder
from batchgen.run.loader import read_model


def run_check(
    spec: JobSpec, *, has_input: bool, say: Callable[[str], None], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run every proof on the model of ``spec``, with the prompts of its input if it ``has_input``.

    ``say`` is told what is being done, ``tell`` the lines of the result as they come. Returns all of it as plain
    data; ``failed`` describes what does not hold.

    Raises:
        UsageError: model or input cannot be used.
        GateFailed: a request gives no result at all.
    """
    info = read_model(spec)
    prompts = read_prompts(spec, info) if has_input else made_up_prompts(info.config.vocab_size, info.max_model_len)
    use_threads(spec.engine.threads, info.config)
    say(f"loading {spec.model.path}")
    where = spec.model
    model = load_model(
        where.path, where.revision, dtype=where.dtype, device=where.device, batch_invariant=where.batch_invariant
    )
    facts = _facts(where.path, model, prompts)
    tell(f"{where.path}: {facts['dtype']} on {facts['device']}, {counted(facts['threads'], 'thread')}")
    num_tokens = counted(facts["num_prompt_tokens"], "token")
    tell(f"{counted(len(prompts), 'prompt')} of {num_tokens}, greedy and sampled by turns")
    check = Check(where, model, prompts)
    del model  # the check lets go of it before it loads another
    proofs = []
    for proof in check.proofs(say):
        tell(render(proof, check.requests))
        proofs.append(proof)
    failed = [f"{p.name}: {_where(p.divergence, check.requests)}" for p in proofs if p.divergence is not None]
    tell(f"{len(failed)} of {counted(len(proofs), 'proof')} failed" if failed else f"all {len(proofs)} proofs hold")
    return facts | {"ok": not failed, "failed": failed, "proofs": [dataclasses.asdict(proof) for proof in proofs]}


def _facts(path: str, model: Decoder, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    """What is checked, and how it runs here: ``backend`` names the kernels, ``kernels`` their variant."""
    return {
        "model": path,
        **model.numerics,
        "backend": model.kernels.name,
        "threads": torch.get_num_threads(),
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
    }


def render(proof: Proof, requests: list[Request]) -> str:
    """One line where the proof holds, three where it does not."""
    head = f"{proof.name:<24} {counted(proof.num_tokens, 'token'):>12}  "
    gap = f"largest gap {proof.largest_gap:.2g}, {_percent(proof.largest_share)} of the logits"
    if proof.divergence is not None:
        allowed = f", {_percent(proof.tolerance)} allowed" if proof.tolerance else ""
        return f"{head}DIVERGES\n  {_where(proof.divergence, requests)}\n  {gap}{allowed}"
    verdict = (
        f"gap {_percent(proof.largest_share)} of {_percent(proof.tolerance)}" if proof.tolerance else "equal to the bit"
    )
    return f"{head}{verdict}" + (f", {proof.note}" if proof.note else "")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _where(at: Divergence, requests: list[Request]) -> str:
    request = requests[at.key]
    kind = "greedy" if request.params.is_greedy else "sampled"
    became = "stays" if at.got == at.expected else f"becomes {'none' if at.got is None else at.got}"
    prompt = f"prompt {at.key} ({counted(len(request.prompt_token_ids), 'token')}, {kind})"
    return f"{prompt}, output {at.index}: {at.expected} {became}, gap {at.gap:.2g}"
