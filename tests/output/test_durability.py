"""Nothing is lost: killed at every system call, with a disk that fills at every byte, with a million rows."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import pytest
from repeats import slow

from batchgen.core.errors import StorageError
from batchgen.output import journal as journal_module
from batchgen.output.finalize import finalize
from batchgen.output.journal import Journal
from batchgen.output.rundir import RunDir


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: these tests sync thousands of times and kill only processes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("every", [5, slow(1)])
@pytest.mark.parametrize("scenario", faults.SCENARIOS)
def test_killed_at_any_call_the_next_run_ends_with_the_same_bytes(scenario: str, every: int, fast_folder: Path) -> None:
    command = [sys.executable, faults.__file__, scenario, str(fast_folder), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20 // every


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
            faults.append(journal, index, failed=faults.is_bad(index))
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
    for act in (journal.commit, lambda: faults.append(journal, 5, failed=False)):
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
    assert again.recovery.torn_bytes > 0
    fill(again, 6)
    again.close()


@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai-batch"])
def test_a_disk_that_fills_while_outputs_are_written_leaves_the_journal_to_run_again(
    tmp_path: Path, output_format: str
) -> None:
    run_dir = RunDir(tmp_path)
    spec = faults.job_of(output_format)
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
        faults.append(journal, index, failed=False)
    assert synced_s / now_s < 0.02
    monkeypatch.undo()
    journal.close()


STUB_RUN = """
import resource, sys, time
from pathlib import Path
import faults
from batchgen.output.journal import Journal
from batchgen.output.rundir import RunDir
from batchgen.output.finalize import finalize

folder, output_format, num_rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
run_dir = RunDir(folder)
seconds = {}
def timed(name, act):
    started_at = time.monotonic()
    result = act()
    seconds[name] = round(time.monotonic() - started_at, 1)
    return result
def work():
    journal = Journal.open(run_dir.journal)
    for start in range(0, num_rows, 1000):
        for index in reversed(range(start, start + 1000)):
            faults.append(journal, index, failed=faults.is_bad(index))
    journal.close()
timed("append_s", work)
journal = timed("open_s", lambda: Journal.open(run_dir.journal))
assert journal.resume_cursor.index == num_rows
timed("finalize_s", lambda: finalize(run_dir, faults.job_of(output_format), journal, num_rows=num_rows))
journal.remove()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, seconds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_million_rows_need_little_more_memory_than_ten_thousand(tmp_path: Path, output_format: str) -> None:
    peak_mib = {}
    for num_rows in (10_000, 1_000_000):
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        command = [sys.executable, "-c", STUB_RUN, str(folder), output_format, str(num_rows)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        print(f"{output_format}, {num_rows} rows: MiB, seconds = {done.stdout.strip()}")
        peak_mib[num_rows] = int(done.stdout.split()[0])
    assert peak_mib[1_000_000] - peak_mib[10_000] <= 200
