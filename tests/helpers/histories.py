"""Histories of one folder: edits of rows, files and job between starts, of which some are stopped, killed or fail.

``python histories.py FIRST COUNT [workers] [real]`` does the histories of the seeds from ``FIRST`` on and prints the
counts as JSON, with each history that failed, shortened to the steps that it takes. After any start a reader finds
whole outputs, of before or of now; a start that ends well leaves what a fresh run elsewhere leaves, and has computed
exactly the rows whose results were not there, by a model that knows nothing of fingerprints (``Answers``).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from fault_injection import KILLED, KINDS, Fault
from fault_runs import DONE, FAILED_ROWS, MISMATCH, RUN, STOPPED, Scenario, Stage, content_of
from run_helpers import MODEL, text_model, toml_of
from stub_engine import StubEngine, stub_factory

import batchgen.run.job  # noqa: F401 - imported once here instead of in every child
from batchgen.cli.main import call
from batchgen.core.records import Result
from batchgen.output import journal as journal_module
from batchgen.output.formats.parquet import infer_fields

FORMS = ("jsonl", "parquet", "openai-batch")
ROWS = (
    *("append", "insert", "remove", "move", "edit", "recolumn", "rename", "duplicate", "break", "mend"),
    *("empty", "cut", "add_file", "drop_file", "back", "limit"),
)
JOB = (
    *("max_tokens", "temperature", "seed", "n", "logprobs", "token_ids", "keep", "format", "ends"),
    *("max_model_len", "max_tokens", "seed"),
    *("template", "quantization", "dtype", "parse", "thinking", "labels", "extract"),
)
_VALUES: dict[str, tuple[Any, ...]] = {  # the first is that of a new job
    "max_tokens": (8, 12, 4, 32),
    "temperature": (0.0, 1.0, 0.7),
    "seed": (0, 1),
    "n": (1, 2),
    "logprobs": (None, 1, 2),
    "token_ids": (False, True),
    "keep": (("*",), ("note",), ()),
    "format": FORMS,
    "ends": ((), ("zq",)),
    "max_model_len": (None, 30, 24),
    "limit": (None, 5, 8),
    "template": ("plain", "brackets", "asked"),
    "quantization": ("none", "w8a16", "w8a8"),
    "dtype": ("auto", "float32", "bfloat16"),
    "parse": ((), ("reasoning",), ("json",)),
    "thinking": (None, 3, 6),
    "labels": ((), ("yes", "no")),
    "extract": (None, "last_number", r"(\w+)"),
}
_TEMPLATES = {  # the first two give the same prompts
    name: "{# " + marker + " #}{% for m in messages %}" + asked + "{{ m.content }}{% endfor %}"
    for name, marker, asked in (("plain", "</think>", ""), ("brackets", "[/THINK]", ""), ("asked", "</think>", "Q: "))
}
_OF_TEXT = ("max_tokens", "temperature", "seed", "n", "logprobs", "token_ids", "ends", "parse", "thinking", "extract")
_FEW = 20  # results below which the rule counts files alone
_OPERATIONS = 110  # about as many as a run changes its files by
Key = tuple[Any, ...]
Found = tuple[str, int, bool, bool]


@dataclass(frozen=True)
class Step:
    """An edit or a start; ``at`` says which row, byte, operation or value, as a share."""

    kind: str
    at: float
    n: int


@dataclass(frozen=True)
class History:
    """What is done to one folder, as plain data."""

    form: str
    has_ids: bool
    num_rows: int
    job: tuple[tuple[str, int], ...]  # keys that begin with another value than the first of ``_VALUES``
    steps: tuple[Step, ...]
    flags: tuple[str, ...] = ()  # "real": the sample model's own engine; "workers": two of them

    @property
    def options(self) -> list[str]:
        return ["--workers", "2"] if "workers" in self.flags else []


def history_of(seed: int, flags: tuple[str, ...] = ()) -> History:
    """The history of a seed: a job of any kind is started, then edited and started again, several times."""
    rng = random.Random(seed)

    def step(*kinds: str) -> Step:
        return Step(rng.choice(kinds), round(rng.random(), 3), rng.randrange(8))

    steps = [step("run", "run", "run", "stop", "kill", "power")]
    for _ in range(rng.randint(3, 6)):
        steps += [step(*rng.choice((ROWS, JOB, JOB))) for _ in range(rng.choice((0, 1, 1, 2)))]
        steps += [step("elsewhere")] * (rng.random() < 0.4)
        steps.append(step(*["update"] * 6, *["run"] * 4, *["stop"] * 2, *KINDS))
    often = dict.fromkeys(_VALUES, 0.6) | {"temperature": 0.9, "limit": 0.1, "max_model_len": 0.1, "labels": 0.1}
    often |= dict.fromkeys(("template", "quantization", "dtype", "parse", "thinking", "extract"), 0.3)
    job = tuple((name, rng.randrange(len(values))) for name, values in _VALUES.items() if rng.random() < often[name])
    return History(rng.choice(FORMS), rng.random() < 0.5, rng.choice((9, 24)), job, tuple(steps), flags)


@dataclass(frozen=True)
class State:
    """Job and input files as they are at one moment; ``files`` holds lines, of which the last may be torn."""

    job: tuple[tuple[str, Any], ...]
    files: tuple[tuple[str, tuple[str, ...]], ...]

    @cached_property
    def keys(self) -> dict[str, Any]:
        return dict(self.job)

    def value(self, name: str) -> Any:
        return self.keys[name]

    @property
    def lines(self) -> list[str]:
        return [line for _, lines in self.files for line in lines]


@dataclass(frozen=True)
class Answers:
    """What a fresh run of a state leaves: its files, and the result of each row that can run."""

    files: Mapping[str, Any]
    results: Mapping[int, Result]
    state: State

    def key(self, index: int) -> Key:
        """All that decides a row's tokens and which of their facts are asked for, but the limit of a single sample."""
        row, job = json.loads(self.state.lines[index]), self.state.keys
        body = row.get("body", row)
        own = body.get("sampling", {name: body[name] for name in ("temperature", "seed") if name in body})
        names = ("temperature", "seed", "n", "logprobs", "ends")
        values = {name: job[name] for name in names} | own
        is_drawn = bool(values["temperature"]) and not job["labels"]
        drawn = row.get("custom_id", row.get("id", index)) if is_drawn else None
        seed = values["seed"] if is_drawn else None
        limits = self.limit(index) if values["n"] > 1 else None
        asked: Key = (values["n"], values["logprobs"], values["ends"], job["labels"], job["thinking"])
        is_split = "reasoning" in job["parse"]
        marker = job["template"] == "brackets" if is_split or job["thinking"] is not None else None
        asked += is_split, marker, job["template"] == "asked" and "body" not in row
        asked += job["quantization"], dtype_of(job), packs_logprobs(job)
        return body.get("prompt", body.get("question")), values["temperature"], drawn, seed, *asked, limits

    def result(self, index: int) -> Found:
        """How a row's answer ended, after how many tokens, and whether these and its value were recorded."""
        found, job = self.results[index].first, self.state.keys
        return str(found.finish_reason), len(found.token_ids), bool(job["token_ids"]), "json" in job["parse"]

    def holds(self, index: int, found: Found) -> bool:
        """Whether a result under the key of a row is that of the row."""
        reason, length, has_token_ids, has_value = found
        values = self.state.keys
        if (values["token_ids"] and not has_token_ids) or ("json" in values["parse"] and not has_value):
            return False
        limit = self.limit(index)
        return bool(values["n"] > 1 or values["labels"] or (length == limit if reason == "length" else length <= limit))

    def limit(self, index: int) -> int:
        """The most tokens that a sample of a row may have."""
        most, context = self.state.keys["max_tokens"], self.state.keys["max_model_len"]
        return int(most if context is None else min(most, context - self.results[index].num_prompt_tokens))


def packs_logprobs(job: Mapping[str, Any]) -> bool:
    """Whether log-probabilities are columns of numbers, which no other format has."""
    return job["format"] == "parquet" and job["logprobs"] is not None


def dtype_of(job: Mapping[str, Any]) -> str:
    """The dtype in which the stub says that it computes."""
    return "bfloat16" if job["dtype"] == "auto" else str(job["dtype"])


Sources = dict[Key, set[Found]]


def sources_of(answers: Answers, indexes: Iterable[int] | None = None) -> Sources:
    """The results of rows, by what decides them."""
    found: Sources = {}
    for index in answers.results if indexes is None else indexes:
        if index in answers.results:
            found.setdefault(answers.key(index), set()).add(answers.result(index))
    return found


def needed(answers: Answers, sources: Sources) -> int:
    """How many rows have no result in the sources that is theirs."""
    return sum(
        not any(answers.holds(index, found) for found in sources.get(answers.key(index), ()))
        for index in answers.results
    )


def joined(*all_sources: Sources) -> Sources:
    """The results of all."""
    return {key: set().union(*(found.get(key, ()) for found in all_sources)) for key in set().union(*all_sources)}


@dataclass
class World:
    """A folder with its job and input, and what a user may rely on: see ``check_reader`` and ``check_done``."""

    root: Path
    history: History
    state: State = field(init=False)
    num_made: int = 0  # rows, so that each new one has a prompt of its own
    published: State | None = None  # that of the outputs, once a start has ended well and none was disturbed since
    sources: Sources = field(default_factory=dict)  # of the folder; known where ``is_exact``
    is_exact: bool = True
    disturbed: State | None = None  # that of a start which ended otherwise
    counts: Counter[str] = field(default_factory=Counter)
    answers: dict[State, Answers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = self.root / "work"
        self.work.mkdir()
        self.folder = self.work / "out"
        self.stage = Stage(Scenario(RUN), self.root, self.work)
        rows = [self.row() for _ in range(self.history.num_rows)]
        half = len(rows) // 2
        keys = {name: values[0] for name, values in _VALUES.items()}
        keys |= {name: _VALUES[name][number] for name, number in self.history.job} | {"format": self.history.form}
        for name, text in _TEMPLATES.items():
            (self.work / f"{name}.jinja").write_text(text, encoding="utf-8")
        self.write(State(self.possible(keys), (("a.jsonl", tuple(rows[:half])), ("b.jsonl", tuple(rows[half:])))))

    @property
    def is_batch(self) -> bool:
        """Whether the rows are OpenAI's requests."""
        return self.history.form == "openai-batch" and self.history.has_ids

    def possible(self, keys: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """The keys of a job, without labels where their scores have no place, or with nothing but them."""
        if keys["labels"] and (self.is_batch or keys["format"] == "openai-batch"):
            keys = {**keys, "labels": ()}
        return tuple(({**keys, **{name: _VALUES[name][0] for name in _OF_TEXT}} if keys["labels"] else keys).items())

    def row(self, **changes: Any) -> str:
        """The line of a new row; every third one has sampling values of its own."""
        number = self.num_made
        self.num_made += 1
        own = {"temperature": 0.5, "seed": number} if number % 3 == 2 else {}
        prompt = f"Question {number}: how much is {number * 37 % 101}?"
        if self.is_batch:
            body = {"prompt": prompt, **own}
            row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body, "note": "new"}
        else:
            row = {"id": f"r{number}"} if self.history.has_ids else {}
            row |= {"question": prompt, "note": "new", "sampling": own}
        return json.dumps({**row, **changes}) + "\n"

    def write(self, state: State) -> None:
        """Put job and input files in their places, each whole."""
        self.state = state
        (self.work / "in").mkdir(exist_ok=True)
        names = {name for name, _ in state.files}
        for path in (self.work / "in").iterdir():
            if path.name not in names:
                path.unlink()
        for name, lines in state.files:
            path, content = self.work / "in" / name, "".join(lines)
            if not path.exists() or path.read_text(encoding="utf-8") != content:
                path.with_suffix(".new").write_text(content, encoding="utf-8")
                path.with_suffix(".new").replace(path)
        (self.work / "job.toml").write_text(self.toml(self.folder), encoding="utf-8")

    def toml(self, folder: Path) -> str:
        """The job file of the state as it is, with its outputs in ``folder``."""
        job, is_batch = self.state.keys, self.is_batch
        model = MODEL if "real" in self.history.flags else text_model()
        given: dict[str, dict[str, Any]] = {
            "model": {"path": str(model), "quantization": job["quantization"], "dtype": job["dtype"]},
            "input": {"path": str(self.work / "in" / "*.jsonl"), "columns": list(job["keep"])},
            "sampling": {name: job[name] for name in ("max_tokens", "temperature", "seed")},
            "output": {"path": str(folder), "format": job["format"], "token_ids": job["token_ids"]},
            "engine": {"max_model_len": job["max_model_len"] or "auto"},
        }
        given["input"] |= {"format": "openai-batch"} if is_batch else {"prompt": "{question}"}
        given["input"] |= {"id": "id" if self.history.has_ids and not is_batch else None, "limit": job["limit"]}
        given["sampling"] |= {"n": job["n"], "stop": list(job["ends"]), "logprobs": job["logprobs"]}
        given["sampling"] |= {"thinking_token_budget": job["thinking"]}
        given["input"]["chat_template"] = str(self.work / f"{job['template']}.jinja")
        given["output"]["parse"] = list(job["parse"])
        given["eval"] = {"expected": "note"} | ({"extract": job["extract"]} if job["extract"] else {})
        if job["labels"]:
            del given["sampling"]
            given["classify"] = {"labels": list(job["labels"])}
        return toml_of(given)

    def do(self, step: Step) -> None:
        """One step, and after a start all that must hold then."""
        if step.kind == "back":
            self.write(self.published or self.state)
        elif step.kind == "elsewhere":
            self.elsewhere()
        elif step.kind in ROWS[:-2]:
            self.write(self.edited(step))
        elif step.kind in _VALUES:
            values = [value for value in _VALUES[step.kind] if value != self.state.value(step.kind)]
            keys = self.possible({**self.state.keys, step.kind: values[step.n % len(values)]})
            self.write(State(keys, self.state.files))
        else:
            self.start(step)

    def edited(self, step: Step) -> State:
        """The state with other rows or files."""
        files = {name: list(lines) for name, lines in self.state.files}
        name = sorted(files)[step.n % len(files)]
        lines = files[name]
        at = int(step.at * len(lines))
        if step.kind == "add_file":
            files[f"{'0c'[step.n % 2]}{len(files)}.jsonl"] = [self.row() for _ in range(step.n + 1)]
        elif step.kind == "drop_file":
            if len(files) > 1:
                del files[name]
        elif step.kind in ("edit", "recolumn", "rename", "duplicate"):
            if at < len(lines) and _is_whole(lines[at]):
                self.change_row(step, lines, at)
        else:
            self.change_lines(step, lines, at)
        return State(self.state.job, tuple((name, tuple(files[name])) for name in sorted(files)))

    def change_row(self, step: Step, lines: list[str], at: int) -> None:
        """Change one row of a file."""
        row, new = json.loads(lines[at]), json.loads(self.row())
        match step.kind:
            case "edit":
                row |= {name: new[name] for name in ("question", "body") if name in row}
            case "recolumn":
                row["note"] = f"edited {step.n}"
            case "rename":
                row |= {name: new[name] for name in ("id", "custom_id") if name in row}
        if step.kind == "duplicate":
            lines.insert(step.n % (at + 1), json.dumps(row) + "\n")
        else:
            lines[at] = json.dumps(row) + "\n"

    def change_lines(self, step: Step, lines: list[str], at: int) -> None:
        """Change which lines a file has."""
        match step.kind:
            case "append":
                lines[-1:] = [line.rstrip("\n") + "\n" for line in lines[-1:]]
                lines += [self.row() for _ in range(step.n + 1)]
            case "insert":
                lines.insert(at, self.row())
            case "remove":
                del lines[at : at + 1]
            case "move" if lines:
                lines[:] = [line.rstrip("\n") + "\n" for line in lines]
                lines.insert(step.n % len(lines), lines.pop(at))
            case "break" if lines:
                lines[at] = "{ no row\n"
            case "mend":
                lines[:] = [line if _is_whole(line) else self.row() for line in lines]
            case "empty":
                lines.clear()
            case "cut" if lines:
                lines[at:] = [lines[at][: len(lines[at]) // 2]]

    def elsewhere(self) -> None:
        """Two shards in other folders reuse the rows of this one; merged they are a fresh run."""
        if self.published is None or self.disturbed is not None or self.history.flags:
            return
        made: list[StubEngine] = []
        fresh, folders = self.fresh(), [str(self.work / f"part-{number}") for number in (1, 2)]
        command = ["run", str(self.work / "job.toml"), "--reuse", str(self.folder), "--output"]
        ran = [in_process([*command, folder, "--shard", f"{n}/2"], made) for n, folder in enumerate(folders, 1)]
        whole = self.work / "whole"
        ran.append(in_process(["merge", *folders, "--output", str(whole)], made))
        assert all(code in (DONE, FAILED_ROWS) for code, _ in ran), ran
        found, wanted = (
            {n: f[n] for n in f if n.startswith(("outputs", "errors"))} for f in (files_of(whole), fresh.files)
        )
        assert found == wanted, f"merged shards differ: {found}, {wanted}"
        num_started, num_needed = sum(engine.num_started for engine in made), needed(fresh, self.sources)
        assert num_started == num_needed, f"elsewhere {num_started} rows computed, {num_needed} needed"
        self.counts["elsewhere"] += 1
        for path in (*folders, str(whole)):
            shutil.rmtree(path)

    def start(self, step: Step) -> int:
        """A start of the command, disturbed or not. Raises AssertionError where something does not hold."""
        updates = step.kind == "update" or (step.kind in KINDS and step.n % 2 == 1)
        command = ["run", str(self.work / "job.toml"), *["--update"] * updates, *self.history.options]
        command += ["--max-total-tokens", str(20 + int(step.at * 300))] if step.kind == "stop" else []
        before, outputs = files_of(self.folder), self.outputs()
        made: list[StubEngine] | None = None
        if step.kind in KINDS or self.history.flags:
            fault = self.fault(step) if step.kind in KINDS else None
            code, has_happened = self.stage.child(tuple(command), fault, None if "real" in self.history.flags else {})
            said = self.stage.said
            assert code in (DONE, 1, MISMATCH, FAILED_ROWS, STOPPED, KILLED), f"exit code {code}: {said}"
            is_disturbed = has_happened
        else:
            made = []
            code, said = in_process(command, made)
            is_disturbed = False
        self.counts[f"{step.kind} {code}"] += 1
        assert "Traceback" not in said, said
        self.check_reader(outputs)
        if code == MISMATCH and not is_disturbed:
            assert not made, "an engine was loaded for a job that is refused"
            self.check_refused(said, before, updates=updates)
        elif code in (DONE, FAILED_ROWS):
            if not updates and self.published is not None and self.disturbed is None:
                assert not self.loses_much(), f"not refused, though much is lost: {said}"
            self.check_done(said, made, may_be_left=is_disturbed)
        else:
            assert is_disturbed or (code == STOPPED and step.kind == "stop"), f"exit code {code}: {said}"
            self.is_exact = self.is_exact and bool(made) and not is_disturbed
            if made and self.is_exact:
                self.sources = joined(self.sources, sources_of(self.fresh(), made[0].finished))
            self.disturbed = self.state
        return code

    def fault(self, step: Step) -> Fault:
        """The fault of a step, at a change of files or for a while from one on."""
        return Fault(step.kind, int(step.at * _OPERATIONS), lasts=step.n % 4 < 2, counts_reads=False)  # type: ignore

    def outputs(self) -> dict[str, Any]:
        """The outputs that a reader finds."""
        return {path.name: content_of(path) for path in sorted(self.folder.glob("outputs.*"))}

    def check_reader(self, before: Mapping[str, Any]) -> None:
        """Outputs are whole, of before or of now, and once there they are never missing."""
        now = self.outputs()
        assert now or not before, "the outputs are gone"
        for name, found in now.items():
            if found != before.get(name):
                assert found == self.fresh().files.get(name), f"{name} is neither what it was nor that of a fresh run"

    def check_refused(self, said: str, before: Mapping[str, Any], *, updates: bool) -> None:
        """Only what loses results, or another job, is refused, and nothing changes then."""
        assert not updates, f"an update is refused: {said}"
        assert "--update" in said, f"a refusal that names no way on: {said}"
        found = [
            {name: files[name] for name in files if name != "journal" and not name.startswith(".")}
            for files in (before, files_of(self.folder))
        ]
        assert found[0] == found[1], f"a refusal changed files: {said}"  # but for what is swept: half-written ones
        if self.published is not None and self.disturbed is None:
            assert self.loses_much(), f"refused, though little is lost: {said}"

    def check_done(self, said: str, made: list[StubEngine] | None, *, may_be_left: bool = False) -> None:
        """The folder is that of a fresh run, and nothing was computed twice.

        A disk that refuses to remove a journal that is no longer needed ends no run: the next start removes it.
        """
        fresh = self.fresh()
        self.compare(fresh.files, said, is_back=self.published == self.state, may_be_left=may_be_left)
        is_same = self.disturbed in (None, self.state)
        if made is not None:
            num_started = sum(engine.num_started for engine in made)
            num_needed = needed(fresh, self.sources)
            if self.is_exact:
                assert num_started == num_needed, f"{num_started} rows computed, {num_needed} needed; {said}"
                self.counts["exact"] += 1
            elif is_same:
                assert num_started <= num_needed, f"{num_started} rows computed, {num_needed} needed; {said}"
        if self.published != self.state:
            self.sources = sources_of(fresh)
        self.published, self.disturbed, self.is_exact = self.state, None, True

    def compare(self, wanted: Mapping[str, Any], said: str, *, is_back: bool, may_be_left: bool = False) -> None:
        """The files of the folder are those of a fresh run; one that was there stands beside journals of others.

        After a loss of power at the end of a run, the next start removes what it left half written.
        """
        found = {name: file for name, file in files_of(self.folder).items() if not (may_be_left and name[0] == ".")}
        if (is_back or may_be_left) and "journal" not in wanted:
            found.pop("journal", None)
        assert found.keys() == wanted.keys(), f"other files: {sorted(found.keys() ^ wanted.keys())}; {said}"
        differing = {name: (found[name], wanted[name]) for name in found if found[name] != wanted[name]}
        assert not differing, f"{differing} differ; {said}"

    def loses_much(self) -> bool:
        """Whether an update of finished outputs to the state as it is must be asked for."""
        assert self.published is not None
        was, now = self.published.keys, self.state.keys
        if any(was[name] != now[name] for name in now if name not in ("limit", "format", "dtype")):
            return True
        if packs_logprobs(was) != packs_logprobs(now):
            return True
        if dtype_of(was) != dtype_of(now) or (now["dtype"] == "auto" != was["dtype"]):  # what auto is, is not known yet
            return True
        if now["limit"] is not None and (was["limit"] is None or now["limit"] < was["limit"]):
            return True
        old, fresh = self.answers[self.published], self.fresh()
        if len(self.state.files) < len(self.published.files):
            return True
        num_old, num_good = len(old.results), len(fresh.results)
        num_kept = num_good - needed(fresh, self.sources)
        return num_old >= _FEW and (num_good < 0.9 * num_old or num_kept < 0.5 * num_old)

    def fresh(self) -> Answers:
        """What a fresh run of the state as it is leaves, in a folder of its own; each is done once."""
        if self.state not in self.answers:
            folder = self.root / "fresh"
            job = self.root / "fresh.toml"
            job.write_text(self.toml(folder), encoding="utf-8")
            made: list[StubEngine] = []
            code, said = in_process(["run", str(job)], made, is_real="real" in self.history.flags)
            assert code in (DONE, FAILED_ROWS), said
            results = {key: result for engine in made for key, result in engine.finished.items() if not result.error}
            self.answers[self.state] = Answers(files_of(folder), results, self.state)
            shutil.rmtree(folder)
        return self.answers[self.state]


def in_process(command: list[str], made: list[StubEngine], *, is_real: bool = False) -> tuple[int, str]:
    """Exit code of a command, and what it said; its engines are added to ``made``."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = call(command, engine_factory=None if is_real else stub_factory(made, keeps_results=True))
    return code, said.getvalue()


def files_of(folder: Path) -> dict[str, Any]:
    """The files of a finished run, by name: what of them must be the same whatever came before."""
    names = {path.name for path in folder.glob("*")} - {"run.lock", "progress.json"}
    found = {name: content_of(folder / name) for name in sorted(names)}
    if job := found.get("job.json", {}).get("job"):
        for key in ("path", "reuse"):
            del job["output"][key]
        del job["model"]["dtype"]  # what it leads to is in the fingerprints
    return found


def _is_whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def failure_of(history: History, counts: Counter[str]) -> str | None:
    """Why a history fails; None where it does not."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        world = World(Path(folder), history, counts=counts)
        try:
            for step in (*history.steps, Step("update", 0.0, 0)):
                world.do(step)
            assert world.published == world.state, "the last update has not ended well"
        except AssertionError as error:
            return str(error)[:2000]
    return None


def shortened(history: History) -> History:
    """A history that fails with as few of its steps as possible."""
    at = 0
    while at < len(history.steps):
        fewer = replace(history, steps=history.steps[:at] + history.steps[at + 1 :])
        if failure_of(fewer, Counter()):
            history = fewer
        else:
            at += 1
    return history


def prepare() -> None:
    """Make starts quick, and each row of theirs a file operation."""
    infer_fields([b'{"id": 0}'])  # imports pyarrow, and pandas with it, once here instead of in every child
    pa.set_cpu_count(1)
    journal_module.SEGMENT_BYTES = 1500
    journal_module.SYNC_SECONDS = journal_module.MAX_SYNC_SECONDS = 0.0  # each row is synced


def main(first: int, count: int, *flags: str) -> None:
    """Do histories; prints the counts and those that failed."""
    prepare()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + count):
        history = history_of(seed, flags)
        counts["histories"] += 1
        if failure_of(history, counts):
            history = shortened(history)
            failures.append(f"BATCHGEN_HISTORY_SEED={seed}: {history}: {failure_of(history, Counter())}")
    print(json.dumps({"counts": counts, "failures": failures}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
