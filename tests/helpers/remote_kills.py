"""Every kill at every request to an object store of a mirrored and published run, and what the next run makes of it.

``python remote_kills.py FOLDER SHARE SEED`` runs a job in forked children: killed before or after request 0, 1, 2 and
so on, from the first look at the mirror to the last file that is published. After each the run directory is lost or
not, every second time another kill follows at a random request, and an undisturbed run ends it. Its outputs are
compared with those of a run without any store, and the bucket with its directory. ``SHARE`` is the share of the kills
that is done, drawn by ``SEED``. Prints the counts as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import s3fs
from fault_injection import KILLED
from fault_runs import mixed_rows
from object_store import ObjectStore, object_store
from run_helpers import JobMaker, quiet, without_timings
from stub_engine import stub_factory

import batchgen.run.job  # noqa: F401 - imported once here instead of in every child
from batchgen.core.errors import ExitCode
from batchgen.output import heartbeat, mirror
from batchgen.run.job import run_job

BUCKET = "kills"


class Attack:
    """One job, of which a child is killed at a request."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        self.job = JobMaker(folder)
        self.job.write([json.dumps(row) if not isinstance(row, str) else row for row in mixed_rows(20)])
        self.store = store
        self.requests = folder / "requests"

    def child(self, kill_at: int | None, *, is_after: bool) -> int:
        """Run the job in a child that is killed at that request to the store; its exit code."""
        pid = os.fork()
        if pid == 0:
            self._run(kill_at, is_after=is_after)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _run(self, kill_at: int | None, *, is_after: bool) -> NoReturn:
        code = 1
        with contextlib.suppress(BaseException):
            self._count(kill_at, is_after=is_after)
            output = {"mirror": f"s3://{BUCKET}/mirror", "publish": f"s3://{BUCKET}/results"}
            spec = self.job.spec(output=output, sampling={"max_tokens": 6})
            code = run_job(spec, quiet(), engine_factory=stub_factory(step_s=0.02)).exit_code
        os._exit(code)

    def _count(self, kill_at: int | None, *, is_after: bool) -> None:
        call, number = s3fs.S3FileSystem._call_s3, 0

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            mine, number = number, number + 1
            self.requests.write_text(str(number), encoding="utf-8")
            if mine == kill_at and not is_after:
                os._exit(KILLED)
            answer = await call(*args, **kwargs)
            if mine == kill_at:
                os._exit(KILLED)
            return answer

        s3fs.S3FileSystem._call_s3 = counted

    def clear(self, *, also_store: bool) -> None:
        """Lose the run directory, and what is in the bucket too."""
        shutil.rmtree(self.job.output, ignore_errors=True)
        for name in self.store.content(BUCKET) if also_store else ():
            self.store.remove(BUCKET, name)

    def check(self, wanted: tuple[object, object]) -> None:
        """The run is as if nothing had been, and the bucket holds it twice."""
        assert (self.job.outputs(), self.job.errors()) == wanted, "other rows"
        here = {path.name: path.read_bytes() for path in self.job.output.iterdir()}
        content = self.store.content(BUCKET)
        for folder, lacks in (("mirror", set()), ("results", {"job.json"})):
            there = {name.partition("/")[2]: there for name, there in content.items() if name.startswith(folder)}
            marker = json.loads(there.pop("batchgen.json"))
            assert marker["complete"], f"{folder} is not complete"
            assert there == {name: here[name] for name in here.keys() - lacks}, f"{folder}: {[*there]}, not {[*here]}"


def main(folder: Path, share: float, seed: int) -> None:
    """Do the kills."""
    rng, counts, failures = random.Random(seed), Counter[str](), []
    mirror.EVERY_S, heartbeat.SILENT_S, heartbeat.SETTLE_S = 0.02, -1.0, 0.0
    with object_store() as store:
        store.make_bucket(BUCKET)
        attack = Attack(folder, store)
        run_job(attack.job.spec(sampling={"max_tokens": 6}), quiet(), engine_factory=stub_factory())
        wanted = without_timings(attack.job.output / "outputs.jsonl"), attack.job.errors()
        attack.clear(also_store=True)
        assert attack.child(None, is_after=False) == ExitCode.ROWS_FAILED
        num_requests = int(attack.requests.read_text(encoding="utf-8"))
        counts["requests"] = num_requests
        for kill in range(2 * num_requests):
            if rng.random() >= share:
                continue
            attack.clear(also_store=True)
            codes = [attack.child(kill // 2, is_after=kill % 2 == 1)]
            what = f"kill {'after' if kill % 2 else 'before'} request {kill // 2}"
            if rng.random() < 0.6:
                what += ", directory lost"
                attack.clear(also_store=False)
            if rng.random() < 0.5:
                second = rng.randrange(num_requests)
                what += f", killed at {second}"
                codes.append(attack.child(second, is_after=rng.random() < 0.5))
            counts["killed"] += codes.count(KILLED)
            codes.append(attack.child(None, is_after=False))
            try:
                assert {*codes[:-1]} <= {KILLED, ExitCode.ROWS_FAILED} and codes[-1] == ExitCode.ROWS_FAILED, codes
                attack.check(wanted)
            except (AssertionError, KeyError, OSError) as error:
                failures.append(f"{what}: {error!r}")
    print(json.dumps({"counts": counts, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
