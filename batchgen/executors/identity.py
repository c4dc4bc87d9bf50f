"""What must be equal between the workers of a run, so that no row depends on which of them computed it."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.core.version import __version__
from batchgen.executors.messages import Hello
from batchgen.output.manifest import KERNELS, differences, mix_kernels
from batchgen.run.backend import Begun


class Gate:
    """Says which workers may take part in a run.

    ``numerics`` are those of its rows: without any so far, the first worker's. Where the run takes several kernel sets,
    they name all that have joined.
    """

    def __init__(self, begun: Begun) -> None:
        self.numerics = dict(begun.numerics or {})
        self._begun = begun

    def refusal(self, hello: Hello) -> str:
        """Why a worker may not take part; empty if it may."""
        identity = hello.identity
        if identity.version != __version__:
            return f"it has batchgen {identity.version}, here it is {__version__}"
        if found := differences(self._begun.weights, identity.weights):
            return f"its model is another one: {found[0]}"
        self.numerics = self.numerics or dict(identity.numerics)
        if found := differences(_without_kernels(self.numerics), _without_kernels(identity.numerics)):
            return f"it would compute other tokens: {', '.join(found)}"
        return self._refusal_of_kernels(identity.numerics.get(KERNELS))

    def _refusal_of_kernels(self, kernels: str | None) -> str:
        if kernels is None:
            return ""
        known = self.numerics.setdefault(KERNELS, kernels)
        mixed = mix_kernels(known, kernels)
        if mixed != known and not self._begun.takes_kernels(kernels):
            return (
                f"its kernels are {kernels}, the run's {known}, which add up in another order, so tokens may differ "
                "(--numerics any takes both)"
            )
        self.numerics[KERNELS] = mixed
        return ""


def _without_kernels(numerics: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in numerics.items() if name != KERNELS}
