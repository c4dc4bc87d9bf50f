"""Signals at random moments of whole commands, and what running them again makes of it.

``python storm_runs.py FOLDER NUM_KILLS SEED NUM_ROWS [real] [workers] [SCENARIO ...]`` starts commands over mixed jobs,
with the stub engine or the sample model's own, kills them with SIGKILL or stops them in other ways after a random time,
starts them again until they are left to finish, and compares all files with those of an undisturbed run, times aside.
Processes are forked from this one, which has imported all that they need. With ``workers`` most commands run their rows
on workers, which are killed too. Prints the counts as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from fault_runs import DONE, FAILED_ROWS, RUN, SCENARIOS, STOPPED, Child, Scenario, Stage, Stub, content
from local_workers import kill, still_there, workers_of

import batchgen.run.job  # noqa: F401 - imported once here instead of in every child
from batchgen.output.formats.parquet import infer_fields

LOCKED = 5
_PLAIN = "run", "run-parquet", "run-openai", "run-gz-completion", "run-stdin", "shard", "update", "update-job", "merge"
STORMS = {name: SCENARIOS[name] for name in _PLAIN} | {
    "run-stop-strings": Scenario(RUN, sampling='stop = ["a", "the"]\nlogprobs = 1'),
    "run-samples": Scenario(RUN, sampling="n = 3\ntemperature = 0.9\nseed = 3"),
    "run-structured": Scenario(
        RUN, sampling='structured_outputs = { regex = "(The answer is )?[a-z]+, or so" }\ntemperature = 0.9'
    ),
}

REAL = "run", "run-parquet", "run-stop-strings", "run-samples", "run-structured"  # with the sample model's own engine


ON_WORKERS = "run", "update", "run-parquet", "run-openai", "run-gz-completion", "update-job", "run-samples"


class Storm:
    """Signals over one scenario; ``counts`` says which were sent to a process that was still there."""

    def __init__(self, stage: Stage, stub: Stub, rng: random.Random, *, has_workers: bool = False) -> None:
        self.stage = stage
        self.counts: Counter[str] = Counter()
        self._has_workers = has_workers
        self._rng = rng
        self._stub = stub
        self._whole_s = 0.0  # how long the command takes undisturbed
        self._undisturbed: dict[str, Any] = {}

    def prepare(self) -> None:
        """Run the command in peace."""
        self.stage.prepare()
        started_at = time.monotonic()
        code, _ = self.stage.child(self.stage.scenario.act, stub=self._stub)
        self._whole_s = time.monotonic() - started_at
        assert code in (DONE, FAILED_ROWS), self.stage.said
        self._undisturbed = content(self.stage.work)
        if self._has_workers:
            self.stage.restore()
            started_at = time.monotonic()
            code, _ = self.stage.child((*self.stage.scenario.act, "--workers", "2"), stub=self._stub)
            self._whole_s = time.monotonic() - started_at
            self._compare(code)

    def round(self, num_signals: int) -> None:
        """From the start of the command to its end, with signals on the way. Raises AssertionError."""
        self.stage.restore()
        acts: list[Callable[[], None]] = [self._kill, self._kill, self._kill, self._freeze, self._ask, self._two]
        if self._has_workers:
            acts += [self._kill_workers] * 4
        for _ in range(num_signals):
            self._rng.choice(acts)()
        code, _ = self.stage.child(self._act(), stub=self._stub)
        self._compare(code)
        self.counts["rounds"] += 1

    def _compare(self, code: int) -> None:
        assert code in (DONE, FAILED_ROWS), f"exit code {code}: {self.stage.said}"
        found, wanted = content(self.stage.work), self._undisturbed
        assert found.keys() == wanted.keys(), f"other files: {sorted(found.keys() ^ wanted.keys())}"
        differing = [name for name in found if found[name] != wanted[name]]
        assert not differing, f"{differing} differ"

    def _act(self) -> tuple[str, ...]:
        number = self._rng.choice(("1", "2", "3", "")) if self._has_workers else ""
        return (*self.stage.scenario.act, "--workers", number) if number else self.stage.scenario.act

    def _start(self) -> Child:
        return self.stage.start(self._act(), stub=self._stub)

    def _kill(self) -> None:
        """SIGKILL after a random time."""
        child = self._start()
        time.sleep(self._rng.uniform(0, 0.8 * self._whole_s))
        self._end(child, "kill")

    def _kill_workers(self) -> None:
        """SIGKILL to some workers, one after the other, and in the end to the driver, unless it is done before."""
        child = self._start()
        for _ in range(self._rng.randint(1, 4)):
            time.sleep(self._rng.uniform(0, 0.5 * self._whole_s))
            if workers := sorted(workers_of(child.pid)):
                self.counts["kill of a worker"] += kill([self._rng.choice(workers)])
        self._end(child, "kill after workers")

    def _freeze(self) -> None:
        """SIGSTOP, SIGCONT, and SIGKILL some time later."""
        child = self._start()
        time.sleep(self._rng.uniform(0, 0.8 * self._whole_s))
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0, 0.2))
        os.kill(child.pid, signal.SIGCONT)
        self.counts["freeze"] += 1
        time.sleep(self._rng.uniform(0, self._whole_s / 2))
        self._end(child, "kill after freeze")

    def _ask(self) -> None:
        """SIGTERM, and maybe SIGKILL before it is done."""
        child = self._start()
        time.sleep(self._rng.uniform(0, 0.8 * self._whole_s))
        os.kill(child.pid, signal.SIGTERM)
        self.counts["term"] += 1
        if self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0, 0.05))
            self._end(child, "kill after term")
            return
        code = child.wait()
        assert code in (DONE, FAILED_ROWS, STOPPED, -signal.SIGTERM), f"SIGTERM: exit code {code}: {child.said}"

    def _two(self) -> None:
        """Two processes at once: one is turned away, the other is killed."""
        first, second = self._start(), self._start()
        time.sleep(self._rng.uniform(0, 0.8 * self._whole_s))
        self.counts["two at once"] += 1
        for child in (first, second):
            self._end(child, "kill of two")

    def _end(self, child: Child, what: str) -> None:
        workers = workers_of(child.pid) if self._has_workers else set()
        os.kill(child.pid, signal.SIGKILL)
        code = child.wait()
        assert not still_there(workers), "workers have outlived their driver"
        self.counts[what] += code == -signal.SIGKILL
        ends = (DONE, FAILED_ROWS, LOCKED, STOPPED, -signal.SIGKILL, -signal.SIGTERM)  # the last before it listens
        assert code in ends, f"exit code {code}: {child.said}"
        assert "Traceback" not in child.said, child.said


def main(folder: Path, num_kills: int, seed: int, num_rows: int, *names: str, is_real: bool, has_workers: bool) -> None:
    """Rounds over all scenarios, or some, until enough processes were killed; prints the counts and what failed."""
    infer_fields([b'{"id": 0}'])
    pa.set_cpu_count(1)
    if is_real:
        import batchgen.engine
        import batchgen.kernels.cpu.backend  # noqa: F401 - with torch and numba, which have no threads yet
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    storms: dict[str, Storm] = {}
    for name in names or (ON_WORKERS if has_workers else REAL if is_real else STORMS):
        scenario = STORMS[name]
        (folder / name).mkdir()
        threads = "\n[engine]\nthreads = 1" if is_real else ""
        stormy = replace(scenario, sampling=scenario.sampling + threads)
        stage = Stage(stormy, folder / name, num_rows=num_rows, is_watched=False)
        storms[name] = Storm(stage, None if is_real else {"step_s": 0.002}, rng, has_workers=has_workers)
        storms[name].prepare()
    while sum(count for name, count in counts.items() if name.startswith("kill")) < num_kills and not failures:
        for name, storm in storms.items():
            before = Counter(storm.counts)
            try:
                storm.round(rng.randint(1, 5))
            except AssertionError as error:
                failures.append(f"{name}: {error}")
            counts += storm.counts - before
    print(json.dumps({"counts": counts, "failures": failures}))


if __name__ == "__main__":
    where, kills, number, rows, *rest = sys.argv[1:]
    chosen = [name for name in rest if name not in ("real", "workers")]
    flags = {"is_real": "real" in rest, "has_workers": "workers" in rest}
    main(Path(where), int(kills), int(number), int(rows), *chosen, **flags)
