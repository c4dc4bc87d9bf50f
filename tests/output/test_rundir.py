"""The run directory: one holder at a time, whole files only, and a manifest that says what changed."""

import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.core import storage
from batchgen.core.errors import LockedError, StorageError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.storage import staged_file, write_atomic
from batchgen.core.units import Shard
from batchgen.output.lock import Holder
from batchgen.output.manifest import Manifest, compare
from batchgen.output.rundir import JournalledJob, RunDir

MANIFEST = Manifest(
    job={
        "model": {"path": "m"},
        "sampling": {"temperature": 0.0},
        "engine": {"max_num_seqs": "auto"},
        "output": {"format": "jsonl"},
    },
    output_keys={"sampling.temperature": 0.0, "input.columns": ("a", "b")},
    fingerprints={"input": {"files": [{"size_bytes": 12}]}, "model": {"sha256": "abc"}},
)

HOLD = """
import sys
from pathlib import Path
from batchgen.output.rundir import RunDir
with RunDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "a")
    run_dir.create()
    return run_dir


@pytest.fixture
def other_process(run_dir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    command, pipe = [sys.executable, "-c", HOLD, str(run_dir.path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_turned_away_with_the_holders_pid_and_host_until_that_is_killed(
    run_dir: RunDir, other_process: subprocess.Popen[bytes]
) -> None:
    assert run_dir.holder() == Holder(other_process.pid, socket.gethostname())
    with pytest.raises(LockedError) as caught:
        run_dir.lock()
    assert f"process {other_process.pid} on {socket.gethostname()}" in str(caught.value)
    assert caught.value.exit_code == 5
    other_process.kill()
    other_process.wait()
    assert run_dir.lock_file.exists()
    assert run_dir.holder() is None
    with run_dir.lock():
        assert json.loads(run_dir.lock_file.read_bytes())["pid"] == os.getpid()


def test_a_process_holds_a_directory_once_and_asking_for_the_holder_turns_no_run_away(run_dir: RunDir) -> None:
    with run_dir.lock(), pytest.raises(LockedError):
        run_dir.lock()
    assert not run_dir.lock_file.exists()
    assert run_dir.holder() is None
    with run_dir.lock():
        assert run_dir.holder().pid == os.getpid()


def test_files_are_created_with_the_users_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_file_whose_writing_fails_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), staged_file(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*gone/file: No such file or directory"):
        write_atomic(tmp_path / "gone" / "file", b"x")


def test_a_manifest_is_read_back_as_it_was_written(run_dir: RunDir) -> None:
    assert run_dir.read_manifest() is None
    run_dir.write_manifest(replace(MANIFEST, shard=Shard(2, 8), num_rows=7))
    again = run_dir.read_manifest()
    assert (again.shard, again.num_rows, again.job) == (Shard(2, 8), 7, MANIFEST.job)
    same = compare(again, replace(MANIFEST, shard=Shard(2, 8), num_rows=7))
    assert same.refused == same.allowed == ()


NONE = b'{"version": 1, "nonsense": 3}', b'{"version": 1, "job": [], "output_keys": {}}'


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99}', b"[" * 100_000, b"\xff", *NONE])
def test_a_manifest_that_is_none_is_refused_by_name(run_dir: RunDir, content: bytes) -> None:
    run_dir.manifest.write_bytes(content)
    words = ": it is nested too deeply" if content.startswith(b"[[") else ""
    with pytest.raises(UsageError, match=rf"cannot read .*job\.json{words}"):
        run_dir.read_manifest()


def test_what_changes_outputs_is_refused_and_named() -> None:
    new = replace(
        MANIFEST,
        output_keys={"sampling.temperature": 0.7, "input.columns": ("a", "b"), "sampling.top_k": 5},
        fingerprints={"input": {"files": [{"size_bytes": 13}]}, "model": {"sha256": "abc"}},
        shard=Shard(1, 2),
    )
    assert compare(MANIFEST, new).refused == (
        "sampling.temperature: was 0.0, now 0.7",
        "input.files[0].size_bytes: was 12, now 13",
        'shard: was "1/1", now "1/2"',
        "sampling.top_k: was (not there), now 5",
    )


def test_what_does_not_change_outputs_is_allowed_and_named() -> None:
    new = replace(MANIFEST, job={**MANIFEST.job, "engine": {"max_num_seqs": 8}})
    assert compare(MANIFEST, new).refused == ()
    assert compare(MANIFEST, new).allowed == ('engine.max_num_seqs: was "auto", now 8',)


def changed_files(old: list[Any], new: list[Any]) -> tuple[str, ...]:
    """What is said of other input files; the older ones come from disk."""
    was, now = (replace(MANIFEST, fingerprints={"input": {"files": files}}) for files in (old, new))
    return compare(Manifest.from_bytes(was.to_bytes()), now).refused


A, B, C = ({"file": name, "bytes": 1} for name in "abc")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            [A, {"file": "big.jsonl", "sha256": "7" * 64, "bytes": 145006}],
            [A, {"file": "big.jsonl", "sha256": "e" * 64, "bytes": 144980}],
            ['[big.jsonl].sha256: was "77777777...", now "eeeeeeee..."', "[big.jsonl].bytes: was 145006, now 144980"],
        ),
        ([A, B], [B, A], ['.order: was ["a", "b"], now ["b", "a"]']),
        ([{"file": "a"}], [{"file": "a"}, {"file": "b"}], ['.order: was ["a"], now ["a", "b"]']),
        ([A, B, C], [A, C], ["[b].bytes: was 1, now (not there)", '.order: was ["a", "b", "c"], now ["a", "c"]']),
        (
            [A, A],
            [A, {**B, "bytes": 2}],
            [
                "[a (2)].bytes: was 1, now (not there)",
                '.order: was ["a", "a"], now ["a", "b"]',
                "[b].bytes: was (not there), now 2",
            ],
        ),
    ],
    ids=["changed", "in another order", "one more", "one gone", "two of one name"],
)
def test_other_files_are_named_with_what_changed_of_them(old: list[Any], new: list[Any], said: list[str]) -> None:
    assert changed_files(old, new) == tuple(f"input.files{text}" for text in said)


def test_of_very_many_differences_the_first_are_shown() -> None:
    old, new = ([{"file": str(i), "bytes": size} for i in range(1000)] for size in (1, 2))
    said = changed_files(old, new)
    assert len(said) == 21 and said[-1] == "and 980 more"


def test_a_difference_is_short_and_shown_where_it_is() -> None:
    def said(key: str, *values: object) -> str:
        old, new = (replace(MANIFEST, output_keys={key: value}) for value in values)
        (line,) = compare(old, new).refused
        return line

    assert said("input.system", None, "Be brief.") == 'input.system: was (not set), now "Be brief."'
    assert len(said("input.prompt", "a" * 500, "b" * 500)) < 200
    texts = (f'{{"json": {{"enum": ["{"é" * 9000}{end}"]}}}}' for end in "ab")
    key = "sampling.structured_outputs"
    assert said(key, *texts) == f'{key}: was …{"é" * 16}a"]}}}}, now …{"é" * 16}b"]}}}}'


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below"])
def test_a_file_or_the_root_of_the_file_system_is_no_place_for_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"output\.path = .*file"):
        RunDir(tmp_path / name).create()
    with pytest.raises(UsageError, match="root of the file system"):
        RunDir(Path("/")).create()


@pytest.mark.parametrize("left", ["journal/0001-0123abcd/.job.json.tmp", "progress.json"])
@pytest.mark.parametrize("content", [b"", b'{"version": 1, "state": "running", "phase": "loading' + bytes(40)])
def test_a_run_killed_before_it_wrote_its_job_is_no_obstacle(run_dir: RunDir, left: str, content: bytes) -> None:
    """Nor is one that a loss of power has cut."""
    (run_dir.path / left).parent.mkdir(parents=True, exist_ok=True)
    (run_dir.path / left).write_bytes(content)
    run_dir.create()
    run_dir.sweep()
    assert not [*run_dir.journals.glob("*")]


def test_clearing_removes_what_a_run_wrote_and_nothing_else(run_dir: RunDir) -> None:
    run_dir.write_manifest(MANIFEST)
    (run_dir.path / "outputs.parquet").write_text("x")
    (run_dir.path / "errors.jsonl").write_text("x")
    (run_dir.path / ".outputs.jsonl.tmp").write_text("left by a kill")
    (run_dir.path / "notes.txt").write_text("x")
    run_dir.journals.mkdir()
    (run_dir.journals / "000001.seg").write_text("x")
    run_dir.clear()
    assert [path.name for path in run_dir.path.iterdir()] == ["notes.txt"]


def test_an_input_inside_the_run_directorys_own_files_is_recognised(run_dir: RunDir) -> None:
    own = [
        "outputs.jsonl",
        "../a/errors.jsonl",
        "journal/x.jsonl",
        ".journal.removed/000001.seg",
        ".outputs.parquet.tmp",
    ]
    assert all(run_dir.owns(run_dir.path / name) for name in own)
    assert not any(run_dir.owns(run_dir.path / name) for name in ("questions.jsonl", "deep/outputs.jsonl", ""))


def test_sweeping_removes_what_kills_left_and_nothing_else(run_dir: RunDir) -> None:
    litter = [".outputs.jsonl.tmp", ".errors.jsonl.tmp", ".job.json.tmp", ".input.spool.tmp", ".progress.json.tmp"]
    kept = ["outputs.jsonl", "job.json", "input.spool", ".notes.tmp"]
    for name in (*litter, *kept):
        (run_dir.path / name).write_text("x")
    run_dir.write_manifest(MANIFEST)
    (run_dir.path / ".journal.removed").mkdir()
    begun = run_dir.begin(MANIFEST)
    for name in (".0001-0123abcd.removed", "0002-0123abcd"):
        (run_dir.journals / name).mkdir()
        (run_dir.journals / name / "000001.seg").write_text("x")
    run_dir.sweep()
    assert {path.name for path in run_dir.path.iterdir()} == {*kept, "journal"}
    assert [*run_dir.journals.iterdir()] == [begun.folder]


@pytest.mark.parametrize("name", ["outputs.jsonl", "journal/000001.seg", "journal/2026.md", "progress.json"])
def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    with pytest.raises(UsageError, match=rf"holds {name} but no job\.json"):
        RunDir(tmp_path).create()
    assert theirs.read_text() == "mine"


@pytest.mark.parametrize("kind", ["symbolic link", "mount point"])
def test_a_journal_on_another_disk_is_refused_and_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    if kind == "mount point":
        run_dir.journals.mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda self: self == run_dir.journals)
    else:
        run_dir.journals.symlink_to(tmp_path)
    with pytest.raises(UsageError, match=rf"run/journal is a {kind}: put the whole run there"):
        run_dir.create()


def test_a_run_folder_and_parents_made_for_it_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync_folder", synced.append)
    RunDir(tmp_path / "a" / "b" / "c").create()
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    RunDir(tmp_path / "a" / "b" / "c").create()  # a killed process may have made it, and synced nothing
    assert synced == [tmp_path / "a" / "b"]


def test_links_that_somebody_else_put_where_files_are_staged_are_not_followed(run_dir: RunDir, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".outputs.jsonl.tmp", "run.lock"):
        (run_dir.path / name).symlink_to(precious)
    with staged_file(run_dir.outputs("jsonl")) as file:
        file.write(b"row")
    with pytest.raises(StorageError, match=r"cannot lock .*run\.lock"):
        run_dir.lock()
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["job.json", "run.lock", "progress.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(run_dir: RunDir, name: str) -> None:
    os.mkfifo(run_dir.path / name)
    with pytest.raises(UsageError):
        run_dir.create()
        with run_dir.lock():
            run_dir.read_manifest()
    assert run_dir.holder() is None


def test_on_macos_the_drive_is_asked_to_write_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, what: asked.append(what))
    write_atomic(tmp_path / "file", b"x")
    assert asked == [51, 51]


def test_a_run_that_is_just_beginning_is_locked_not_foreign(tmp_path: Path) -> None:
    """Another process may look between the winner's first file and its job.json."""
    run_dir = RunDir(tmp_path)
    with run_dir.lock():
        run_dir.journals.mkdir()
        (run_dir.journals / "000001.seg").touch()
        run_dir.create()
        with pytest.raises(LockedError):
            run_dir.lock()
    with pytest.raises(UsageError, match=r"000001\.seg"):
        run_dir.create()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"job": {}}, "job.output.format"),
        ({"job": {"output": {"format": "zzz"}}}, "job.output.format"),
        ({"job": {"input": 3, "output": {"format": "jsonl"}}}, "job.input is not an object"),
        ({"output_keys": None}, "output_keys is not an object"),
        ({"fingerprints": {"numerics": 3}}, "fingerprints.numerics is not an object"),
        ({"shard": [0, 0]}, "shard"),
        ({"shard": [1, float("inf")]}, "shard"),
        ({"shard": 3}, "shard"),
        ({"num_rows": "x"}, "num_rows"),
        ({"num_rows": 10**30}, "num_rows"),
        ({"journal": 5}, "journal is not the name of a folder"),
        *(
            ({"fingerprints": {"input": {"files": [{"bytes": 1, "delimiter": sign}]}}}, "delimiter is not a character")
            for sign in ("", ";;", '"', "\n", 5)
        ),
        ({"version": 99}, r"a later batchgen wrote it \(record version 99, this one writes"),
    ],
    ids=str,
)
def test_a_manifest_of_another_shape_is_refused_by_key(run_dir: RunDir, damage: dict[str, object], words: str) -> None:
    run_dir.manifest.write_text(json.dumps(json.loads(MANIFEST.to_bytes()) | damage))
    with pytest.raises(UsageError, match=rf"cannot read .*job\.json: .*{words}"):
        run_dir.read_manifest()


# ---------------------------------------------------------------- jobs and their journals


def finished(run_dir: RunDir, begun: JournalledJob, *, keeps_rows: bool = False) -> Manifest:
    (run_dir.path / "outputs.jsonl").write_text(begun.folder.name)
    return run_dir.finish(begun, Digests(), keeps_rows=keeps_rows)


def test_each_job_has_a_folder_with_its_manifest_and_they_are_in_order(run_dir: RunDir) -> None:
    jobs = [run_dir.begin(replace(MANIFEST, num_rows=number)) for number in range(12)]
    assert [begun.folder for begun in run_dir.unfinished()] == [begun.folder for begun in jobs]
    assert [begun.folder.name[:4] for begun in jobs] == [f"{number:04d}" for number in range(1, 13)]
    assert run_dir.last_manifest().num_rows == 11


def test_a_finished_job_takes_all_folders_with_it_and_numbers_go_on_behind_it(run_dir: RunDir) -> None:
    other, mine = run_dir.begin(MANIFEST), run_dir.begin(MANIFEST)
    known = finished(run_dir, mine)
    assert not run_dir.journals.exists()
    assert run_dir.changed_files(known, Digests()) == []
    (run_dir.path / "errors.jsonl").write_text("x")
    assert run_dir.changed_files(known, Digests()) == ["errors.jsonl"]
    assert run_dir.begin(MANIFEST).folder.name.startswith("0003-")
    other.folder.mkdir(parents=True)
    run_dir.write_job(other)  # as a copy of the folder may bring it back
    assert [begun.folder.name[:4] for begun in run_dir.unfinished()] == ["0003"]
    run_dir.sweep()
    assert [path.name[:4] for path in run_dir.journals.iterdir()] == ["0003"]


def test_the_rows_of_another_format_are_kept_until_the_next_job_is_finished(run_dir: RunDir) -> None:
    parquet = replace(MANIFEST, job={**MANIFEST.job, "output": {"format": "parquet"}})
    first = run_dir.begin(parquet)
    finished(run_dir, first, keeps_rows=True)
    run_dir.sweep()
    kept = run_dir.kept_job()
    assert kept is not None and kept.folder == first.folder
    assert run_dir.unfinished() == []
    second = run_dir.begin(MANIFEST)
    run_dir.sweep()
    assert (run_dir.kept_job(), [begun.folder for begun in run_dir.unfinished()]) == (kept, [second.folder])
    finished(run_dir, second)
    assert run_dir.kept_job() is None
    assert not run_dir.journals.exists()
