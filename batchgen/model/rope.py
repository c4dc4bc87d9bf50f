"""Rotary embeddings: the frequencies of each kind, and the tables of cosines and sines that kernels read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.model.config import ModelConfig, Rope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair (i, i + head_dim / 2), float32 [head_dim / 2]; in the reference's order.

    default: ``theta ** (-2i / head_dim)``. "linear": divided by ``factor``. "llama3" (Llama 3.1): divided by ``factor``
    if the wavelength 2 pi / f exceeds ``original_positions / low_freq_factor``, unchanged below ``original_positions /
    high_freq_factor``, blended in between. "proportional" (LFM3): 0 for pairs beyond the rotated share. "yarn":
    unchanged if they turn ``high_freq_factor`` times within ``original_positions``, divided if ``low_freq_factor``
    times or less, and blended in between by index.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "proportional":
        plain[int(rope.rotated_share * head_dim // 2) :] = 0.0
    if rope.kind == "yarn":
        share = _yarn_share(rope, head_dim)
        return 1.0 / (rope.factor * rope.theta**exponents) * (1 - share) + plain * share
    if rope.kind != "llama3":
        return plain / rope.factor
    wavelengths = 2 * math.pi / plain
    low, high = (rope.original_positions / by for by in (rope.low_freq_factor, rope.high_freq_factor))
    stretched = torch.where(wavelengths > low, plain / rope.factor, plain)
    share = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * stretched / rope.factor + share * stretched
    return torch.where((wavelengths >= high) & (wavelengths <= low), blended, stretched)


def _yarn_share(rope: Rope, head_dim: int) -> Tensor:
    """The share [head_dim / 2] of each frequency that stays as it is."""
    turns = (rope.high_freq_factor, rope.low_freq_factor)
    first, last = (
        head_dim * math.log(rope.original_positions / (n * 2 * math.pi)) / (2 * math.log(rope.theta)) for n in turns
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    return 1 - ramp.clamp(0, 1)


class Rotary:
    """For each rope the scaled cosines and sines of the positions needed so far, float32 [2, positions, head_dim / 2].

    Angles are float32 (position times frequency), as in the reference; cosines are computed in float64, so that an
    entry never depends on how many are computed at once.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.frequencies = [(frequencies(rope, config.head_dim).numpy(), rope.scale) for rope in config.ropes]
        self.device = device
        self.limit = config.max_position_embeddings
        self._shorter: list[Sequence[Tensor]] = []  # together not larger; recordings may still read them
        self._longest: tuple[int, Sequence[Tensor]] = 0, [torch.empty(2, 0, config.head_dim // 2) for _ in config.ropes]

    def upto(self, num_positions: int) -> Sequence[Tensor]:
        """The tables with at least ``num_positions`` positions, in the order of ``ModelConfig.ropes``.

        Thread-safe, since engines in several threads may share a model: tables are never shorter than asked for.
        """
        length, tables = self._longest
        if num_positions > length:
            longer = max(num_positions, min(self.limit, max(1024, 2 * num_positions)))
            self._shorter.append(tables)
            tables = [self._table(*part, longer) for part in self.frequencies]
            self._longest = longer, tables
        return tables

    def _table(self, part: np.ndarray, scale: float, num_positions: int) -> Tensor:
        wide = (np.arange(num_positions, dtype=np.float32)[:, None] * part).astype(np.float64)
        return torch.from_numpy((scale * np.stack((np.cos(wide), np.sin(wide)))).astype(np.float32)).to(self.device)
