"""An update killed at each point of its way, and what each command makes of the folder then.

``python kill_points.py FORM`` prints, as JSON, what was found for each point of ``POINTS``: whose outputs and errors
a reader finds, how many rows a start of the same job computes, and one of the job before, and what status, report, plan
and a run that reuses the folder say. After each start the folder is compared with that of a fresh run.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from fault_injection import KILLED, Fault
from fault_runs import DONE, FAILED_ROWS, content_of
from histories import History, State, Step, World, in_process, prepare
from stub_engine import StubEngine

COMMANDS = ("status", "report", "plan")


# The operation after which each kill comes, by what was there then: its name, its files, and which of these it is.
POINTS = {
    "folder": ("fsync", "journal", 1),
    "journal": ("replace", ".job.json.tmp", 1),
    "mid pass": ("write", "*.seg", 3),
    "pass ended": ("replace", ".job.json.tmp", 2),
    "computing": ("write", "*.seg", 9),  # behind six rows that are kept and two bad ones
    "whole": ("replace", ".job.json.tmp", 3),
    "staged": ("fsync", ".errors.jsonl.tmp", 1),
    "errors placed": ("replace", ".errors.jsonl.tmp", 1),
    "outputs placed": ("replace", ".outputs.*.tmp", 1),
    "report": ("replace", ".report.json.tmp", 1),
    "job.json": ("replace", ".job.json.tmp", 4),
    "half removed": ("unlink", "*.seg", 1),
}


class Points:
    """A folder whose job is killed in an update from state A to state B."""

    def __init__(self, root: Path, form: str) -> None:
        self.world = World(root, History(form, has_ids=True, num_rows=9, job=(), steps=()), counts=Counter())
        self.world.do(Step("break", 0.9, 1))
        self.before = self.world.state
        self.world.start(Step("run", 0, 0))
        for step in (Step("edit", 0.3, 0), Step("break", 0.5, 0), Step("append", 0, 0)):
            self.world.do(step)
        self.after = self.world.state
        self.done = root / "done"
        shutil.copytree(self.world.work, self.done)
        self.fresh = {"A": self.world.answers[self.before].files, "B": self.world.fresh().files}

    def restore(self, folder: Path) -> None:
        """Put all files back to those in a folder."""
        shutil.rmtree(self.world.work)
        shutil.copytree(folder, self.world.work)

    def points(self) -> dict[str, dict[str, Any]]:
        """What was found at each point."""
        command = ("run", str(self.world.work / "job.toml"))
        found = {}
        killed = self.world.root / "killed"
        for name, (operation, files, number) in POINTS.items():
            self.restore(self.done)
            code, _ = self.world.stage.child(command, Fault("kill", number, after=(operation, files)))
            assert code == KILLED, f"{name}: exit code {code}: {self.world.stage.said}"
            shutil.copytree(self.world.work, killed)
            found[name] = self._found(killed)
            shutil.rmtree(killed)
        return found

    def _found(self, killed: Path) -> dict[str, Any]:
        found: dict[str, Any] = {"outputs": self._whose("outputs."), "errors": self._whose("errors.")}
        found["B computes"] = self._start(self.after, "B", killed)
        found["A computes"] = self._start(self.before, "A", killed)
        for name in COMMANDS:
            self.restore(killed)
            folder = self.world.folder if name != "plan" else self.world.work / "job.toml"
            code, said = in_process([name, str(folder)], [])
            assert code == DONE, f"{name}: {code}: {said}"
            found[name] = said
        self.restore(killed)
        job = self.world.work / "other.toml"
        job.write_text(self.world.toml(self.world.work / "other"), encoding="utf-8")
        code, found["reuse says"] = in_process(["run", str(job), "--reuse", str(self.world.folder)], [])
        return found | {"reuse": code}

    def _whose(self, beginning: str) -> str:
        paths = [path for path in self.world.folder.iterdir() if path.name.startswith(beginning)]
        now = {path.name: content_of(path) for path in paths}
        owners = [
            owner
            for owner, files in self.fresh.items()
            if now == {name: content for name, content in files.items() if name.startswith(beginning)}
        ]
        return "".join(owners)

    def _start(self, state: State, name: str, killed: Path) -> int:
        """How many rows a start computes, at whose end the folder is that of a fresh run."""
        self.restore(killed)
        self.world.write(state)
        made: list[StubEngine] = []
        code, said = in_process(["run", str(self.world.work / "job.toml")], made)
        assert code == FAILED_ROWS, f"{name}: exit code {code}: {said}"
        self.world.compare(self.fresh[name], said, is_back=name == "A")
        return sum(engine.num_started for engine in made)


if __name__ == "__main__":
    prepare()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as where:
        print(json.dumps(Points(Path(where), sys.argv[1]).points()))
