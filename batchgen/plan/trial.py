"""Trial of a job's first rows: each prompt as the model sees it, and the model's answer, for ``batchgen try``.

Files of the run directory are neither written nor read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import packed_keys
from batchgen.core.chat_rows import ChatRow
from batchgen.core.errors import UsageError
from batchgen.core.logprobs import unpacked
from batchgen.core.units import counted
from batchgen.input.rows import prepared
from batchgen.output.rundir import RunDir
from batchgen.run.loader import EngineFactory, load_engine
from batchgen.run.opened import open_job
from batchgen.run.results import Turns, entry_of, failed_entry

_MAX_RECORD_CHARS = 500  # of a record without a text, such as a vector


@dataclass(frozen=True, slots=True)
class Tried:
    """A row that was tried: its line, its prompt with special tokens, and its record or error record."""

    line: int
    num_prompt_tokens: int
    prompt: str
    record: Mapping[str, Any]

    def text(self) -> str:
        """The row as text: its prompt, then the answer."""
        location = f"row {self.record['index']} (line {self.line})"
        if "code" in self.record:
            return f"{location}: {self.record['code']}: {self.record['message']}"
        turns = f", turn {len(self.record['finish_reasons'])}" if "finish_reasons" in self.record else ""
        sent = f"{location}{turns}, {counted(self.num_prompt_tokens, 'prompt token')}:\n{_indented(self.prompt)}"
        num_tokens = counted(self.record["usage"].get("completion_tokens", 0), "token")
        if samples := self.record.get("samples"):
            answers = [
                f"answer {n}, {one['finish_reason']}:\n{_indented(one['text'])}" for n, one in enumerate(samples, 1)
            ]
            return "\n".join([sent, f"{counted(len(samples), 'answer')}, {num_tokens}", *answers])
        answer = self.record.get("text") if "finish_reason" in self.record else None
        if not isinstance(answer, str):
            answer = json.dumps({**self.record, "timings": None}, ensure_ascii=False)[:_MAX_RECORD_CHARS]
        facts = [num_tokens, self.record.get("finish_reason")]
        return f"{sent}\nanswer, {', '.join(filter(None, facts))}:\n{_indented(answer)}"

    def to_dict(self) -> dict[str, Any]:
        return {"line": self.line, "prompt": self.prompt, "record": dict(self.record)}


def try_job(
    spec: JobSpec, num_rows: int, note: Callable[[str], object], engine_factory: EngineFactory | None = None
) -> Iterator[Tried]:
    """Run the first rows of a job and yield them in order; ``note`` shows a line to the user.

    ``engine_factory`` replaces the model's own engine. Raises as a run does before its first row: UsageError,
    ModelError, OutOfMemory.
    """
    with open_job(spec, RunDir(Path(spec.output.path))) as job, job.validator() as validator:
        for line in job.check_columns():
            note(line)
        answers = [*prepared(islice(job.source.read(), num_rows), validator.build)]
    if not answers:
        raise UsageError("the input has no rows")
    requests = [request for _, request in answers if request is not None]
    results: dict[int, Any] = {}
    if requests:  # else no weights are loaded
        with closing((engine_factory or load_engine)(job.spec, job.model)) as loaded:
            loaded.prepare()
            pending = {row.key: row for row, request in answers if request is not None}
            turns = Turns(job.builder, pending)
            ended = [*filter(None, map(turns.take, loaded.engine.run(turns.requests(requests))))]
            results = {row.key: (row, result) for row, result in ended}
            for line in loaded.notes:
                note(line)
    for row, request in answers:
        if request is None:
            yield Tried(row.line, 0, "", json.loads(failed_entry(row, job.records).payload))
            continue
        (ended, result), tokenizer = results[row.key], job.model.tokenizer
        ids = ended.prompt_token_ids if isinstance(ended, ChatRow) else request.prompt_token_ids  # last turn's prompt
        prompt = tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else str([*ids])
        record = json.loads(entry_of(ended, result, job.records).payload)
        yield Tried(row.line, len(ids), prompt, unpacked(record, packed_keys(job.spec)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.split("\n"))
