"""Kill a process at its k-th call to the operating system, for every k, and see what the next run makes of it.

``python faults.py SCENARIO FOLDER EVERY`` runs a scenario in forked children: once undisturbed, then killed at each
call, or each fifth one if ``EVERY`` is 5, until a run gets through; each time what was left is run again, undisturbed,
and all files are compared with those of the first run. A ``write`` that is hit leaves half of its bytes. Prints the
number of kills.
"""

import functools
import io
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.job import InputSpec, JobSpec, ModelSpec, OutputSpec
from batchgen.core.records import WHOLE, Cursor, Shard
from batchgen.core.storage import remove_folder
from batchgen.output import journal as journal_module
from batchgen.output.finalize import finalize, finalize_retry, read_errors
from batchgen.output.formats.parquet import infer_fields
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.report.build import build_report, write_report
from batchgen.report.rows import LATENCIES
from batchgen.run.merge import merge, write_merged_report
from batchgen.run.reports import output_totals

NUM_ROWS = 40
KILLED = 77
CALLS = ("write", "fsync", "open", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")


def record(index: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": index}
    text = "naïve\n" * (index % 5)
    timings = dict.fromkeys((*LATENCIES, "cached_tokens", "preemptions"), 0)
    head = {"id": f"q{index}", "index": index, "text": text, "finish_reason": "stop"}
    return {**head, "usage": usage, "timings": timings}


def dead_letter(index: int) -> dict[str, Any]:
    where = {"id": None, "index": index, "source": "in.jsonl", "line": index + 1}
    return {**where, "code": "bad_json", "message": "not JSON", "row": "{"}


def is_bad(index: int) -> bool:
    return index % 9 == 4


def append(journal: Journal, index: int, *, failed: bool) -> None:
    after = Cursor(0, 10 * (index + 1), 0, index + 1)
    payload = dead_letter(index) if failed else record(index)
    journal.append(JournalEntry(index, after, "error" if failed else "result", payload))


def job_of(output_format: str) -> JobSpec:
    return JobSpec(ModelSpec("m"), InputSpec(("in.jsonl",)), OutputSpec("", format=output_format))


def run_job(path: Path, output_format: str, shard: Shard = WHOLE) -> None:
    """What ``batchgen run`` does to a run directory, with rows that need no engine and finish out of order."""
    job = job_of(output_format)
    run_dir = RunDir(path)
    run_dir.create()
    with run_dir.lock():
        if run_dir.is_complete():
            remove_folder(run_dir.journal)
            return
        if run_dir.read_manifest() is None:
            run_dir.write_manifest(Manifest(job.to_dict(), job.output_keys(), shard=shard))
        journal = Journal.open(run_dir.journal, shard)
        start = journal.resume_cursor.index if journal.resume_cursor else 0
        todo = [i for i in range(start, NUM_ROWS) if shard.owns(i) and i not in journal.done]
        random.Random(0).shuffle(todo)
        for step, index in enumerate(todo):
            append(journal, index, failed=is_bad(index))
            if step % 7 == 6:
                journal.commit()
            if step == 16:
                journal.save_partials(dict.fromkeys(todo[17:20], (1, 2, 3)))
        finalize(run_dir, job, journal, num_rows=NUM_ROWS)
        journal.remove()


def run_retry(path: Path, output_format: str) -> None:
    """What ``batchgen retry`` does: failed rows run again, all but row 4 with success now."""
    run_dir = RunDir(path)
    with run_dir.lock():
        journal = Journal.open(run_dir.retry)
        for index in [index for index, _ in read_errors(run_dir) if index not in journal.done]:
            append(journal, index, failed=index == 4)
            journal.commit()
        finalize_retry(run_dir, job_of(output_format), journal)
        journal.remove()


def run_anew(path: Path) -> None:
    """What ``--overwrite`` does; when killed it is run again as a plain ``run`` or with ``--overwrite`` again."""
    RunDir(path).clear()
    run_job(path, "jsonl")


def run_merge(path: Path) -> None:
    """What ``batchgen merge`` does, from the making of the target's folder to the report."""
    folders = [path / f"shard-{number}" for number in (3, 1, 2)]
    merge(folders, path / "new" / "merged")
    assert not write_merged_report(folders, path / "new" / "merged")


def prepare_shards(path: Path, output_format: str) -> None:
    for number in (1, 2, 3):
        folder = path / f"shard-{number}"
        run_job(folder, output_format, Shard(number, 3))
        totals = output_totals(RunDir(folder), job_of(output_format))
        about = {"model": "m", "input": [], "created_at": "", "numerics": {}, "threads": 1, "shard": f"{number}/3"}
        write_report(RunDir(folder).report, build_report(totals, {}, {**about, "roofline": None}))


def prepare_other_run(path: Path) -> None:
    run_job(path, "parquet")
    run_dir = RunDir(path)
    run_dir.report.write_bytes(b"{}")
    run_dir.write_manifest(replace(run_dir.read_manifest() or Manifest({}, {}), created_at="2026-01-01"))


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "jsonl": (lambda path: None, lambda path: run_job(path, "jsonl")),
    "parquet": (lambda path: None, lambda path: run_job(path, "parquet")),
    "openai": (lambda path: None, lambda path: run_job(path, "openai-batch")),
    "retry-jsonl": (lambda path: run_job(path, "jsonl"), lambda path: run_retry(path, "jsonl")),
    "retry-parquet": (lambda path: run_job(path, "parquet"), lambda path: run_retry(path, "parquet")),
    "overwrite": (prepare_other_run, run_anew),
    "merge-jsonl": (lambda path: prepare_shards(path, "jsonl"), run_merge),
    "merge-parquet": (lambda path: prepare_shards(path, "parquet"), run_merge),
}


def kill_at(step: int) -> None:
    """From now on count this process's calls to the system and end it, without any cleaning up, at call ``step``."""
    calls = itertools.count()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == step:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(KILLED)
            return call(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    io.open = counted("open", io.open)  # what pathlib opens files with


def in_child(act: Callable[[], None]) -> int:
    """Run ``act`` in a forked process; its exit code."""
    pid = os.fork()
    if not pid:
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    """All that lies in a folder but the lock, which a killed process leaves behind; a report without its date."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "run.lock")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    dated = {name: json.loads(value) for name, value in found.items() if name.endswith("report.json")}
    return found | {name: json.dumps({**value, "finished_at": None}).encode() for name, value in dated.items()}


def main(scenario: str, folder: Path, every: int) -> int:
    """Prove one scenario; returns how many kills it survived. Raises AssertionError at the first it did not."""
    infer_fields([b'{"id": 0}'])  # imports pyarrow, and pandas with it, once here instead of in every child
    journal_module.SEGMENT_BYTES = 2000
    journal_module.SYNC_SECONDS = journal_module.MAX_SYNC_SECONDS = 3600.0  # commits where the scenario says
    prepare, act = SCENARIOS[scenario]
    before, path = folder / "before", folder / "run"
    before.mkdir()
    assert in_child(lambda: prepare(before)) == 0
    undisturbed: dict[str, bytes] = {}
    for step in itertools.count(-1, every):  # -1 is never reached: undisturbed
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(before, path)
        code = in_child(lambda step=step: (kill_at(step), act(path))[1])  # type: ignore[misc]
        assert code in (0, KILLED), f"killed at call {step}: exit code {code}"
        if step < 0:
            undisturbed = content(path)
        elif code == 0:
            return step // every
        assert in_child(lambda: act(path)) == 0, f"killed at call {step}: cannot go on"
        found = content(path)
        assert found.keys() == undisturbed.keys(), f"killed at call {step}: {found.keys()}"
        differing = [name for name in found if found[name] != undisturbed[name]]
        assert not differing, f"killed at call {step}: {differing} differ"
    raise AssertionError("unreachable")


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
