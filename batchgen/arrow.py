"""Batches of Arrow records through a model: for Spark's ``mapInArrow``, Daft, DuckDB and whatever else yields them.

Nothing is journalled: what the pipeline does not keep is generated again. Each call loads the model, so give it long
partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from batchgen.core.errors import UsageError
from batchgen.executors.tables import Batch, TableEngine, TableJob, output_schema
from batchgen.run.loader import EngineFactory

__all__ = ["generate", "output_schema"]

_AHEAD = 2  # times max_num_seqs: rows without an answer
_MOST_HELD = 64  # times max_num_seqs: rows held, those that wait for an earlier one included


def generate(
    batches: Iterable[pa.RecordBatch],
    *,
    model: str | Mapping[str, Any],
    prompt: str | None = None,
    engine_factory: EngineFactory | None = None,
    **job: Any,
) -> Iterator[pa.RecordBatch]:
    """The batches with the columns text, finish_reason, prompt_tokens, completion_tokens, details and error.

    ``sampling``, ``key`` and further arguments are those of ``TableJob``.
    Batches and their rows stay in order, and no batch waits for the one before: rows of later ones run beside it.
    ``details`` is null, or JSON with what ``sampling`` asks for more: samples, logprobs, choices with their scores.
    ``error`` is null or "code: message", of a row that cannot run; the other columns are null then. All batches must
    have one schema, and those that come out have ``output_schema`` of it. The model is loaded for the first row.

    Raises:
        UsageError: a key that is impossible or not known, or a batch of another schema.
        ModelError: the model cannot be used.

    Example:
        >>> from batchgen.arrow import generate, output_schema
        >>> def answers(batches):
        ...     yield from generate(batches, model="LiquidAI/LFM2-350M", prompt="{question}")
        >>> df.mapInArrow(answers, from_arrow_schema(output_schema(to_arrow_schema(df.schema))))  # doctest: +SKIP
    """
    table_job = TableJob.of(model, prompt, job)
    table_job.spec()
    return _generate(iter(batches), table_job, engine_factory)


def _generate(
    source: Iterator[pa.RecordBatch], job: TableJob, engine_factory: EngineFactory | None
) -> Iterator[pa.RecordBatch]:
    first = next((batch for batch in source), None)
    if first is None:
        return
    schema = output_schema(first.schema)
    rows: TableEngine | None = None
    held: deque[tuple[pa.RecordBatch, Batch]] = deque()
    following: pa.RecordBatch | None = first
    try:
        while following is not None or held:
            if following is not None and _has_room(rows, held):
                if following.schema != first.schema:
                    raise UsageError(f"generate: a batch has the schema {following.schema}, the first {first.schema}")
                if rows is None and following.num_rows:
                    rows = TableEngine(job, engine_factory)
                held.append((following, rows.submit(following) if rows else Batch(0)))
                following = next(source, None)
            elif rows is not None and rows.num_open:
                rows.take()
            while held and not held[0][1].num_left:
                batch, answered = held.popleft()
                yield pa.RecordBatch.from_arrays([*batch.columns, *answered.columns()], schema=schema)
    finally:
        if rows is not None:
            rows.close()


def _has_room(rows: TableEngine | None, held: Iterable[tuple[pa.RecordBatch, Batch]]) -> bool:
    """Whether the next batch should be begun, so that the engine stays full."""
    if rows is None:
        return not held
    num_held = sum(batch.num_rows for batch, _ in held)
    return rows.num_open < _AHEAD * rows.max_num_seqs and num_held < _MOST_HELD * rows.max_num_seqs
