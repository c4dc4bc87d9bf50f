"""Rows of tables that others read and keep: a model that answers them in batches, without a run directory.

For pipelines with guarantees of their own (Ray Data, Spark): nothing is journalled here. Rows of all batches run in one
continuously filled engine, so that no batch waits for another's longest row.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, cast

import pyarrow as pa

from batchgen.config.identity import draw_of
from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_values
from batchgen.config.record_fields import kept_name
from batchgen.config.sampling import PARAM_KEYS
from batchgen.core.errors import RowError, RowErrorCode, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.keys import nearest
from batchgen.core.records import Cursor, Record, Request
from batchgen.executors.loop import EngineLoop, RowMaker, SteppedEngine
from batchgen.executors.messages import HEARTBEAT_S, Assignment
from batchgen.input.formats.arrow import rows_at
from batchgen.input.rows import wrong_type
from batchgen.input.validator import Pending
from batchgen.output.journal import JournalEntry
from batchgen.run.loader import EngineFactory, load_engine, read_model

ADDED = pa.schema(
    [
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("details", pa.string()),
        ("error", pa.string()),
    ]
)
# of an output record
_DETAILS = ("tool_calls", "complete", "logprobs", "samples", "choices", "prompt_logprobs", "perplexity")
_NOWHERE = Cursor(0, 0, 0, 0)
_UNKEYED = "temperature: draws at random need a key: name a column of unique values as key"


@dataclass(frozen=True, slots=True)
class TableJob:
    """What to do with each row, as Python values; picklable.

    ``model`` is a path or the [model] table of a job file; ``prompt`` and further ``input`` keys, ``sampling`` and
    ``engine`` are those of a job. ``key`` names the column that keys random draws: integers from 0 are row numbers, as
    in a run; other integers and strings are hashed. What an output record has more (all
    of ``n`` samples, log-probabilities, scores of choices) is JSON in ``details``. ``begun_at`` is what chat templates
    take for the time of day.
    """

    model: str | Mapping[str, Any]
    prompt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    begun_at: datetime | None = None

    @classmethod
    def of(cls, model: str | Mapping[str, Any], prompt: str | None, job: Mapping[str, Any]) -> TableJob:
        """One from keyword arguments. Raises UsageError naming one that there is not."""
        known = [item.name for item in fields(cls)]
        for name in job:
            if name not in known:
                where = ": give it in sampling" if name in PARAM_KEYS else nearest(name, known)
                raise UsageError(f"generate: unknown argument {name!r}{where}")
        return cls(model, prompt, **job)

    def spec(self) -> JobSpec:
        """The job that this describes. Raises UsageError naming the key."""
        values: dict[str, Mapping[str, Any]] = {
            "model": {"path": self.model} if isinstance(self.model, str) else self.model,
            "input": {"columns": [], **self.input, **({} if self.prompt is None else {"prompt": self.prompt})},
            "sampling": self.sampling,
            "engine": self.engine,
        }
        spec = job_from_values(values, "generate")
        if self.key is None and not spec.sampling.is_greedy:
            raise UsageError(f"generate: {_UNKEYED}")
        return spec


def _needs_key(request: Request) -> RowError | None:
    return None if request.params.is_greedy else RowError(RowErrorCode.BAD_PARAM, _UNKEYED)


def _failed(code: str, message: str) -> dict[str, Any]:
    """The values of a row that cannot run."""
    return {"error": f"{code}: {message}"}


def _values(entry: JournalEntry) -> dict[str, Any]:
    """The values of the columns ``ADDED`` for a finished row."""
    made = json.loads(entry.payload)
    if entry.kind == "error":
        return _failed(made["code"], made["message"])
    values = {"text": made["text"], "finish_reason": made["finish_reason"], **made["usage"]}
    details = {name: made[name] for name in _DETAILS if name in made}
    return values | ({"details": encode_json(details).decode()} if details else {})


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
        spec = model.resolved(spec)
        if spec.embed.is_on:
            raise UsageError(f"generate: {spec.model.path} gives vectors, and tables take texts: use batchgen run")
        builder = model.builder(spec)
        check = _needs_key if job.key is None else lambda request: None
        maker = RowMaker(builder, model.record_builder(spec), check)
        backend = (engine_factory or load_engine)(spec, model)
        backend.prepare()
        engine = cast(SteppedEngine, backend.engine)
        self.max_num_seqs = engine.max_num_seqs
        self.num_open = 0  # rows without an answer
        self._key = job.key
        self._request_columns = spec.input.request_columns
        self._num_rows = 0
        self._lock = threading.Lock()  # guards all but the loop
        # By key, those with the same one after the other: the engine takes each key once at a time.
        self._open: dict[int, deque[tuple[Batch, int, Pending]]] = {}
        self.stats = backend.engine.stats
        self._loop = EngineLoop(engine, maker)

    def submit(self, table: pa.RecordBatch | pa.Table, on_done: Callable[[], object] = lambda: None) -> Batch:
        """Begin with a batch of rows; ``on_done`` is called once all rows have answers, here or by ``take``."""
        batch = Batch(table.num_rows, on_done)
        ready: list[Pending] = []
        with self._lock:
            for number, (columns, error) in enumerate(rows_at(table, range(table.num_rows), self._request_columns)):
                self._num_rows += 1
                key = error or self._key_of(columns)
                if isinstance(key, RowError):
                    batch.put(number, _failed(key.code, key.message))
                    continue
                waiting = self._open.setdefault(key, deque())
                waiting.append((batch, number, Pending(Record(key, "", 0, dict(columns), _NOWHERE), None)))
                self.num_open += 1
                if len(waiting) == 1:
                    ready.append(waiting[0][2])
            self._loop.assign(Assignment(tuple(ready)))
        if not table.num_rows:
            on_done()
        return batch

    def take(self, timeout_s: float = HEARTBEAT_S) -> None:
        """Wait for answers, and put them into their batches. Raises what the engine raised."""
        answers = cast(Sequence[JournalEntry], self._loop.collect(timeout_s).finished)
        following: list[Pending] = []
        with self._lock:
            for answer in answers:
                waiting = self._open[answer.key]
                batch, number, _ = waiting.popleft()
                self.num_open -= 1
                if waiting:
                    following.append(waiting[0][2])
                else:
                    del self._open[answer.key]
                batch.put(number, _values(answer))
            self._loop.assign(Assignment(tuple(following)))

    def abandon(self) -> None:
        """Call ``on_done`` of all batches, although they will have no answers: ``take`` has raised."""
        with self._lock:
            for batch in {batch for waiting in self._open.values() for batch, _, _ in waiting}:
                batch.on_done()

    def close(self) -> None:
        """End the threads after the step and the row under way."""
        self._loop.close()

    def _key_of(self, columns: Mapping[str, Any]) -> int | RowError:
        """The engine's key of a row: where draws are greedy, its number."""
        if self._key is None:
            return self._num_rows
        if self._key not in columns:
            return RowError(RowErrorCode.MISSING_COLUMN, f"no column {self._key!r} (the row's key)")
        value = columns[self._key]
        if isinstance(value, bool) or not isinstance(value, str | int):
            return wrong_type(f"column {self._key!r} (the row's key)", value, "a string or an integer").error
        return draw_of(value, self._num_rows)


def output_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of answers to rows of ``schema``: its columns, then ``ADDED``.

    A column with the name of an added one is kept as ``input_<name>``.
    """
    columns, added = dict.fromkeys(schema.names), frozenset(ADDED.names)
    kept = [item.with_name(kept_name(item.name, columns, added)) for item in schema]
    return pa.schema([*kept, *ADDED])
