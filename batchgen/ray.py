"""Ray Data pipelines through a model: a callable class for ``Dataset.map_batches``, and the same with numbers chosen.

Guarantees are Ray Data's: a lost actor's blocks run again, and nothing is journalled. ``batchgen run --ray`` is the
way that never loses or repeats a row.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from math import ceil
from typing import Any

import pyarrow as pa

from batchgen.executors.tables import TableEngine, TableJob, output_schema

_BATCH_ROWS = 32  # a batch leaves with its longest row, so that small ones wait less
_BATCHES_AT_ONCE = 32  # in a worker: more rows than an engine runs, so that it is never short of them


class Generator:
    """Adds the columns of ``batchgen.arrow.generate`` to batches; for ``Dataset.map_batches``.

    Takes the arguments of ``TableJob``. Batches that are called for at the same time share the engine's batch.
    ``error`` is null or "code: message": a row that cannot run raises nothing. Raises UsageError for an impossible job,
    ModelError for an unusable model.

    Example:
        >>> ds.map_batches(  # doctest: +SKIP
        ...     Generator,
        ...     fn_constructor_kwargs={"model": "LiquidAI/LFM2-350M", "prompt": "{question}"},
        ...     batch_size=32,
        ...     compute=ray.data.ActorPoolStrategy(
        ...         size=8, max_tasks_in_flight_per_actor=64, max_concurrent_calls_per_actor=32
        ...     ),
        ...     num_gpus=1,
        ... )
    """

    def __init__(self, model: str | Mapping[str, Any], prompt: str | None = None, **job: Any) -> None:
        self._rows = TableEngine(TableJob.of(model, prompt, job))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._take, name="batchgen-take", daemon=True)
        self._thread.start()

    async def __call__(self, batch: Any) -> pa.Table:
        """The rows of a batch of any of Ray Data's formats with their answers, in order."""
        table = _as_table(batch)
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        begun = self._rows.submit(table, lambda: loop.call_soon_threadsafe(done.set))
        if self._error is None:
            await done.wait()
        if self._error is not None:
            raise self._error
        return pa.table([*table.columns, *begun.columns()], schema=output_schema(table.schema))

    def _take(self) -> None:
        try:
            while True:
                self._rows.take()
        except BaseException as error:
            self._error = error
            self._rows.abandon()


def generate(
    ds: Any,
    *,
    model: str | Mapping[str, Any],
    prompt: str | None = None,
    workers: int = 1,
    cpus: int | None = None,
    engine: Mapping[str, Any] | None = None,
    **job: Any,
) -> Any:
    """The dataset ``ds`` with the columns of ``Generator``, from ``workers`` actors; further arguments as it takes.

    Where the cluster has GPUs, each worker gets one; else ``cpus`` threads, by default all that its machine has for it.
    Blocks are cut into small batches, of which many run at once. Raises UsageError for an impossible job.
    """
    import ray

    job = {"engine": engine or {}, "begun_at": datetime.now(UTC), **job}
    device = TableJob.of(model, prompt, job).spec().model.device
    job |= {"model": model, "prompt": prompt}
    if not ray.is_initialized():
        ray.init()
    machines = _machines()
    smallest = min((int(machine.get("CPU", 0)) for machine in machines), default=1) or 1
    has_gpus = device != "cpu" and any(machine.get("GPU") for machine in machines)
    cpus = cpus or max(smallest // ceil(workers / max(len(machines), 1)), 1)
    if not has_gpus:
        job["engine"] = {"threads": cpus, **job["engine"]}
    return ds.repartition(target_num_rows_per_block=_BATCH_ROWS).map_batches(
        Generator,
        fn_constructor_kwargs=job,
        batch_size=_BATCH_ROWS,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=workers,
            max_tasks_in_flight_per_actor=2 * _BATCHES_AT_ONCE,
            max_concurrent_calls_per_actor=_BATCHES_AT_ONCE,
        ),
        num_cpus=cpus * max(1 - 1 / smallest, 0.5),  # actors that hold all leave none for the tasks that read
        num_gpus=1 if has_gpus else 0,
    )


def _machines() -> list[Mapping[str, float]]:
    """Resources of each machine of the cluster that runs tasks."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")]


def _as_table(batch: Any) -> pa.Table:
    """A batch of one of Ray Data's formats as a table."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping):
        return pa.table({name: [_plain(value) for value in values] for name, values in batch.items()})
    return pa.Table.from_pandas(batch, preserve_index=False)


def _plain(value: Any) -> Any:
    """A value of a NumPy array as a list, a number or a text of Python."""
    return value.tolist() if hasattr(value, "tolist") else value
