"""Proof that several machines compute the same bits: the same requests on each, and digests of every logit compared.

Each machine runs them one by one, which ``proofs`` shows to be as good as any other way. How a function gets to the
machines is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from batchgen.check.proofs import Check, Prompt, made_up_prompts
from batchgen.config.job import JobSpec
from batchgen.core.fingerprint import Digests
from batchgen.core.units import counted
from batchgen.engine.load import use_threads
from batchgen.output.manifest import differences
from batchgen.report.facts import numerics_text
from batchgen.run.loader import read_model


@dataclass(frozen=True, slots=True)
class Bits:
    """What a machine computes: ``tokens`` by request, ``logits`` as digests by request and index of the output token.

    ``weights`` are the digests of ``ModelInfo.fingerprint``.
    """

    weights: Mapping[str, Any]
    numerics: Mapping[str, str]
    threads: int
    tokens: Mapping[int, tuple[int, ...]]
    logits: Mapping[tuple[int, int], str]


def bits_here(spec: JobSpec, prompts: Sequence[Prompt] | None) -> Bits:
    """Run the proofs' requests on this machine, with made-up prompts if there are none.

    Raises:
        UsageError: the model cannot be used here.
        GateFailed: a request ends with an error.
    """
    info = read_model(spec)
    threads = use_threads(spec.engine.threads, info.config)
    made_up = made_up_prompts(info.config.vocab_size, info.max_model_len)
    check = Check(spec.model, made_up if prompts is None else list(prompts), spec.engine.kv_dtype)
    trace = check.run_alone()
    logits = {
        place: blake2b(row.contiguous().view(-1).float().numpy().tobytes(), digest_size=16).hexdigest()
        for place, row in trace.logits.items()
    }
    weights = info.fingerprint(Digests())
    return Bits(weights, check.model.numerics, threads, trace.tokens, logits)


class Comparison:
    """Holds machines against the first one; ``failed`` says where each that differs does so first."""

    def __init__(self) -> None:
        self.machines: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._first: tuple[str, Bits] | None = None

    def add(self, name: str, found: Bits | Exception) -> str:
        """Take in what a machine computed, or why it could not; returns a line for the user."""
        if isinstance(found, Exception):
            facts, is_equal, verdict = "", False, f"cannot run it: {found}"
        else:
            facts = f"{numerics_text(found.numerics)}, {counted(found.threads, 'thread')}, "
            facts += counted(len(found.logits), "token")
            is_equal, verdict = self._compare(name, found)
        self.machines.append({"machine": name, "facts": facts, "ok": is_equal, "verdict": verdict})
        if not is_equal:
            self.failed.append(f"{name} {verdict}")
        return f"{name}: {facts}{facts and ': '}{verdict}"

    def _compare(self, name: str, found: Bits) -> tuple[bool, str]:
        if self._first is None:
            self._first = name, found
            return True, "the others are compared with it"
        first, wanted = self._first
        divergence = _first_difference(wanted, found)
        return not divergence, f"diverges from {first}: {divergence}" if divergence else f"equal to {first} to the bit"

    def conclusion(self) -> str:
        """The last line."""
        machines = counted(len(self.machines), "machine")
        return f"{len(self.failed)} of {machines} failed" if self.failed else f"all {machines} compute the same bits"


def _first_difference(wanted: Bits, found: Bits) -> str:
    """Where a machine computes something else first; empty if nowhere."""
    for key in sorted(wanted.tokens):
        expected, got = wanted.tokens[key], found.tokens.get(key, ())
        for index, token in enumerate(expected):
            other = got[index] if index < len(got) else None
            if other == token and wanted.logits.get((key, index)) == found.logits.get((key, index)):
                continue
            became = "stays, with other logits" if other == token else f"becomes {'none' if other is None else other}"
            return f"prompt {key}, output {index}: {token} {became}{_why(wanted, found)}"
    return ""


def _why(wanted: Bits, found: Bits) -> str:
    """What else is different, which explains it."""
    lines: Iterable[str] = differences(
        {**wanted.numerics, "model": wanted.weights}, {**found.numerics, "model": found.weights}
    )
    return "".join(f"\n  {line}" for line in lines)
