"""Named sets of sampling values: what a model's card recommends, under the one name ``card``.

The values follow the cards of the instruct models at huggingface.co/LiquidAI. A preset is a base to build on, and once
resolved it is plain sampling values like any other: nothing downstream knows where they came from.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESET_NAMES = ("card",)

_LFM2: Mapping[str, float] = {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05}
_LFM2_5: Mapping[str, float] = {"temperature": 0.1, "top_k": 50, "repetition_penalty": 1.05}


def card_values(model: str) -> Mapping[str, float]:
    """The sampling values of the card of ``model``, a name or path: LFM2.5's where it says so, else LFM2's."""
    return _LFM2_5 if "lfm2.5" in model.lower() else _LFM2
