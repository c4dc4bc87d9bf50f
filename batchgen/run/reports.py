"""Reports of run directories: the totals and facts that go into them, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchgen.config.job import KEYS, JobSpec
from batchgen.config.record_fields import columns_of, packed_keys
from batchgen.core.errors import StorageError, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import unpacked
from batchgen.core.structured import parsed
from batchgen.input.rows import RowProblem
from batchgen.input.template import Template
from batchgen.output.finalize import read_errors, read_records
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.report.accuracy import Finder
from batchgen.report.build import read_report_file
from batchgen.report.compare import answer_changes
from batchgen.report.facts import NUM_ANSWERS, NUM_ERRORS, Table, answers, changes, failed
from batchgen.report.rows import RowTotals

if TYPE_CHECKING:  # slow to import, and ``status`` does not need it
    from batchgen.run.loaded_engine import LoadedEngine


_ANSWERS = ("text", "tool_calls", "label", "embedding", "embeddings")  # what of a record or sample is its answer


def _expected(spec: JobSpec) -> Finder | None:
    """The function that finds the right answer in an output record; None if the job has no column for it."""
    name = spec.eval.expected
    return None if name is None else lambda record: columns_of(spec, record).get(name)


def journal_totals(journal: Journal, spec: JobSpec) -> RowTotals:
    """Totals of the rows in a journal. Raises StorageError if a row cannot be read back."""
    has_choices = "choice" in parsed(spec.sampling.structured_outputs)
    totals = RowTotals(_expected(spec), spec.eval.extract, has_choices)
    for index in journal.done.indexes(errors=False):
        totals.add_result(json.loads(journal.payload(index)))
    for index in journal.done.indexes(errors=True):
        totals.add_error(json.loads(journal.payload(index)))
    return totals


def job_facts(spec: JobSpec, manifest: Manifest, loaded: LoadedEngine | None) -> dict[str, Any]:
    """The part of a report that describes the job: model, input, shard, numerics, threads, engine sizes."""
    return {
        **spec.model.named,
        "input": spec.input.shown_path,
        "shard": str(manifest.shard),
        "created_at": manifest.created_at,
        "numerics": manifest.fingerprints.get("numerics", {}),
        "threads": loaded.threads if loaded else None,
        **(loaded.facts() if loaded else {}),
    }


def read_report(run_dir: RunDir) -> dict[str, Any]:
    """The report of a finished run. Raises UsageError if it does not exist."""
    if not run_dir.report.exists():
        hint = "not a run directory"
        if run_dir.is_complete():
            hint = "its outputs are complete: run the same command again to write it"
        elif run_dir.is_begun():
            hint = "the run is not finished: see batchgen status"
        raise UsageError(f"no report.json in {run_dir.path} ({hint})")
    return read_report_file(run_dir.report)


def last_report(run_dir: RunDir) -> dict[str, Any] | None:
    """The report of a run, None if it is missing or cannot be read."""
    with suppress(StorageError, UsageError):
        return read_report(run_dir)
    return None


def shown_rows(run_dir: RunDir, report: Mapping[str, Any]) -> list[Table]:
    """Tables of a run: wrong answers, first rows, failed rows, and its job.

    Raises as ``read_records``, KeyError or TypeError if ``errors.jsonl`` was edited.
    """
    spec = _spec(run_dir)
    first = [record for _, record in islice(read_records(run_dir, spec), NUM_ANSWERS)]
    wrong = _wrong(run_dir, spec, report)
    lines = (json.loads(line) for _, line in islice(read_errors(run_dir), NUM_ERRORS))
    errors = [{**line, "id": line.get("custom_id") or line["id"], **line.get("error", {})} for line in lines]
    accuracy = report.get("accuracy") or {"total": 0, "correct": 0}
    num_wrong = accuracy["total"] - accuracy["correct"]
    more = f": the first {len(wrong)} of {num_wrong:,}" if len(wrong) < num_wrong else ""
    listed = {f"Wrong answers{more}": wrong, "The first answers": first}
    shown = [
        answers(title, [(_prompt(spec, record), record) for record in records], _expected(spec))
        for title, records in listed.items()
    ]
    return [*shown, failed(errors), _job(spec)]


def _wrong(run_dir: RunDir, spec: JobSpec, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of the wrong answers that the report names."""
    ids = {str(row["id"]) for row in (report.get("accuracy") or {}).get("wrong", ())}
    records = (record for _, record in read_records(run_dir, spec) if str(record["id"]) in ids)
    return [*islice(records, len(ids))]


def _prompt(spec: JobSpec, record: Mapping[str, Any]) -> str:
    """The prompt of a record before the chat template, if its columns contain it; otherwise ""."""
    columns = columns_of(spec, record)
    if spec.input.regenerate and spec.input.messages:
        columns = {spec.input.messages: record["messages"][:-1]}
    if (template := spec.input.prompt) and "{" in template:
        with suppress(RowProblem):
            return Template.parse(template).render(columns)
    names = (template,) if template else (spec.input.messages or "messages", "prompt", "text")
    value = next((columns[name] for name in names if columns.get(name)), "")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value if isinstance(value, str) else ""


def _job(spec: JobSpec) -> Table:
    """The keys of a job that are not at their defaults."""
    rows = [
        (f"{section}.{name}", encode_json(value).decode().strip('"'))
        for section, values in spec.to_dict().items()
        for name, value in values.items()
        if value != (item := KEYS[section][name]).written(item.default) and value not in (None, (), "")
    ]
    return Table("The job", ("key", "value"), rows, is_prose=True, is_folded=True)


def compared_answers(now: RunDir, before: RunDir) -> dict[str, Any]:
    """Differences of the answers of two finished runs, see ``answer_changes``. Raises as ``read_records``."""
    return answer_changes(_answers(now), _answers(before))


def changed_rows(now: RunDir, before: RunDir, ids: Sequence[str]) -> Table:
    """Prompts and both runs' answers for rows whose answers changed (``answer_changes``)."""
    rows_of_runs = []
    for run_dir in (before, now):
        spec = _spec(run_dir)
        records = ((str(record["id"]), record) for _, record in read_records(run_dir, spec))
        wanted = islice(((row_id, record) for row_id, record in records if row_id in ids), len(ids))
        rows_of_runs.append({row_id: (_prompt(spec, record), record) for row_id, record in wanted})
    was, is_now = rows_of_runs
    rows = [(*is_now[row_id], was[row_id][1]) for row_id in ids if row_id in was and row_id in is_now]
    return changes(rows)


def _spec(run_dir: RunDir) -> JobSpec:
    if (manifest := run_dir.read_manifest()) is None:
        raise UsageError(f"{run_dir.path} is not a run directory: it has no job.json")
    return manifest.spec(run_dir.manifest)


def _answers(run_dir: RunDir) -> Iterator[tuple[str, str]]:
    """The id and the answers of each row; the answers are "" if there is no text, e.g. if prompts are scored."""
    spec = _spec(run_dir)
    names = ("messages",) if spec.input.regenerate else _ANSWERS
    for _, record in read_records(run_dir, spec):
        samples = [{name: sample.get(name) for name in names} for sample in record.get("samples") or [record]]
        answers = [unpacked(sample, packed_keys(spec)) for sample in samples]
        has_any = any(value for answer in answers for value in answer.values())
        yield str(record["id"]), encode_json(answers).decode() if has_any else ""
