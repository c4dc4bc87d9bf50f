"""Hostile inputs through the command line, each in a forked process of bounded time and memory.

``python hostile_runs.py FOLDER COUNT SEED`` runs ``COUNT`` cases of ``hostile_inputs`` with the stub engine and prints
as JSON how many there were of each kind, how they ended, and what broke a promise: an exit code that is not
documented, a traceback, a row that is lost or there twice, too much time or memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from fault_runs import MODEL, in_child
from hostile_inputs import Case, hostile_cases
from stub_engine import stub_factory

import batchgen.run.job  # noqa: F401 - imported once here instead of in every child
from batchgen.cli.main import call
from batchgen.output.formats.parquet import infer_fields

MAX_S = 600  # of wall time: a guard against a run that never ends, not a claim; machines may be ten times slower
MAX_RSS_BYTES = 1 << 30
DONE, USAGE, FAILED_ROWS, STOPPED = 0, 2, 3, 75
_SHOWN_CHARS = 1500


def prepare(case: Case, folder: Path) -> None:
    """Write the files of a case."""
    folder.mkdir()
    (folder / "job.toml").write_bytes(case.job.replace(b"{model}", str(MODEL).encode()))
    for name, content in case.files.items():
        (folder / os.fsencode(name).decode(errors="surrogateescape")).write_bytes(content)
    for name, target in case.links.items():
        if target == "FIFO":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(target)


def run(case: Case, folder: Path) -> tuple[int, str, int]:
    """The case's exit code, what it said and its peak of memory in bytes."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        _child(case, folder, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), said, usage.ru_maxrss * 1024


def _child(case: Case, folder: Path, said: int) -> NoReturn:
    def act() -> int:
        signal.alarm(MAX_S)  # ends the process, as nothing handles it
        os.environ |= {"HF_HUB_OFFLINE": "1", "HOME": str(folder / "home")}
        return call(["run", "job.toml", *case.arguments], engine_factory=stub_factory())

    in_child(folder, os.devnull, said, act)


def check(case: Case, folder: Path, code: int, said: str, rss_bytes: int) -> None:
    """Raises AssertionError where the run broke a promise."""
    assert "Traceback" not in said, said[-_SHOWN_CHARS:]
    assert "this is a bug" not in said, said[-_SHOWN_CHARS:]
    assert code in (DONE, USAGE, FAILED_ROWS, STOPPED), f"exit code {code}: {said[-_SHOWN_CHARS:]}"
    assert rss_bytes < MAX_RSS_BYTES, f"{rss_bytes >> 20} MiB"
    # A value as given may be in it, and some are of 5,000 characters.
    assert len(said) < 12_000, f"{len(said)} characters: {said[:_SHOWN_CHARS]}"
    assert code != USAGE or "batchgen: error: " in said, said
    assert not set(said) & set("\x1b\x9b\u202e\0"), f"raw control characters: {said!r}"
    if case.num_rows is not None:
        assert code in (DONE, FAILED_ROWS), f"a job with a sound row was refused: {said[-_SHOWN_CHARS:]}"
    if code in (DONE, FAILED_ROWS):
        # Where the job says, which may be spoilt too; that of a journal is a folder deeper.
        run_dir = min((path.parent for path in folder.rglob("job.json")), key=lambda path: len(path.parts))
        check_rows(case, run_dir, code)


def check_rows(case: Case, out: Path, code: int) -> None:
    """Each row is once in the outputs or the errors."""
    errors = out / "errors.jsonl"
    letters = _lines(errors) if errors.exists() else []
    assert (code == FAILED_ROWS) == bool(letters), f"exit code {code} with {len(letters)} errors"
    parquet = out / "outputs.parquet"
    results = (
        pq.read_table(parquet, columns=["index"]).to_pylist() if parquet.exists() else _lines(out / "outputs.jsonl")
    )
    indexes = sorted(_index(row) for row in [*results, *letters])
    num_rows = len(indexes) if case.num_rows is None else case.num_rows
    assert indexes == list(range(num_rows)), f"{num_rows} rows in, out came {indexes[:50]}"


def _index(row: dict[str, Any]) -> int:
    return int(row["index"] if "index" in row else row["response"]["request_id"].removeprefix("req_"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def main(folder: Path, count: int, seed: int) -> None:
    """Run the cases and print what came of them."""
    infer_fields([b'{"id": 0}'])
    pa.set_cpu_count(1)
    kinds: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    failures = []
    for number, case in enumerate(hostile_cases(count, seed)):
        where = folder / str(number)
        prepare(case, where)
        code, said, rss_bytes = run(case, where)
        kinds[case.kind] += 1
        codes[str(code)] += 1
        try:
            check(case, where, code, said, rss_bytes)
        except Exception as error:  # whatever cannot be read back counts as well
            failures.append(f"case {number} ({case.kind}, {case.arguments}): {type(error).__name__}: {error}")
        shutil.rmtree(where)
    print(json.dumps({"kinds": kinds, "codes": codes, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
