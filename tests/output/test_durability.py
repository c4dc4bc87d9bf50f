"""What the journal does with a disk that fills at any byte, that fails, or that is slow to sync."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from power_loss import Disk
from records import dead_letter, record

from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.core.errors import StorageError
from batchgen.core.file_digests import Digests
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor
from batchgen.core.storage import write_atomic
from batchgen.output import journal as journal_module
from batchgen.output.finalize import finalize
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir


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


def append(journal: Journal, index: int) -> None:
    row, kind = (dead_letter(index), "error") if index % 9 == 4 else (record(index), "result")
    journal.append(JournalEntry(index, Cursor(0, 10 * (index + 1), 0, index + 1), kind, encode_json(row)))


def fill(journal: Journal, num_rows: int) -> None:
    """Append what is missing of ``num_rows`` rows, in two commits."""
    for index in range(num_rows):
        if index not in journal.done:
            append(journal, index)
        if index == num_rows // 2:
            journal.commit()
    journal.commit()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may be larger, by the system's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_full_at_any_byte_loses_no_committed_row(fast_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Journal.open(fast_folder / "whole")
    fill(whole, 3)
    whole.close()
    (segment,) = (fast_folder / "whole").glob("*.seg")
    for space in range(segment.stat().st_size):
        folder = fast_folder / str(space)
        journal = Journal.open(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", disk_with(space, os.write))
            said = "No space left on device; free some space, then run again"
            with pytest.raises(StorageError, match=said) as caught:
                fill(journal, 3)
            assert str(folder) in str(caught.value)
            journal.close()  # must neither raise nor write
        again = Journal.open(folder)
        written = segment.read_bytes()[:space].count(b"\n")
        assert list(again.done) == list(range(written))
        fill(again, 3)
        again.close()
        final = Journal.open(folder)
        assert [final.payload(index) for index in final.done] == [whole.payload(index) for index in range(3)]
        final.close()
    whole.close()


def test_committed_rows_survive_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a later segment, whose name must be on the disk too."""
    disk, fsync = Disk(tmp_path), os.fsync

    def synced(fd: int) -> None:
        fsync(fd)
        disk.sync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 500)
    journal = Journal.open(tmp_path / "journal")
    fill(journal, 6)
    assert len([*(tmp_path / "journal").glob("*.seg")]) > 1
    disk.lose()
    again = Journal.open(tmp_path / "journal")
    assert list(again.done) == list(range(6))
    again.close()


def test_a_journal_that_failed_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            fill(journal, 6)
    for act in (journal.commit, lambda: append(journal, 5)):
        with pytest.raises(StorageError, match="Input/output error"):
            act()
    journal.close()


def test_a_file_size_limit_of_the_system_is_one_clear_line(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with largest_file(500), pytest.raises(StorageError, match=r"File too large; raise the limit .*ulimit -f"):
        fill(journal, 6)
    journal.close()
    again = Journal.open(tmp_path)
    assert again.done.first_gap > 0
    assert ["journal: cut" in line for line in again.recovery] == [True]
    fill(again, 6)
    again.close()


@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai-batch"])
def test_a_disk_that_fills_while_outputs_are_written_leaves_the_journal(tmp_path: Path, output_format: str) -> None:
    run_dir = RunDir(tmp_path)
    spec = JobSpec(ModelSpec("m"), InputSpec(("in.jsonl",)), OutputSpec("", format=output_format))
    begun = run_dir.begin(Manifest(spec.to_dict(), spec.output_keys(), num_rows=40))
    journal = Journal.open(begun.folder)
    fill(journal, 40)
    with largest_file(700), pytest.raises(StorageError, match=r"cannot write .*outputs.*File too large"):
        finalize(run_dir, begun, spec, journal, num_rows=40)
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    finalize(run_dir, begun, spec, journal, num_rows=40)
    journal.close()
    run_dir.finish(begun, Digests(), keeps_rows=False)
    assert run_dir.is_complete()
    assert not run_dir.journals.exists()


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
        append(journal, index)
    assert synced_s / now_s < 0.02
    monkeypatch.undo()
    journal.close()


def test_a_folder_in_the_place_of_a_temporary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / ".report.json.tmp").mkdir()
    with pytest.raises(StorageError, match=r"its temporary name .*\.report\.json\.tmp is a folder; remove that"):
        write_atomic(tmp_path / "report.json", b"x")
    assert (tmp_path / ".report.json.tmp").is_dir()
