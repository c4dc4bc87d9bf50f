"""The section [cluster] of a job: where its engines run. None of its keys changes an output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.keys import Kind, integer_or_auto, key, number
from batchgen.core.units import parse_duration

_MAX_WORKERS = 1 << 16
AMOUNT = number(0, 1e12, above_low=True)


def _workers(value: object) -> str:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else "?"
    if text in ("", "auto"):
        return text
    minimum, colon, maximum = text.partition(":")
    bounds = [int(part) if re.fullmatch(r"\d{1,6}", part, re.ASCII) else 0 for part in (minimum, maximum or minimum)]
    if not 1 <= bounds[0] <= bounds[1] <= _MAX_WORKERS or (colon and not maximum):
        raise ValueError(f"must be a number of workers up to {_MAX_WORKERS}, MIN:MAX or auto")
    return text


def _address(value: object) -> str:
    if isinstance(value, str) and value.startswith("ray://"):
        raise ValueError(
            "the driver must be on a node of the cluster: run it there, such as with ray job submit, and give auto or "
            "HOST:PORT"
        )
    if not isinstance(value, str) or (value not in ("", "auto") and not re.fullmatch(r"\S+:\d{1,5}", value, re.ASCII)):
        raise ValueError("must be auto or HOST:PORT")
    return value


def _duration(value: object) -> str:
    text = f"{value}s" if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not 0 < parse_duration(text) < 1e9:
        raise ValueError('must be a duration above 0 such as "60s"')
    return text


def _resources(value: object) -> Mapping[str, float]:
    try:
        amounts: Any = json.loads(value) if isinstance(value, str) else value
        return {name: AMOUNT.parse(amount) for name, amount in amounts.items()}
    except (ValueError, AttributeError):
        raise ValueError('must be an object of names and amounts above 0, such as {"spot": 0.01}') from None


@dataclass(frozen=True)
class ClusterSpec:
    """Number and place of the workers that run engines; without ``workers`` and ``ray``, this process runs one.

    ``workers`` is a number, "MIN:MAX", "auto" or empty; the timeouts are durations such as "60s".
    """

    workers: str = key(
        Kind(_workers, "N|MIN:MAX|auto"), "Worker processes; auto: one per GPU or NUMA node", "", resume="free"
    )
    ray: str = key(
        Kind(_address, "auto|HOST:PORT"), "Run on a Ray cluster: auto, or its head as HOST:PORT", "", resume="free"
    )
    cpus_per_worker: int | None = key(integer_or_auto(1, 1 << 16), "CPUs of a worker", None, resume="free")
    gpus_per_worker: int | None = key(integer_or_auto(0, 1 << 10), "GPUs of a worker", None, resume="free")
    resources: Mapping[str, float] | None = key(
        Kind(_resources, "JSON"), "Per worker, such as '{\"spot\": 0.01}'", None, flag="ray-resources", resume="free"
    )
    step_timeout: str = key(
        Kind(_duration, "DURATION"), "Give up a worker that has not finished a step for this long", "60s", resume="free"
    )
    load_timeout: str = key(
        Kind(_duration, "DURATION"), "Give up a worker that takes longer to load the model", "30m", resume="free"
    )

    @property
    def is_used(self) -> bool:
        """Whether rows go to workers."""
        return bool(self.workers or self.ray)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The fewest workers that a run continues with, and the most; None if they are chosen automatically.

        The run starts with the first worker. If fewer than the minimum are left, it waits for others, at most for the
        time that a worker may take to load.
        """
        if self.workers in ("", "auto"):
            return None
        minimum, colon, maximum = self.workers.partition(":")
        return (int(minimum), int(maximum)) if colon else (1, int(minimum))

    @property
    def step_timeout_s(self) -> float:
        return parse_duration(self.step_timeout)

    @property
    def load_timeout_s(self) -> float:
        return parse_duration(self.load_timeout)
