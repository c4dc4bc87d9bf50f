"""What the journal does with a disk that fills at any byte, that fails, or that is slow to sync."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.job import InputSpec, JobSpec, ModelSpec, OutputSpec
from batchgen.core.errors import StorageError
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor
from batchgen.output import journal as journal_module
from batchgen.output.finalize import finalize
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.rundir import RunDir
from batchgen.report.rows import LATENCIES


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
    journal.append(JournalEntry(index, after, "error" if failed else "result", encode_json(payload)))


def job_of(output_format: str) -> JobSpec:
    return JobSpec(ModelSpec("m"), InputSpec(("in.jsonl",)), OutputSpec("", format=output_format))


def disk_with(space: int, call: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    """``os.write`` on a disk with ``space`` bytes left: a last short write, then ENOSPC, as the kernel does it."""
    left = space

    def write(fd: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = call(fd, data[:left])
        left -= size
        return size

    return write


def fill(journal: Journal, num_rows: int) -> None:
    """Append what is missing of ``num_rows`` rows, in two commits."""
    for index in range(num_rows):
        if index not in journal.done:
            append(journal, index, failed=is_bad(index))
        if index == num_rows // 2:
            journal.commit()
    journal.commit()


def test_a_disk_that_fills_at_any_byte_loses_no_committed_row(
    fast_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Journal.open(fast_folder / "whole")
    fill(whole, 6)
    whole.close()
    (segment,) = (fast_folder / "whole").glob("*.seg")
    for space in range(segment.stat().st_size):
        folder = fast_folder / str(space)
        journal = Journal.open(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", disk_with(space, os.write))
            with pytest.raises(
                StorageError, match="No space left on device; free some space, then run again"
            ) as caught:
                fill(journal, 6)
            assert str(folder) in str(caught.value)
            journal.close()  # must neither raise nor write
        again = Journal.open(folder)
        written = segment.read_bytes()[:space].count(b"\n")
        assert list(again.done) == list(range(written))
        fill(again, 6)
        again.close()
        final = Journal.open(folder)
        assert [final.payload(index) for index in final.done] == [whole.payload(index) for index in range(6)]
        final.close()
    whole.close()


def test_a_journal_that_failed_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            fill(journal, 6)
    for act in (journal.commit, lambda: append(journal, 5, failed=False)):
        with pytest.raises(StorageError, match="Input/output error"):
            act()
    journal.close()


def test_a_file_size_limit_of_the_system_is_one_clear_line(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(StorageError, match="File too large; free some space"):
            fill(journal, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.close()
    again = Journal.open(tmp_path)
    assert again.done.first_gap > 0
    assert ["journal: cut" in line for line in again.recovery] == [True]
    fill(again, 6)
    again.close()


@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai-batch"])
def test_a_disk_that_fills_while_outputs_are_written_leaves_the_journal_to_run_again(
    tmp_path: Path, output_format: str
) -> None:
    run_dir = RunDir(tmp_path)
    spec = job_of(output_format)
    journal = Journal.open(run_dir.journal)
    fill(journal, 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*outputs.*File too large"):
            finalize(run_dir, spec, journal, num_rows=40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    finalize(run_dir, spec, journal, num_rows=40)
    journal.remove()
    assert run_dir.is_complete()


def test_syncing_takes_a_small_share_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk whose fsync takes 50 ms, told by a clock of our own: 600 s of work at 20 rows a second."""
    now_s, synced_s = 0.0, 0.0

    def slow_fsync(fd: int) -> None:
        nonlocal now_s, synced_s
        now_s, synced_s = now_s + 0.05, synced_s + 0.05

    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now_s)
    journal = Journal.open(tmp_path)
    monkeypatch.setattr(os, "fsync", slow_fsync)
    for index in range(600 * 20):
        now_s += 0.05
        append(journal, index, failed=False)
    assert synced_s / now_s < 0.02
    monkeypatch.undo()
    journal.close()
