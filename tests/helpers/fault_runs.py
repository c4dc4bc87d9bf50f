"""Every fault at every file operation of whole commands, and what running the command again makes of it.

``python fault_runs.py SCENARIO,... FOLDER SHARE SEED`` runs a command over a mixed job in forked children: once
undisturbed, then with a fault (see ``fault_injection``) at operation 0, 1, 2 and so on, from the creation of the run
directory to its last file. After each the command is run again, every second time with another fault at a random
operation, until an undisturbed one ends; then all files are compared with those of the undisturbed run, times aside.
``SHARE`` is the share of the faults that is done, drawn by ``SEED`` and the scenario. Prints the counts as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from fault_injection import DEADLY, KILLED, KINDS, POWER, Fault, Injector, Operation
from run_helpers import timeless
from stub_engine import stub_factory

import batchgen.run.job  # noqa: F401 - what commands import late is imported once here instead of in every child
from batchgen.cli.main import call
from batchgen.output import journal as journal_module
from batchgen.output.formats.parquet import infer_fields

MODEL = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
DONE, FAILED_ROWS, MISMATCH, STOPPED = 0, 3, 2, 75
_NEVER = 1 << 30  # no command does so many operations
JOB = """
[model]
path = "{model}"
[input]
path = "{input}"
{keys}
[sampling]
max_tokens = 6
{sampling}
[output]
path = "{folder}/out"
{output}
"""


def mixed_rows(count: int) -> list[dict[str, Any] | str]:
    """Rows with all that a restart could get wrong: bad ones, equal ids, samples, scores, log-probabilities."""
    rows: list[dict[str, Any] | str] = [
        {"id": f"q{i}", "question": f"What is {i} times {i}?", "answer": str(i * i), "note": ["naïve\n", None, i]}
        for i in range(count)
    ]
    rows[2] = "{"
    rows[3] = {"id": "q1", "question": "Twice?", "answer": "no"}
    rows[5] = {"id": "n", "question": "Three?", "sampling": {"n": 3, "temperature": 0.8, "seed": 5}}
    rows[6] = {"id": "l", "question": "How sure?", "sampling": {"logprobs": 2, "max_tokens": 3}}
    rows[7] = {"id": "c", "question": "Which?", "sampling": {"prompt_logprobs": 1, "max_tokens": 0}}
    rows[8] = {"id": 8, "question": ""}
    return rows


def batch_rows(count: int) -> list[dict[str, Any] | str]:
    """OpenAI Batch lines, chats and completions, one of them unsupported."""
    head = {"method": "POST", "url": "/v1/chat/completions"}
    rows: list[dict[str, Any] | str] = [
        {"custom_id": f"r{i}", **head, "body": {"messages": [{"role": "user", "content": f"Hi {i}"}], "n": 1 + i % 2}}
        for i in range(count)
    ]
    rows[3] = {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
    rows[4] = {"custom_id": "x", **head, "body": {"messages": [], "tools": [1]}}
    return rows


def chat_rows(count: int) -> list[dict[str, Any] | str]:
    """Chats of one to four turns, one of them too long from its third turn on."""
    texts = [[f"Hi {i}, {number}" for number in range(1 + i % 4)] for i in range(count)]
    texts[6][2] = "x" * 9000
    return [
        {
            "id": f"c{i}",
            "chat": [message for text in said for message in _turn(text)],
            "sampling": {"max_tokens": 12 + 6 * (i % 3)},
        }
        for i, said in enumerate(texts)
    ]


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "so"}]


Stub = Mapping[str, Any] | None  # options of the stub engine; None stands for the model's own
NO_STUB: Stub = MappingProxyType({})


@dataclass(frozen=True)
class Scenario:
    """``act`` is the command under attack and ``again`` what follows a fault (None: the same), with their stubs.

    ``before`` are commands done undisturbed, once, before it.
    """

    act: tuple[str, ...]
    before: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = ()
    again: tuple[str, ...] | None = None
    stub: Stub = field(default_factory=dict)
    keys: str = 'id = "id"\nprompt = "{question}"'
    sampling: str = ""
    output: str = ""
    input: str = "input.jsonl"
    has_stdin: bool = False
    may_refuse: bool = False  # ``again`` may find the run of another job, and say so


RUN = ("run", "job.toml")
_SHARDS: Any = tuple((("run", "job.toml", "--shard", f"{i}/2", "--output", f"part{i}"), {}) for i in (1, 2))
_PARQUET: dict[str, Any] = {
    "input": "input.parquet",
    "keys": 'id = "id"\nprompt = "question"\ncolumns = "*"',
    "output": 'format = "parquet"\ntoken_ids = true\n[eval]\nexpected = "answer"',
}
_OPENAI: dict[str, Any] = {
    "input": "batch.jsonl",
    "keys": 'format = "openai-batch"',
    "output": 'format = "openai-batch"',
}

_TURNS: dict[str, Any] = {
    "input": "chats.jsonl",
    "keys": 'id = "id"\nmessages = "chat"\nregenerate = "assistant"',
}

_EARLIER: Any = (((*RUN, "--input", "first/input.jsonl"), {}),)

SCENARIOS = {
    "run": Scenario(RUN),
    "run-parquet": Scenario(RUN, **_PARQUET),
    "run-workers": Scenario((*RUN, "--workers", "2")),
    "run-openai": Scenario(RUN, **_OPENAI),
    "run-turns": Scenario(RUN, **_TURNS),
    "run-turns-workers": Scenario((*RUN, "--workers", "2"), **_TURNS),
    "run-gz-completion": Scenario(
        RUN,
        input="input.jsonl.gz",
        keys='prompt = "{question}"\ncolumns = ["answer", "note"]',
        sampling="temperature = 1.0",
        output="token_ids = true",
    ),
    "run-stdin": Scenario((*RUN, "--input", "-"), has_stdin=True),
    "shard": Scenario((*RUN, "--shard", "2/2")),
    "resume": Scenario(RUN, before=(((*RUN, "--max-total-tokens", "120"), {}),)),
    "stop-limit": Scenario((*RUN, "--max-total-tokens", "150"), again=RUN),
    "stop-signal": Scenario(RUN, stub={"stops_at": 4}, again=RUN),
    "overwrite": Scenario((*RUN, "--overwrite"), before=(((*RUN, "--max-tokens", "3"), {}),)),
    "overwrite-plain-again": Scenario((*RUN, "--overwrite"), before=((RUN, {}),), again=RUN),
    "overwrite-other": Scenario(
        (*RUN, "--overwrite"), before=(((*RUN, "--max-tokens", "3"), {}),), again=RUN, may_refuse=True
    ),
    "overwrite-parquet": Scenario(
        (*RUN, "--overwrite"), before=(((*RUN, "--max-tokens", "3", "--output-format", "parquet"), {}),)
    ),
    "update": Scenario(RUN, before=_EARLIER),
    "update-stopped": Scenario(
        RUN,
        before=(*_EARLIER, ((*RUN, "--max-total-tokens", "60"), {})),
        keys='prompt = "{question}"\ncolumns = ["answer", "note"]',
    ),
    "update-job": Scenario(
        (*RUN, "--update"),
        before=(((*RUN, "--max-tokens", "3"), {}), ((*RUN, "--n", "2", "--update", "--max-total-tokens", "40"), {})),
    ),
    "update-form": Scenario(
        (*RUN, "--update"),
        before=(((*RUN, "--output-format", "parquet", "--token-ids"), {}),),
        output="token_ids = true",
    ),
    "update-parquet": Scenario(
        RUN,
        before=(*_EARLIER, ((*RUN, "--max-total-tokens", "30"), {})),
        output='format = "parquet"\n[eval]\nexpected = "answer"',
    ),
    "update-openai": Scenario((*RUN, "--update"), before=((RUN, {"fails": frozenset({0, 5})}),), **_OPENAI),
    "merge": Scenario(("merge", "part1", "part2", "-o", "whole"), before=_SHARDS),
    "merge-parquet": Scenario(("merge", "part2", "part1", "-o", "whole"), before=_SHARDS, **_PARQUET),
}


class Child:
    """A forked process that runs a command; ``said`` and ``has_failed`` are known after ``wait``."""

    def __init__(self, pid: int, failed: int, said: int) -> None:
        self.pid = pid
        self.said = ""
        self.has_failed = False  # whether its fault happened
        self.promised: dict[str, int] = {}  # bytes of journals that must survive it
        self._failed = failed
        self._said = said

    def wait(self) -> int:
        """Its exit code, or a signal's number below zero."""
        with os.fdopen(self._said, "rb") as pipe:
            self.said = pipe.read().decode(errors="replace")
        with os.fdopen(self._failed, "rb") as pipe:
            report = pipe.read()
            self.has_failed = bool(report)
            self.promised = json.loads(report or b"{}")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Stage:
    """One scenario, whose files are in ``work``; what its last child said is ``said``.

    Without ``is_watched`` the calls of its children to the system are neither counted nor made to fail: a signal could
    come in the midst of the counting.
    """

    def __init__(
        self, scenario: Scenario, folder: Path, work: Path | None = None, *, num_rows: int = 12, is_watched: bool = True
    ) -> None:
        self.scenario = scenario
        self._is_watched = is_watched
        self._num_rows = num_rows
        self.work = work or folder / "work"
        self.said = ""
        self.promised: dict[str, int] = {}
        self._before = folder / "before"
        self._report = folder / "operations"

    def prepare(self) -> None:
        """Write the inputs and do what comes before; ``restore`` comes back to here."""
        self.work.mkdir()
        rows = mixed_rows(self._num_rows)
        lines = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        (self.work / "input.jsonl").write_text(lines, encoding="utf-8")
        (self.work / "first").mkdir()
        (self.work / "first" / "input.jsonl").write_text(lines[: len(lines) * 2 // 3], encoding="utf-8")
        (self.work / "input.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        flat = [
            {"id": f"q{i or 9}", "question": f"What is {i}?" * (i != 4), "answer": str(i)}
            for i in range(self._num_rows)
        ]
        pq.write_table(pa.Table.from_pylist(flat), self.work / "input.parquet", row_group_size=5)
        batch = "".join(json.dumps(row) + "\n" for row in batch_rows(self._num_rows * 2 // 3))
        (self.work / "batch.jsonl").write_text(batch, encoding="utf-8")
        chats = "".join(json.dumps(row) + "\n" for row in chat_rows(self._num_rows))
        (self.work / "chats.jsonl").write_text(chats, encoding="utf-8")
        scenario = self.scenario
        text = JOB.replace("{keys}", scenario.keys).replace("{sampling}", scenario.sampling)
        text = text.replace("{output}", scenario.output).replace("{input}", scenario.input)
        text = text.replace("{model}", str(MODEL)).replace("{folder}", str(self.work))
        (self.work / "job.toml").write_text(text, encoding="utf-8")
        for command, stub in scenario.before:
            code, _ = self.child(command, stub=stub)
            assert code in (DONE, FAILED_ROWS, STOPPED), self.said
        shutil.copytree(self.work, self._before)

    def restore(self) -> None:
        """Put all files back to what they were before the command under attack."""
        shutil.rmtree(self.work)
        shutil.copytree(self._before, self.work)

    def child(
        self, command: tuple[str, ...], fault: Fault | None = None, stub: Stub = NO_STUB, file_bytes: int | None = None
    ) -> tuple[int, bool]:
        """Run a command in a forked process, no file larger than ``file_bytes``; its exit code, and whether the fault
        happened.
        """
        child = self.start(command, fault, stub, file_bytes)
        code = child.wait()
        self.said, self.promised = child.said, child.promised
        return code, child.has_failed

    def start(
        self, command: tuple[str, ...], fault: Fault | None = None, stub: Stub = NO_STUB, file_bytes: int | None = None
    ) -> Child:
        """Begin a command in a forked process, with the model's own engine if ``stub`` is None."""
        failed, said = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
            report = self._report if fault is None and file_bytes is None else None
            injector = Injector(self.work, fault, lambda sizes: os.write(failed[1], json.dumps(sizes).encode()))
            self._run(command, injector, stub, said[1], report)
        os.close(failed[1])
        os.close(said[1])
        return Child(pid, failed[0], said[0])

    def operations(self) -> list[Operation]:
        """What the last undisturbed child did."""
        return [Operation(*item) for item in json.loads(self._report.read_text())]

    def _run(
        self, command: tuple[str, ...], injector: Injector, stub: Stub, said: int, report: Path | None
    ) -> NoReturn:
        """In the child: the command, with what it did to files in ``report``."""

        def act() -> int:
            if self._is_watched:
                injector.arm()
            code = call(command, engine_factory=None if stub is None else stub_factory(**stub))
            injector.end()
            if report is not None:
                operations = [(operation.name, operation.file) for operation in injector.operations]
                report.write_text(json.dumps(operations))
            return code

        in_child(self.work, "input.jsonl" if self.scenario.has_stdin else os.devnull, said, act)


def in_child(folder: Path, stdin: str, said: int, act: Callable[[], int]) -> NoReturn:
    """End a forked process with the exit code of an act in a folder; what it prints goes to a descriptor."""
    code = 1
    try:
        os.chdir(folder)
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the descriptors themselves
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ["BATCHGEN_DEBUG"] = "1"
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def content(folder: Path) -> dict[str, Any]:
    """All files below a folder, by name: what of them must be the same whatever happened on the way.

    The journals of jobs, whose names are drawn, are told by their number.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "journal" not in path.parts)
    journals = {str(path.relative_to(folder)): len([*path.iterdir()]) for path in folder.rglob("journal")}
    return {str(path.relative_to(folder)): content_of(path) for path in files} | journals


def content_of(path: Path) -> Any:
    """What of a file of a finished run must be the same."""
    if path.is_dir():
        return None
    if path.name == "job.json":
        manifest = json.loads(path.read_bytes())  # besides, it says when the files of the run were written
        del manifest["job"]["cluster"]  # where it ran
        return {key: manifest[key] for key in ("job", "output_keys", "fingerprints", "shard", "num_rows")}
    if path.name == "report.json":
        report = json.loads(path.read_bytes())
        return {key: report.get(key) for key in ("rows", "errors", "accuracy", "tokens", "finish_reasons")}
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return str(table.schema), [timeless(row) for row in table.to_pylist()]
    if path.name == "outputs.jsonl":
        return [timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return path.read_bytes()


class Attack:
    """The faults of one scenario and their counts."""

    def __init__(self, stage: Stage, share: float, rng: random.Random) -> None:
        self.stage = stage
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._share = share
        self._rng = rng
        self._again = stage.scenario.again or stage.scenario.act
        self._undisturbed: dict[str, Any] = {}
        self._code = DONE  # of the command undisturbed
        self._num_operations = 0

    def run(self) -> None:
        """Do all the faults."""
        for number, (fault, operation) in enumerate(self._faults(self.undisturbed())):
            is_doubled = number % 2 == 1
            act = functools.partial(self._hit, self.stage.scenario.act, fault, self.stage.scenario.stub)
            self._attack(f"{fault} ({operation.name} {operation.file})", act, is_doubled=is_doubled)
        for kind in POWER:
            act = functools.partial(self._lose_power_at_the_end, Fault(kind, _NEVER))
            self._attack(f"{kind} at the end", act, is_doubled=False)
        largest = max(path.stat().st_size for path in self.stage.work.rglob("*") if path.is_file())
        for file_bytes in range(0, largest + 4096, 512):
            if self._rng.random() < 2 * self._share:
                act = functools.partial(self._outgrow, file_bytes)
                self._attack(f"no file above {file_bytes} bytes", act, is_doubled=False)

    def undisturbed(self) -> list[Operation]:
        """Do the command in peace; what it does to files."""
        self.stage.prepare()
        self._code, _ = self.stage.child(self.stage.scenario.act, stub=self.stage.scenario.stub)
        operations = self.stage.operations()
        assert self._code in (DONE, FAILED_ROWS, STOPPED), self.stage.said
        if self._code == STOPPED:
            assert self.stage.child(self._again)[0] in (DONE, FAILED_ROWS), self.stage.said
        self._undisturbed = content(self.stage.work)
        self.counts["operations"] = self._num_operations = len(operations)
        return operations

    def fill_disk(self, resize: Callable[[int], None]) -> None:
        """The command on a disk with none, one, two ... pages left, or each so many of them as ``SHARE`` says, until it
        gets through; ``resize`` sets the bytes.
        """
        self.undisturbed()
        for space in range(0, 1 << 20, 4096 * round(1 / self._share)):
            self.stage.restore()
            resize(space)
            code, _ = self.stage.child(self.stage.scenario.act, stub=self.stage.scenario.stub)
            resize(1 << 20)
            self.counts["full disk"] += code == 1
            self._attack(f"disk with {space} bytes left", self._check_said, is_doubled=False, restores=False)
            if code in (DONE, FAILED_ROWS, STOPPED):
                return

    def _faults(self, operations: list[Operation]) -> Iterator[tuple[Fault, Operation]]:
        for at, operation in enumerate(operations):
            for kind in KINDS:
                if operation.takes(kind) and self._rng.random() < self._share:
                    yield Fault(kind, at, lasts=kind == "ENOSPC" or self._rng.random() < 0.5), operation

    def _attack(self, what: str, act: Callable[[], None], *, is_doubled: bool, restores: bool = True) -> None:
        """Do one fault, maybe another one on what it left, then see that the job ends as if nothing had been."""
        try:
            if restores:
                self.stage.restore()
            act()
            if is_doubled:
                fault = Fault(self._rng.choice(KINDS), self._rng.randrange(self._num_operations))
                what += f", then {fault}"
                self._hit(self._again, fault)
            self._finish()
            found, wanted = content(self.stage.work), self._undisturbed
            assert found.keys() == wanted.keys(), f"other files: {sorted(found.keys() ^ wanted.keys())}"
            differing = [name for name in found if found[name] != wanted[name]]
            assert not differing, f"{differing} differ"
        except (AssertionError, OSError, ValueError) as error:  # the last two: files that are no longer what they were
            self.failures.append(f"{what}: {error}")

    def _hit(self, command: tuple[str, ...], fault: Fault, stub: Stub = NO_STUB) -> None:
        code, has_happened = self.stage.child(command, fault, stub)
        self.counts[fault.kind] += has_happened
        if has_happened and fault.kind in DEADLY:
            assert code == KILLED, f"exit code {code}: {self.stage.said}"
            self._check_synced()
            return
        assert code in (DONE, 1, MISMATCH, FAILED_ROWS, STOPPED), f"exit code {code}: {self.stage.said}"
        self._check_said()

    def _lose_power_at_the_end(self, fault: Fault) -> None:
        """Power is lost as soon as the command has ended: what it has reported is there."""
        self._hit(self.stage.scenario.act, fault, self.stage.scenario.stub)
        if self._code != STOPPED:
            found = content(self.stage.work)
            wanted = {name: value for name, value in self._undisturbed.items() if not name.endswith("journal")}
            lost = [name for name, value in wanted.items() if found.get(name) != value]  # old journals may come back
            assert not lost, f"{lost} differ after the command has ended"

    def _check_synced(self) -> None:
        for name, size in self.stage.promised.items():
            path = self.stage.work / name
            found = path.stat().st_size if path.exists() else None
            assert (found or 0) >= size, f"{size} bytes of {name} must survive, {found} are there"

    def _outgrow(self, file_bytes: int) -> None:
        """The same with a file system that takes no larger files, for SQLite too."""
        code, _ = self.stage.child(self.stage.scenario.act, stub=self.stage.scenario.stub, file_bytes=file_bytes)
        self.counts["EFBIG"] += code == 1
        assert code in (DONE, 1, FAILED_ROWS, STOPPED), f"exit code {code}: {self.stage.said}"
        self._check_said()

    def _check_said(self) -> None:
        assert "Traceback" not in self.stage.said, self.stage.said

    def _finish(self) -> None:
        """Run the command once more: it must get through, or refuse to touch a run of another job."""
        code, _ = self.stage.child(self._again)
        if code == MISMATCH and self.stage.scenario.may_refuse and "--overwrite" in self.stage.said:
            code, _ = self.stage.child((*self._again, "--overwrite"))
        assert code in (DONE, FAILED_ROWS), f"cannot go on, exit code {code}: {self.stage.said}"
        self._check_said()


def on_small_disk(mount: Path) -> Callable[[int], None]:
    """Sets how many bytes are left on the tmpfs at ``mount``."""

    def resize(space: int) -> None:
        found = os.statvfs(mount)
        size = (found.f_blocks - found.f_bfree) * found.f_frsize + space
        subprocess.run(["mount", "-o", f"remount,size={size}", str(mount)], check=True)

    return resize


def main(scenarios: list[str], folder: Path, share: float, seed: int, mount: Path | None = None) -> None:
    """Attack scenarios, by filling the tmpfs at ``mount`` if one is given; prints the counts and what failed."""
    infer_fields([b'{"id": 0}'])  # imports pyarrow, and pandas with it, once here instead of in every child
    pa.set_cpu_count(1)
    journal_module.SEGMENT_BYTES = 1500
    journal_module.SYNC_SECONDS = journal_module.MAX_SYNC_SECONDS = 0.0  # each row is synced
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for scenario in scenarios:
        where = folder / scenario
        where.mkdir()
        attack = Attack(
            Stage(SCENARIOS[scenario], where, mount and mount / scenario), share, random.Random(f"{seed} {scenario}")
        )
        if mount is None:
            attack.run()
        else:
            attack.fill_disk(on_small_disk(mount))
        counts += attack.counts
        failures += [f"{scenario}: {failure}" for failure in attack.failures]
        shutil.rmtree(attack.stage.work)
    print(json.dumps({"counts": counts, "failures": failures}))


if __name__ == "__main__":
    _, names, where, part, number, *rest = sys.argv
    main(names.split(","), Path(where), float(part), int(number), *map(Path, rest))
