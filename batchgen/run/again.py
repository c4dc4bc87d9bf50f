"""``batchgen retry --where``: runs rows whose answers were cut off again, under other sampling values.

Rows are read from the input, which must still hold them: a row counts as the one that was run only if its fingerprint
and its id are those of its record. Attempts are numbered, and a draw depends on the number, so that the same retries in
the same order give the same bytes. Which values are tried is written beside the journal first: a retry that was killed
goes on with them. What is not given is as in the retry before, or else as in the job. A row that fails now keeps the
answer that it had.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from batchgen.config.sampling import Again, ParamError
from batchgen.core.errors import ExitCode, ResumeMismatch, UsageError
from batchgen.core.json_line import is_count
from batchgen.core.records import BadRow, Record
from batchgen.core.storage import read_regular, write_atomic
from batchgen.core.units import counted
from batchgen.input.ids import UniqueIds
from batchgen.input.rows import chunked
from batchgen.input.source import Source, open_source
from batchgen.input.validator import Pending, RowValidator
from batchgen.output.finalize import finalize_again, read_records
from batchgen.output.journal import Journal
from batchgen.output.manifest import differences
from batchgen.output.record_builder import fingerprint
from batchgen.output.rundir import RunDir
from batchgen.output.segments import segments
from batchgen.run.invocation import Invocation, Outcome
from batchgen.run.loader import read_model
from batchgen.run.reports import has_failed_rows

_NAME = "again.json"  # in the journal's folder
Values = Mapping[str, Any]


def interrupted(run_dir: RunDir) -> tuple[str, Again | None] | None:
    """Which rows an interrupted retry was of, and the values that it tried; None where there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(read_regular(run_dir.retry / _NAME))
        return str(found["where"]), Again(int(found["attempt"]), dict(found["values"]))
    return ("failed", None) if segments(run_dir.retry) else None


def is_cut_off(record: Mapping[str, Any], where: str) -> bool:
    """Whether a sample of a record ended by its length ("length"), or before it was complete ("incomplete")."""
    samples = record.get("samples") or [record]
    if where == "length":
        return any(sample.get("finish_reason") == "length" for sample in samples)
    return any(sample.get("complete") is False for sample in samples)


class CutOffRows:
    """The rows of a finished run to be run again, in nine bytes for each row of the input."""

    def __init__(self, num_rows: int) -> None:
        self._names = array("Q", bytes(8 * num_rows))  # of the result, 0 for a row that is not one of these
        self._attempts = bytearray(num_rows)
        self._earlier: dict[int, Again] = {}
        self.num_attempts = 1
        self.count = 0

    @property
    def tried(self) -> Values:
        """The values of the last attempt."""
        last = self._earlier.get(self.num_attempts)
        return {} if last is None else last.values

    def __contains__(self, index: int) -> bool:
        return index < len(self._names) and self._names[index] != 0

    def add(self, record: Mapping[str, Any], where: str) -> None:
        index, retried, attempt = record["index"], record.get("retried"), 1
        if isinstance(retried, dict) and is_count(retried.get("attempt")) and 1 < retried["attempt"] < 256:
            attempt = retried["attempt"]
            values = {name: value for name, value in retried.items() if name not in ("attempt", "seed")}
            self._earlier[attempt] = Again(attempt, values)
        self.num_attempts = max(self.num_attempts, attempt)
        if index < len(self._names) and is_cut_off(record, where):
            self._names[index] = _name(record.get("id", index), record["timings"].get("fingerprint"))
            self._attempts[index] = attempt
            self.count += 1

    def holds(self, row: Pending) -> bool:
        """Whether a row of the input is the one that its record is of."""
        earlier = self._earlier.get(self._attempts[row.index])
        try:
            params = row.params if earlier is None else earlier.params(row.params)
        except ParamError:
            return False
        known = fingerprint(row.index, params, row.prompt_token_ids)
        return self._names[row.index] == _name(row.index if row.id is None else row.id, known)


def _holds(values: Values, some: Values) -> bool:
    """Whether ``some`` are among the values that a file holds, which has lists for tuples."""
    return {**values, **json.loads(json.dumps(some))} == values


def _name(row_id: object, known: object) -> int:
    return int.from_bytes(blake2b(f"{row_id}\0{known}".encode(errors="backslashreplace"), digest_size=8).digest()) | 1


class RunAgain(Invocation):
    """One retry of the rows that were cut off; ``where`` and ``values`` say which, and what to try."""

    where: str
    values: Values
    num_other = 0  # rows that the input does not hold as they were run

    def work(self) -> Outcome:
        """Run the rows again and put their answers into the outputs."""
        self.remotes.refuse_earlier(self.manifest)
        begun = interrupted(self.run_dir)
        if begun is not None and (
            begun[0] != self.where or begun[1] is None or not _holds(begun[1].values, self.values)
        ):
            raise UsageError(
                f"{self.run_dir.path} has a retry that was interrupted (--where {begun[0]}): finish it first with "
                f"batchgen retry {self.run_dir.path}"
            )
        source = self._open_source()
        cut, again = self._cut_off(begun[1] if begun else None)
        self.spec = replace(self.spec, again=again)
        try:
            with closing(Journal.open(self.run_dir.retry, self.manifest.shard)) as journal:
                if not cut.count and not journal.done:
                    journal.remove()
                    code = ExitCode.ROWS_FAILED if has_failed_rows(self.run_dir) else ExitCode.OK
                    return self.published(Outcome(code, ("no row was cut off: nothing to retry",)))
                plan = {"where": self.where, "attempt": again.attempt, "values": dict(again.values)}
                write_atomic(self.run_dir.retry / _NAME, json.dumps(plan).encode())
                return self._run(source, cut, journal)
        finally:
            with suppress(OSError):  # an empty journal is nothing to resume from
                self.run_dir.retry.rmdir()

    def _cut_off(self, begun: Again | None) -> tuple[CutOffRows, Again]:
        if self.manifest.num_rows is None:
            raise UsageError(f'{self.run_dir.manifest} lacks "num_rows", so its rows are not known')
        cut = CutOffRows(self.manifest.num_rows)
        with self.progress.phase("finding the rows that were cut off", "read"):
            for index, record in read_records(self.run_dir, self.spec):
                cut.add({**record, "index": index}, self.where)
        self.progress.rows_total = cut.count
        if begun is None and cut.num_attempts >= 255:
            raise UsageError(f"{self.run_dir.path} was retried 254 times; run the job anew")
        return cut, begun or Again(cut.num_attempts + 1, {**cut.tried, **self.values})

    def _open_source(self) -> Source:
        """The input and the model, checked to be those of the run. Raises ResumeMismatch."""
        if self.spec.input.path == ("-",):
            raise UsageError("the rows came on standard input, which is not kept: run them anew with other values")
        with self.progress.phase("checking the input", "read"):
            source, was = open_source(self.spec.input, self.run_dir.owns), self.manifest.fingerprints["input"]
            now = source.fingerprint(self.digests, was.get("files", []))
            found = differences({"input": was}, {"input": now})
            if found and source.growth(was.get("files", []), now["files"]) is None:
                raise ResumeMismatch(
                    f"the input of {self.run_dir.path} has changed, so that its rows cannot be run again:"
                    + "".join(f"\n  {line}" for line in found)
                )
        with self.progress.phase("checking the model", "load"):
            self.model = read_model(self.spec, self.manifest.begun_at)
            found = differences(self.manifest.fingerprints.get("model", {}), self.model.fingerprint(self.digests))
        if found:
            raise ResumeMismatch(f"{self.spec.model.path} is not the model of {self.run_dir.path}: {'; '.join(found)}")
        return source

    def _run(self, source: Source, cut: CutOffRows, journal: Journal) -> Outcome:
        where = self.spec.input
        self.progress.keeps_file = True
        with closing(UniqueIds(None)) as ids, closing(UniqueIds(None)) as new_ids:
            first = RowValidator(where, self.model.builder(replace(self.spec, again=None)), ids)
            again = RowValidator(where, self.model.builder(self.spec), new_ids)
            if not self.generate(self._todo(source, cut, journal, first), again, journal):
                return self.stopped()
        source.check_unchanged()
        counts = journal.counts
        with self.progress.phase("writing the outputs", "write"):
            num_left = sum(is_cut_off(result, self.where) for result in _finished(journal, errors=False))
            reason = next((error["message"] for error in _finished(journal, errors=True)), "")
            finalize_again(self.run_dir, self.spec, journal)
            report = self.follow_report(self.run_dir.retry)
        outcome = self.finished(journal, report)
        lines = [f"{counted(counts.results, 'row')} run again, {num_left:,} of them cut off again"]
        if counts.errors:
            lines.append(f"{counted(counts.errors, 'row')} failed and kept the answer they had; the first: {reason}")
        if self.num_other:
            lines.append(f"{counted(self.num_other, 'row')} not run again: mended by hand, and not so in the input")
        return self.published(replace(outcome, lines=(*lines, *outcome.lines)))

    def _todo(self, source: Source, cut: CutOffRows, journal: Journal, first: RowValidator) -> Iterator[Record]:
        rows = source.read(None, lambda index: index in cut and index not in journal.done)
        for chunk in chunked(rows):
            for answer in first.validate(chunk):
                if isinstance(answer, BadRow) or not cut.holds(answer[0]):
                    self.num_other += 1
                else:
                    yield answer[0].record


def _finished(journal: Journal, *, errors: bool) -> Iterator[dict[str, Any]]:
    """The records of the rows that failed, or of those that did not."""
    return (json.loads(journal.payload(index)) for index in journal.done.indexes(errors=errors))
