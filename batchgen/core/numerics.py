"""Numerics of a run: what decides its tokens in addition to weights and requests.

This is their only list: engines state them, manifests and reports store them, resumes and workers compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from batchgen.core.machine import QUANTIZATIONS

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numerics of a run. Values that plain data lacks have their defaults; "auto" there means "as for the dtype".

    A ``dtype`` or ``device`` of "auto" is known once the weights are loaded. ``head`` is "untied" if the checkpoint has
    a head although its config ties it. ``llguidance`` is the version of the library that masks tokens, if a job has
    masks. ``kernels`` names the kernel set: a run may continue with another one if it is allowed to.
    """

    dtype: str = ""
    device: str = ""
    weights: str = AUTO
    activations: str = AUTO
    kv_cache_dtype: str = AUTO
    head: str = ""
    llguidance: str = ""
    kernels: str = ""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Numerics:
        """The numerics in plain data; other keys are ignored."""
        return cls(**{item.name: str(plain[item.name]) for item in fields(cls) if item.name in plain})

    @property
    def plain(self) -> dict[str, str]:
        """The values that differ from ``Numerics()``, as manifests and reports hold them."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}

    @property
    def base(self) -> Numerics:
        """The numerics that are equal in all rows of a run: all but the kernels."""
        return replace(self, kernels="")

    @property
    def integers(self) -> str:
        """Names of tensors that are stored or multiplied in a type other than ``dtype``, such as "int8 weights"."""
        parts = {"weights": self.weights, "activations": self.activations, "keys and values": self.kv_cache_dtype}
        return ", ".join(f"{value} {name}" for name, value in parts.items() if value != AUTO)

    def __str__(self) -> str:
        target = " on ".join(filter(None, (self.dtype, self.device)))
        head = self.head and f"{self.head} head"
        text = ", ".join(filter(None, (target, self.integers, head))) + (f" ({self.kernels})" if self.kernels else "")
        return f"{text}, llguidance {self.llguidance}" if self.llguidance else text

    def refusal(self, other: Numerics, *, may_mix_kernels: bool) -> str:
        """Reason why a run with these numerics cannot take rows of ``other``, or ""; unknown kernels do not count."""
        if self.base != other.base:
            return f"{other.base} gives other tokens than {self.base}"
        if may_mix_kernels or not self.kernels or not other.kernels or self.kernels == other.kernels:
            return ""
        return (
            f"the kernels {other.kernels} add up in another order than the kernels {self.kernels}, so tokens may "
            "differ: compute all rows with the same ones, or give --allow-mixed-kernels"
        )

    def in_job(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> Numerics:
        """The numerics of job ``now``, which replaces job ``was`` with these numerics; both jobs are plain data.

        If a value is "auto" in both jobs, it resolves as before. If the earlier job named a value, "auto" stays "auto".
        """
        named = {name: now["model"][name].partition(":")[0] for name in ("dtype", "device")}
        before = was.get("model", {})
        changes = {name: value for name, value in named.items() if value != AUTO or before.get(name, AUTO) != AUTO}
        changes["weights"], changes["activations"] = QUANTIZATIONS[now["model"]["quantization"]]
        cached = now["engine"]["kv_cache_dtype"]
        changes["kv_cache_dtype"] = AUTO if cached == changes.get("dtype", self.dtype) else cached
        return replace(self, **changes)

    def flags(self, other: Numerics) -> str:
        """The flags of ``run``, and the release of llguidance to install, that change ``other`` to these; or ""."""
        parts = []
        for name in ("dtype", "device", "kv_cache_dtype"):
            if (value := getattr(self, name)) != getattr(other, name):
                parts.append(f"--{name.replace('_', '-')} {value}")
        forms = (self.weights, self.activations)
        if forms != (other.weights, other.activations):
            parts += [f"--quantization {name}" for name, those in QUANTIZATIONS.items() if those == forms]
        if self.llguidance != other.llguidance:
            parts.append(f"llguidance=={self.llguidance}")
        return " ".join(parts)
