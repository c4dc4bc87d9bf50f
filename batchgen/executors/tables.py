"""Rows of tables that others read and keep: a model that answers them in batches, without a run directory.

For pipelines with guarantees of their own (Ray Data, Spark): nothing is journalled here. Rows of all batches run in one
continuously filled engine, so that no batch waits for another's longest row.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any, cast

import pyarrow as pa

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_values
from batchgen.core.errors import RowError, RowErrorCode, TokenizerError, UsageError
from batchgen.core.keys import INT64_MAX
from batchgen.core.records import BadRow, Cursor, Record, Request, Result
from batchgen.executors.host import Host, SteppedEngine
from batchgen.executors.messages import HEARTBEAT_S, Grant
from batchgen.input.formats.arrow import rows_at
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import wrong_type
from batchgen.output.payloads import Payloads, kept_name
from batchgen.run.loader import EngineFactory, load_engine, read_model

ADDED = pa.schema(
    [
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("error", pa.string()),
    ]
)
_NOWHERE = Cursor(0, 0, 0, 0)
_UNKEYED = "temperature: draws at random need a key: name a column of unique values as key"


@dataclass(frozen=True, slots=True)
class TableJob:
    """What to do with each row, as Python values; picklable.

    ``model`` is a path or the [model] table of a job file; ``prompt`` and further ``input`` keys, ``sampling`` and
    ``engine`` are those of a job. ``key`` names the column that keys random draws: integers from 0 are row numbers, as
    in a run; other integers and strings are hashed. ``begun_at`` is what chat templates take for the time of day.
    """

    model: str | Mapping[str, Any]
    prompt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    begun_at: datetime | None = None

    def spec(self) -> JobSpec:
        """The job that this describes. Raises UsageError naming the key."""
        values: dict[str, Mapping[str, Any]] = {
            "model": {"path": self.model} if isinstance(self.model, str) else self.model,
            "input": {**self.input, **({} if self.prompt is None else {"prompt": self.prompt})},
            "sampling": self.sampling,
            "engine": self.engine,
        }
        spec = job_from_values(values, "generate")
        if self.key is None and not spec.sampling.is_greedy:
            raise UsageError(f"generate: {_UNKEYED}")
        return spec


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a task."""

    key: int
    columns: Mapping[str, Any]
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Values:
    """What came of a row: the values of the columns ``ADDED``."""

    key: int
    values: Mapping[str, Any]

    @classmethod
    def failed(cls, key: int, error: RowError) -> Values:
        """A row that cannot run."""
        return cls(key, {"error": f"{error.code}: {error.message}"})


class _RowMaker:
    """A ``TaskMaker`` for rows of tables."""

    def __init__(self, builder: RequestBuilder, payloads: Payloads, *, is_keyed: bool) -> None:
        self._builder = builder
        self._payloads = payloads
        self._is_keyed = is_keyed
        self._built: dict[int, tuple[Record, Request]] = {}  # with the engine

    def build(self, tasks: Sequence[Row]) -> Iterator[Request | Values]:
        records = [Record(row.key, "", 0, dict(row.columns), _NOWHERE) for row in tasks]
        for record, built in zip(records, self._builder.build(records), strict=True):
            if isinstance(built, BadRow):
                yield Values.failed(built.index, built.error)
            elif not self._is_keyed and not built.params.is_greedy:
                yield Values.failed(built.key, RowError(RowErrorCode.BAD_PARAM, _UNKEYED))
            else:
                self._built[built.key] = record, built
                yield built

    def finish(self, result: Result) -> Values:
        record, request = self._built.pop(result.key)
        if result.error is not None:
            return Values.failed(result.key, result.error)
        try:
            made = self._payloads.result(record, None, result, request.params, request.prompt_token_ids)
        except TokenizerError as problem:
            return Values.failed(result.key, RowError(RowErrorCode.INTERNAL, str(problem)))
        return Values(result.key, {"text": made["text"], "finish_reason": made["finish_reason"], **made["usage"]})


class Batch:
    """Rows that were given together; ``values`` holds those of each row once ``num_left`` is 0."""

    def __init__(self, num_rows: int, on_done: Callable[[], object] = lambda: None) -> None:
        self.values: list[Mapping[str, Any]] = [{}] * num_rows
        self.num_left = num_rows
        self.on_done = on_done

    def put(self, number: int, values: Mapping[str, Any]) -> None:
        """What came of one of the rows."""
        self.values[number] = values
        self.num_left -= 1
        if not self.num_left:
            self.on_done()

    def columns(self) -> list[pa.Array]:
        """The columns ``ADDED``."""
        return [pa.array([row.get(item.name) for row in self.values], item.type) for item in ADDED]


class TableEngine:
    """A loaded model that answers batches of rows; two threads step its engine until ``close``.

    ``submit`` may be called by other threads than ``take``. Raises UsageError for an impossible job, ModelError for an
    unusable model.
    """

    def __init__(self, job: TableJob, engine_factory: EngineFactory | None = None) -> None:
        spec = job.spec()
        model = read_model(spec, job.begun_at)
        if model.tokenizer is None:
            raise UsageError("generate: the model has no tokenizer to make texts with: name one in model.tokenizer")
        spec = model.with_preset(spec)
        builder = model.builder(spec.input, spec.sampling, spec.sampling_columns)
        maker = _RowMaker(builder, model.payloads(spec), is_keyed=job.key is not None)
        backend = (engine_factory or load_engine)(spec, model)
        backend.prepare()
        engine = cast(SteppedEngine, backend.engine)
        self.max_num_seqs = engine.max_num_seqs
        self.num_open = 0  # rows without an answer
        self._key = job.key
        self._num_rows = 0
        self._lock = threading.Lock()  # guards all but the host
        # By key, those with the same one after the other: the engine takes each key once at a time.
        self._open: dict[int, deque[tuple[Batch, int, Row]]] = {}
        self.stats = backend.engine.stats
        self._host = Host(engine, maker)

    def submit(self, table: pa.RecordBatch | pa.Table, on_done: Callable[[], object] = lambda: None) -> Batch:
        """Begin with a batch of rows; ``on_done`` is called once all rows have answers, here or by ``take``."""
        batch = Batch(table.num_rows, on_done)
        ready: list[Row] = []
        with self._lock:
            for number, (columns, error) in enumerate(rows_at(table, range(table.num_rows))):
                self._num_rows += 1
                key = error or self._key_of(columns)
                if isinstance(key, RowError):
                    batch.put(number, Values.failed(0, key).values)
                    continue
                waiting = self._open.setdefault(key, deque())
                waiting.append((batch, number, Row(key, columns)))
                self.num_open += 1
                if len(waiting) == 1:
                    ready.append(waiting[0][2])
            self._host.put(Grant(tuple(ready)))
        if not table.num_rows:
            on_done()
        return batch

    def take(self, timeout_s: float = HEARTBEAT_S) -> None:
        """Wait for answers, and put them into their batches. Raises what the engine raised."""
        answers = cast(Sequence[Values], self._host.take(timeout_s).finished)
        following: list[Row] = []
        with self._lock:
            for answer in answers:
                waiting = self._open[answer.key]
                batch, number, _ = waiting.popleft()
                self.num_open -= 1
                if waiting:
                    following.append(waiting[0][2])
                else:
                    del self._open[answer.key]
                batch.put(number, answer.values)
            self._host.put(Grant(tuple(following)))

    def abandon(self) -> None:
        """Call ``on_done`` of all batches, although they will have no answers: ``take`` has raised."""
        with self._lock:
            for batch in {batch for waiting in self._open.values() for batch, _, _ in waiting}:
                batch.on_done()

    def close(self) -> None:
        """End the threads after the step and the row under way."""
        self._host.close()

    def _key_of(self, columns: Mapping[str, Any]) -> int | RowError:
        """The engine's key of a row: where draws are greedy, its number."""
        if self._key is None:
            return self._num_rows
        if self._key not in columns:
            return RowError(RowErrorCode.MISSING_COLUMN, f"no column {self._key!r} (the row's key)")
        value = columns[self._key]
        if isinstance(value, bool) or not isinstance(value, str | int):
            return wrong_type(f"column {self._key!r} (the row's key)", value, "a string or an integer").error
        if isinstance(value, int) and 0 <= value <= INT64_MAX:
            return value
        return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest()) >> 1


def output_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of answers to rows of ``schema``: its columns, then ``ADDED``.

    A column with the name of an added one is kept as ``input_<name>``.
    """
    columns, added = dict.fromkeys(schema.names), frozenset(ADDED.names)
    kept = [item.with_name(kept_name(item.name, columns, added)) for item in schema]
    return pa.schema([*kept, *ADDED])
