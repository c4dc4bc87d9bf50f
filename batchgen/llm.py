"""A loaded model for Python programs: ``LLM``, with the names of ``vllm.LLM``, answers prompts, chats and tables.

Nothing is journalled here: it is for notebooks, and for Ray Data, Spark and Daft, which repeat what they lose.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_values, sections_of
from batchgen.config.record_fields import kept_name
from batchgen.config.sampling import ParamError, merge_params, values_of
from batchgen.core.errors import RowError, RowErrorCode, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor, Request, Row, SamplingParams
from batchgen.core.units import counted, one_line
from batchgen.input.formats.arrow import rows_at
from batchgen.input.in_memory import json_lines
from batchgen.input.rows import RowProblem, parse_json, prepared, with_id
from batchgen.output.formats.parquet import fixed_types, table_of
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import EngineFactory, load_engine, read_model
from batchgen.run.results import entry_of, failed_entry

_NOWHERE = Cursor(0, 0, 0, 0)
_NEEDS_ID = 'draws at random need an id in tables: name a column of unique values, as id="..."'
_PLACES = ("id", "index", "fingerprint")  # a run finds a record by these; they mean nothing in a table
_OF_JOBS = {  # keys of a job that say nothing of how a request is answered
    "input": ("path", "format", "delimiter", "encoding", "limit", "regenerate"),
    "output": ("path", "format", "logprobs_dtype", "reuse", "publish"),
    "eval": ("expected",),
}


class LLM:
    """A model that is loaded once and answers until ``close``, or until the end of a ``with``.

    Calls of several threads follow one another. Ctrl-C or an error within a call ends that call alone: the next one
    loads the weights again. Rows that cannot run have the record of ``errors.jsonl`` in their place, with a ``code``
    and a ``message``, and a warning counts them.

    Example:
        >>> with LLM("LiquidAI/LFM2-350M") as llm:  # doctest: +SKIP
        ...     [record] = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], max_tokens=8)
        ...     print(record["text"])
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Mapping[str, Any],
        prompt: str | None = None,
        *,
        engine_factory: EngineFactory | None = None,
        **keys: Any,
    ) -> None:
        """``keys`` may be any keys of a job file, such as ``quantization``, ``max_num_seqs``, ``pooling`` or ``id``.

        ``prompt`` is the column or template of the rows of tables; ``sampling`` the default of all calls. Raises
        UsageError for a key that is unknown, impossible, or for jobs alone; ModelError, OutOfMemory.
        """
        sections = sections_of({"model": model, "prompt": prompt, **keys}, "LLM")
        _refuse_jobs(sections)
        spec = job_from_values(sections, "LLM")
        self._model = read_model(spec)
        if self._model.tokenizer is None:
            raise UsageError("LLM: the model has no tokenizer: name one as tokenizer=")
        self._spec = self._model.resolved(spec)
        self._factory = engine_factory or load_engine
        self._lock = threading.RLock()
        self._loaded: LoadedEngine | None = None
        self._is_closed = False
        self._ready()

    def __reduce__(self) -> NoReturn:
        raise UsageError("LLM: a loaded model cannot be copied or pickled: make one in each process")

    def __repr__(self) -> str:
        return f"<LLM: {self._spec.model.path}{', closed' if self._is_closed else ''}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory of the weights back; later calls raise UsageError."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True, **sampling: Any
    ) -> list[dict[str, Any]]:
        """A record per prompt, in order, as in ``outputs.jsonl``; prompts are sent as they are, without a template.

        ``prompts`` are one string or rows of any kind that ``batchgen.generate`` takes. ``sampling`` wins over
        ``sampling_params``, and a row's own values in its column ``sampling`` over both. Raises UsageError for
        impossible values.
        """
        spec = self._with(sampling_params, sampling)
        raw = replace(spec.input, chat_template="none", system=None, continue_final_message=False)
        return self._answered(prompts, replace(spec, input=raw), use_tqdm)

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """A record per chat, in order; ``messages`` is one chat or a list of them.

        With ``continue_final_message`` each text continues the chat's last message, which is the assistant's.
        """
        if isinstance(messages, str):
            raise UsageError("LLM.chat: messages is a string: a chat is a list of messages")
        messages = messages if isinstance(messages, Sequence) or not isinstance(messages, Iterable) else [*messages]
        if not isinstance(messages, Sequence):
            raise UsageError(f"LLM.chat: messages is of type {type(messages).__name__}, not a chat or a list of chats")
        chats = [messages] if len(messages) and isinstance(messages[0], Mapping) else messages
        more = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        columns = {name: value for name, value in more.items() if value is not None}
        rows = [{"messages": [*chat], **columns} for chat in chats]
        spec = _asks(self._with(sampling_params, sampling), messages="messages")
        continues = continue_final_message or spec.input.continue_final_message
        return self._answered(
            rows, replace(spec, input=replace(spec.input, continue_final_message=continues)), use_tqdm
        )

    def embed(self, prompts: Any, *, use_tqdm: bool = True) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The embeddings of texts, float32 ``[n, d]``.

        Raises UsageError for a text that cannot be embedded, and if the model generates text (see ``pooling``).
        """
        spec = self._spec
        if not spec.embed.is_on or self._model.config.labels or spec.embed.pooling == "tokens":
            raise UsageError(f'LLM.embed: {spec.model.path} does not give one embedding per text: give pooling="mean"')
        records = self._answered(prompts, spec, use_tqdm, warns=False)
        if failed := next((record for record in records if "code" in record), None):
            raise UsageError(f"LLM.embed: prompts[{failed['index']}]: {failed['code']}: {failed['message']}")
        vectors = [record["embedding"] for record in records]
        size = spec.embed.dimensions or self._model.config.hidden_size
        return np.array(vectors, np.float32).reshape(len(vectors), -1 if vectors else size)

    def classify(
        self, prompts: Any, labels: Sequence[str] | None = None, *, use_tqdm: bool = True
    ) -> list[dict[str, Any]]:
        """A record per text, with its label and the scores of all labels: ``labels``, or the classifier's own.

        Raises UsageError if ``labels`` are given although the checkpoint has its own, or are missing.
        """
        if isinstance(labels, str):
            raise UsageError(f"LLM.classify: labels is one string: give a list, [{labels!r}, ...]")
        own = self._model.config.labels if self._spec.embed.is_on else ()
        names = self._spec.sampling.labels if labels is None else [str(label) for label in labels]
        if bool(own) == bool(names):
            what = f"has labels of its own: {', '.join(own)}" if own else "has no labels of its own: give labels=[...]"
            raise UsageError(f"LLM.classify: {self._spec.model.path} {what}")
        spec = self._spec if own else self._with(None, {"labels": names})
        return self._answered(prompts, spec, use_tqdm)

    def __call__(self, batch: Any) -> pa.Table:
        """The rows of a table with their results, for Ray Data's ``map_batches`` and Spark's ``mapInArrow``.

        ``batch`` is an Arrow table or record batch, a pandas DataFrame or a dict of arrays. The fields of records
        follow its columns; ``error`` is null or "code: message". Random draws need ``id``, the column that keys them,
        since a pipeline may divide rows into other batches when it repeats them.
        """
        table = _as_table(batch)
        spec = replace(self._spec, input=replace(self._spec.input, columns=()))
        read = rows_at(table, range(table.num_rows), spec.input.request_columns, spec.input.spares)
        rows = [Row(index, "", index + 1, values, _NOWHERE, error=error) for index, (values, error) in enumerate(read)]
        records = [
            {**record, "error": None} if "code" not in record else {"error": f"{record['code']}: {record['message']}"}
            for record in self._records(rows, spec, needs_id=True)
        ]
        answers = _columns(records, spec)
        columns, names = dict.fromkeys(table.column_names), frozenset(answers.column_names)
        kept = [kept_name(name, columns, names) for name in table.column_names]
        return pa.table([*table.columns, *answers.columns], names=[*kept, *answers.column_names])

    def _with(self, params: SamplingParams | None, over: Mapping[str, Any]) -> JobSpec:
        """The job with other sampling values. Raises UsageError."""
        if self._spec.embed.is_on:
            raise UsageError(f"LLM: {self._spec.model.path} gives embeddings, not text: use embed or classify")
        if not isinstance(params, SamplingParams | None):
            what = f"sampling_params is of type {type(params).__name__}, not SamplingParams"
            raise UsageError(f"LLM: {what}: a row's own values go into its column sampling")
        values = {} if params is None else values_of(params)
        base = self._spec.sampling if params is None else SamplingParams()
        try:
            return replace(self._spec, sampling=merge_params(base, {**values, **over}))
        except ParamError as error:
            raise UsageError(f"LLM: {error}") from None

    def _answered(self, rows: Any, spec: JobSpec, shows: bool, *, warns: bool = True) -> list[dict[str, Any]]:
        """The records of rows in memory, or of one string.

        Strings, and rows that only have a column ``prompt``, are prompts whatever columns the job names.
        """
        rows = [rows] if isinstance(rows, str) else rows
        parsed = [_parsed(*item) for item in enumerate(json_lines(rows, spec.input.request_columns))]
        if all(row.error is not None or [*row.columns] == ["prompt"] for row in parsed):
            spec = _asks(spec, prompt="prompt")
        records = self._records(parsed, spec, shows=shows)
        if warns and (num_failed := sum("code" in record for record in records)):
            what = f"{num_failed:,} of {counted(len(records), 'row')} failed: their records have a code and a message"
            warnings.warn(what, stacklevel=3)
        return records

    def _records(
        self, rows: Iterable[Row], spec: JobSpec, *, shows: bool = False, needs_id: bool = False
    ) -> list[dict[str, Any]]:
        """The output record of each row, or its error record, in order."""
        listed = [with_id(row, spec.input) for row in rows]
        made = self._model.record_builder(spec)
        records: list[Any] = [None] * len(listed)
        pending: dict[int, Row] = {}

        def requests() -> Iterator[Request]:
            for row, request in prepared(listed, self._model.builder(spec).build):
                is_unkeyed = needs_id and row.id is None and not row.params.is_greedy
                if request is None or is_unkeyed:
                    failed = row.failed(RowError(RowErrorCode.BAD_PARAM, _NEEDS_ID)) if request else row
                    records[row.index] = json.loads(failed_entry(failed, made).payload)
                else:
                    pending[row.index] = row
                    yield request

        with self._lock, tqdm(total=len(listed), unit="row", disable=None if shows else True) as bar:
            engine = self._ready().engine
            try:
                for result in engine.run(requests()):
                    entry = entry_of(pending.pop(result.key), result, made)
                    records[result.key] = json.loads(entry.payload)
                    bar.update()
            except BaseException:  # the engine holds what the call has left
                self._drop()
                raise
        return records

    def _ready(self) -> LoadedEngine:
        """The loaded model. Raises UsageError once it is closed."""
        if self._is_closed:
            raise UsageError("LLM: it was closed: make a new one")
        if self._loaded is None:
            self._loaded = self._factory(self._spec, self._model)
            self._loaded.prepare()
        return self._loaded

    def _drop(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


def _refuse_jobs(sections: Mapping[str, Any]) -> None:
    """Raises UsageError for keys that would have no effect here."""
    keys = [f"cluster.{name}" for name in sections.get("cluster", {})]
    for section, names in _OF_JOBS.items():
        values = sections.get(section, {})
        keys += [f"{section}.{name}" for name in names if isinstance(values, Mapping) and name in values]
    if keys:
        what = "is a key of jobs: batchgen.generate takes it"
        what = what if len(keys) == 1 else "are keys of jobs: batchgen.generate takes them"
        raise UsageError(f"LLM: {', '.join(keys)} {what}")


def _asks(spec: JobSpec, prompt: str | None = None, messages: str | None = None) -> JobSpec:
    """The job with its prompt or its chat in another column."""
    return replace(spec, input=replace(spec.input, prompt=prompt, messages=messages, prompt_token_ids=None))


def _parsed(index: int, line: bytes) -> Row:
    """The row of a line of JSON."""
    text = line.decode(errors="replace")
    try:
        return Row(index, "", index + 1, parse_json(text), _NOWHERE)
    except RowProblem as problem:
        return Row(index, "", index + 1, {}, _NOWHERE, error=problem.error, text=text.rstrip("\n"))


def _as_table(batch: Any) -> pa.Table:
    """A batch in one of the formats of Ray Data and Spark, as a table."""
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping):
        try:
            return pa.table({name: [_plain(value) for value in values] for name, values in batch.items()})
        except pa.ArrowException as error:
            raise UsageError(f"LLM: the batch is not a table: {one_line(error)}") from None
    if not hasattr(batch, "iloc"):
        what = "an Arrow table, a DataFrame or a dict of arrays"
        raise UsageError(
            f"LLM: the batch is of type {type(batch).__name__}, not {what}; lists are for generate and chat"
        )
    return pa.Table.from_pandas(batch, preserve_index=False)


def _plain(value: Any) -> Any:
    """A value of a NumPy array as a list, a number or a text of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _columns(records: Sequence[Mapping[str, Any]], spec: JobSpec) -> pa.Table:
    """The fields of records as columns, with the types of ``outputs.parquet``."""
    fixed = {name: kind for name, kind in fixed_types(spec).items() if name not in _PLACES}
    left_out = (*_PLACES, "error")
    lines = [encode_json({name: value for name, value in record.items() if name not in left_out}) for record in records]
    table = table_of(lines, fixed).drop_columns("id")
    errors = pa.array([record["error"] for record in records], pa.string())
    return table.append_column("error", errors)
