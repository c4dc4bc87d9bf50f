"""Division of one machine's processors, devices and memory among workers. It imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.machine import UNTRIED_DEVICES, available_bytes, cpus_by_node, limit_memory, visible_gpus
from batchgen.core.units import counted
from batchgen.engine.sizes import default_sizes

_PROGRAM_BYTES = 500_000_000  # of a worker in addition to its weights
_ROWS_PER_SEQ = 4  # with fewer, start and end of a worker take too large a part of its time


@dataclass(frozen=True, slots=True)
class MachineSlice:
    """The share of one worker: processors, CUDA devices (None: all that there are), and bytes of memory (None: any)."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None
    memory_bytes: int | None = None

    def take(self) -> None:
        """Restrict this process to its slice, before any thread is started or device used."""
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.memory_bytes is not None:
            limit_memory(self.memory_bytes)


def split_machine(
    spec: JobSpec, num_rows: int | None, weight_bytes: int = 0, note: Callable[[str], object] = lambda line: None
) -> list[MachineSlice]:
    """The slices of the most workers that a job may have on this machine; ``num_rows`` is the number of rows, if known.

    "auto" is a worker per GPU that the job may use, or else per NUMA node, whose own memory is fastest, as long as each
    gets some full batches. A given number that exceeds the rows or, without GPUs, the processors or the memory
    (``weight_bytes`` each) is lowered, with a line for ``note``. Raises UsageError if there are fewer GPUs.
    """
    cluster, nodes, gpus = spec.cluster, cpus_by_node(), visible_gpus(spec.model.device)
    gpus_each = (1 if cluster.gpus_per_worker is None else cluster.gpus_per_worker) if gpus else 0
    if cluster.bounds is not None:
        number = _carried(cluster.bounds[1], num_rows, 0 if gpus else sum(map(len, nodes)), weight_bytes, note)
    else:
        is_cuda = bool(gpus) or spec.model.device.startswith("cuda")
        is_gpu = is_cuda or spec.model.device in UNTRIED_DEVICES
        slots = len(gpus) // gpus_each if gpus_each else 1 if is_gpu else len(nodes)
        number = useful_workers(slots, spec, num_rows, is_cuda=is_cuda)
    if gpus_each and number * gpus_each > len(gpus):
        raise UsageError(
            f"--workers {number} with --gpus-per-worker {gpus_each}: this machine has {counted(len(gpus), 'GPU')}; "
            "ask for fewer workers, or with --gpus-per-worker 0 for workers that share all of them"
        )
    memory = None if gpus else available_bytes() // number
    cpus = [cpu for node in nodes for cpu in node]
    return [
        MachineSlice(
            _slice(cpus, i, number, cluster.cpus_per_worker),
            tuple(gpus[i * gpus_each : (i + 1) * gpus_each]) if gpus_each else None,
            memory,
        )
        for i in range(number)
    ]


def useful_workers(slots: int, spec: JobSpec, num_rows: int | None, *, is_cuda: bool) -> int:
    """The default number of workers on these slots: each has rows for some full batches."""
    rows_each = _ROWS_PER_SEQ * (spec.engine.max_num_seqs or default_sizes(is_cuda=is_cuda)["max_num_seqs"])
    return max(1, slots if num_rows is None else min(slots, num_rows // rows_each))


def _carried(wanted: int, num_rows: int | None, num_cpus: int, weight_bytes: int, note: Callable[[str], object]) -> int:
    """The number of workers, up to the wanted one, for which there are rows and memory."""
    limits = {} if num_rows is None else {counted(num_rows, "row"): num_rows}
    if num_cpus:
        in_memory = available_bytes() // (weight_bytes + _PROGRAM_BYTES)
        limits |= {counted(num_cpus, "CPU"): num_cpus, f"memory for {counted(in_memory, 'worker')}": in_memory}
    number = max(1, min([wanted, *limits.values()]))
    if number < wanted:
        *others, last = limits
        there_are = f"{', '.join(others)} and {last}" if others else last
        note(f"--workers {wanted}: {number} started, for {there_are}")
    return number


def _slice(cpus: Sequence[int], i: int, number: int, size: int | None) -> tuple[int, ...]:
    """The processors of worker ``i`` out of ``number``: adjacent ones, shared with another worker only if too few."""
    if not cpus:
        return ()
    if size is None:
        first, end = i * len(cpus) // number, (i + 1) * len(cpus) // number
    else:
        first, end = i * size, (i + 1) * size
    chosen = islice(cycle(cpus), first % len(cpus), first % len(cpus) + min(max(1, end - first), len(cpus)))
    return tuple(sorted(chosen))
