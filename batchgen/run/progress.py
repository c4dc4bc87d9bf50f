"""Progress of an invocation: feeds the display, writes ``progress.json`` for ``batchgen status``, checks the limits.

A background thread reads plain counters twice a second; the main thread never waits for it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import BatchgenError, UsageError
from batchgen.core.machine import peak_bytes
from batchgen.core.storage import read_regular, temporary_name
from batchgen.output.rundir import JOURNALS_NAME, PROGRESS_NAME
from batchgen.output.segments import written_at
from batchgen.report.usage import MALFORMED, follow, lengthened, since
from batchgen.run.display import Display
from batchgen.run.stop import Stopper, StopRequested

if TYPE_CHECKING:  # slow to import, and ``status`` needs neither
    from batchgen.run.loaded_engine import LoadedEngine
    from batchgen.run.results import ResultSink

GENERATING, KEEPING = "generating", "keeping earlier results"
NO_TOKENS = {"prompt": 0, "completion": 0, "computed": 0, "estimated": None}
_TICK_S = 0.5
_SAVE_EVERY_S = 2.0
_RATE_WINDOW_S = 30.0
_VERSION = 1  # of ``progress.json``
_BLOCK_BYTES = 512  # the unit of st_blocks, on any file system


class Clock:
    """Wall time per account since ``started_at``: exactly one account runs at any moment, ``other`` by default."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        # Account, since when, and seconds per account until then: one value, so that other threads read it whole.
        self._running: tuple[str, float, dict[str, float]] = ("other", self.started_at, {})

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def account(self) -> str:
        return self._running[0]

    @contextmanager
    def on(self, account: str) -> Iterator[None]:
        """Charge the time inside to ``account`` instead of the outer account."""
        outer = self.account
        self._running = (account, *self._now())
        try:
            yield
        finally:
            self._running = (outer, *self._now())

    def seconds(self) -> dict[str, float]:
        """Seconds per account until now."""
        return self._now()[1]

    def _now(self) -> tuple[float, dict[str, float]]:
        (account, since, seconds), now = self._running, time.monotonic()
        return now, {**seconds, account: seconds.get(account, 0.0) + now - since}


class Progress:
    """The counters of one invocation; a context manager that runs the thread.

    ``rows_total`` counts the rows of this shard, ``sink`` finished ones; each is None until known. ``num_reused`` were
    kept from earlier results. ``progress.json`` has the counts of earlier invocations, and is removed at the end unless
    there is something to resume.
    """

    def __init__(self, folder: Path, display: Display, stopper: Stopper) -> None:
        self.display, self.stopper, self.clock = display, stopper, Clock()
        self.rows_total: int | None = None
        self.sink: ResultSink | None = None
        self.state = "running"
        self._loaded: LoadedEngine | None = None
        self._keeps_file = self._is_idle = False
        self.num_reused, self._journal = 0, ""  # the folder of the job under way
        self._before: dict[str, Any] = {}  # progress.json of earlier invocations
        self._path = folder / PROGRESS_NAME
        self._engine_counts: dict[str, Any] = {}
        self._mean_workers = 1.0
        self._final_rows: dict[str, Any] | None = None  # the rows of a finished run's report
        self._failure, self._phase = "", "starting"
        self._phase_at = time.monotonic()
        self._began, self._saved_at = _now(), 0.0
        self._samples: deque[tuple[float, int]] = deque()
        self._end, self._found = threading.Event(), b""  # the bytes of progress.json, whichever version wrote it
        self._thread = threading.Thread(target=self._watch, name="batchgen-progress", daemon=True)

    def __enter__(self) -> Progress:
        with suppress(OSError):  # absent, or unreadable as for ``read_progress``
            self._found = read_regular(self._path)
        if (before := read_progress(self._path.parent)) is not None:
            if before["state"] == "running":  # killed: its time, like its tokens, ends with its last row
                lost_s = written_at(self._path.parent / JOURNALS_NAME / before["journal"]) - self._path.stat().st_mtime
                before["spent"] = lengthened(before["spent"], min(max(lost_s, 0.0), _SAVE_EVERY_S + _TICK_S))
            self._before, self._keeps_file = before, True
            self.rows_total, self.num_reused = before["rows"]["total"], before["rows"].get("reused", 0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        if kind is not None:
            self.state = "stopped" if issubclass(kind, StopRequested) else "failed"
            if isinstance(error, BatchgenError):  # its message says what to do
                self._failure = str(error)
        self.display.close(self.snapshot())
        if not self._keeps_file and self.state != "stopped":
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            if self._found and kind is not None and issubclass(kind, UsageError):
                self._save(self._found)  # unchanged, whichever version wrote it
        elif self._is_idle or (kind is not None and issubclass(kind, UsageError)):
            self._save(self._before or self._content(self.snapshot()))  # unchanged: this invocation was refused
        else:
            self._save(self._content(self.snapshot()))

    def reset(self) -> None:
        """Forget earlier invocations: this run starts from scratch."""
        self._before, self._keeps_file, self.rows_total, self.num_reused = {}, False, None, 0

    def count_for(self, journal: str) -> None:
        """Count for the job of that journal; counts of another job's invocations are dropped."""
        if self._before.get("journal", journal) != journal:
            self.reset()
        self._journal = journal

    def keep_file(self, keeps: bool, *, is_idle: bool = False) -> None:
        """Keep ``progress.json`` at the end, for a resume, or remove it; if idle, leave it unchanged."""
        self._keeps_file, self._is_idle = keeps, is_idle

    @contextmanager
    def generating(self, loaded: LoadedEngine) -> Iterator[None]:
        """Count the tokens of an engine, and show its workers, from now on; its time counts while inside."""
        self._loaded, self._saved_at = loaded, float("-inf")  # saved at once, as a kill may come soon
        with self.phase(GENERATING, "generate"):
            yield

    def finish(self, report: Mapping[str, Any] | None) -> None:
        """The run is finished, unless it was stopped; its row counts come from its report, if it has one."""
        if self.state == "stopped":
            return
        self.state = "finished"
        if report is not None:
            rows, num_reused = report["rows"], report.get("reused", {}).get("rows", 0)
            self._final_rows = row_counts(rows["total"], rows["done"], rows["failed"], num_reused)

    @contextmanager
    def phase(self, name: str, account: str) -> Iterator[None]:
        """Show ``name`` as the run's phase while inside, and charge the time to an account of the clock."""
        outer = self._phase
        self._phase, self._phase_at = name, time.monotonic()
        with self.clock.on(account):
            yield
        self._phase, self._phase_at = outer, time.monotonic()

    def usage(self) -> dict[str, Any]:
        """Time and counts of this and earlier invocations together; see ``report.build_report``."""
        if self._loaded is not None:
            with suppress(RuntimeError):  # the main thread may add a kind of work while they are copied
                counts = since(self._loaded.engine.stats.to_dict(), self.clock.started_at)
                self._mean_workers = counts.pop("mean_workers", 1.0)
                self._engine_counts = counts
        mine = {
            "sessions": 1,
            "wall_s": self.clock.wall_s,
            "device_s": self.clock.wall_s * self._mean_workers,
            "seconds": self.clock.seconds(),
            "engine": self._engine_counts,
            "max_rss_bytes": peak_bytes(),
            "empty_fields": dict(self.sink.empty_fields) if self.sink else {},
        }
        return follow(self._before.get("spent", {}), mine | self._token_counts())

    def _token_counts(self) -> dict[str, int]:
        return {
            "computed_tokens": self.computed_tokens,
            "prompt_tokens": self.sink.num_prompt_tokens if self.sink else 0,
            "completion_tokens": self.sink.num_generated_tokens if self.sink else 0,
        }

    @property
    def computed_tokens(self) -> int:
        """Tokens that the engine has computed in this invocation, of prompts and of unfinished rows too."""
        stats = self._loaded.engine.stats if self._loaded else None
        return stats.num_prefill_tokens + stats.num_output_tokens if stats else 0

    def snapshot(self) -> dict[str, Any]:
        """State, counts and estimates for the display and ``progress.json``; tokens add up all invocations."""
        usage_before, rows_before = self._before.get("spent", {}), self._before.get("rows", {})
        tokens = {name: usage_before.get(name, 0) + count for name, count in self._token_counts().items()}
        done, failed = rows_before.get("done", 0), rows_before.get("failed", 0)
        if self.sink is not None:
            done, failed = self.sink.num_done, self.sink.num_failed
        rows = self._final_rows or row_counts(self.rows_total, done, failed, self.num_reused)
        rate = self._rate()
        tokens_left = None if rows["left"] is None else self._tokens_left(rows["left"])
        eta_s = tokens_left / rate if tokens_left is not None and rate > 0 else None
        return {
            "version": _VERSION,
            "state": self.state,
            "phase": "done" if self.state == "finished" else self._phase,
            "phase_s": round(time.monotonic() - self._phase_at, 1),
            "reason": self._failure or self.stopper.reason,
            "advice": None if self._failure or self.state == "finished" else self.stopper.advice,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": self._began,
            "updated_at": _now(),
            "rows": rows,
            "tokens": {
                "prompt": tokens["prompt_tokens"],
                "completion": tokens["completion_tokens"],
                "computed": tokens["computed_tokens"],
                "estimated": None if tokens_left is None else tokens["computed_tokens"] + tokens_left,
            },
            "tokens_per_s": round(rate, 1),
            "eta_s": None if eta_s is None else round(eta_s, 1),
            "num_workers": len(self._workers()),
        }

    def _workers(self) -> Sequence[Mapping[str, Any]]:
        return self._loaded.workers() if self._loaded else ()

    def _content(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Content of ``progress.json``; a killed invocation's counts miss its last two seconds."""
        return {**snapshot, "workers": list(self._workers()), "spent": self.usage(), "journal": self._journal}

    def _save(self, content: dict[str, Any] | bytes) -> None:
        """Replace ``progress.json``; errors are ignored, since the journal reports errors of the same disk.

        On a full disk the old content is overwritten in place, if the new one fits: it says why the run has ended.
        """
        text = content if isinstance(content, bytes) else json.dumps({**content, "digest": _digest(content)}).encode()
        temporary = temporary_name(self._path)
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(text)
            temporary.replace(self._path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                if len(text) <= self._path.stat().st_blocks * _BLOCK_BYTES:
                    with self._path.open("r+b") as file:
                        file.write(text)
                        file.truncate()
        self._saved_at = time.monotonic()

    def _tokens_left(self, rows_left: int) -> int | None:
        """Tokens still to be computed if other rows are like the finished ones; None before the first has finished.

        Cached tokens and copies of identical rows do not count. Tokens of unfinished rows are subtracted, up to half of
        the total: short rows end first, so unfinished rows seem ahead.
        """
        num_done = self.sink.num_done - self.sink.num_done_before if self.sink else 0
        if self.sink is None or not num_done:
            return None
        finished = self.sink.num_computed_tokens
        expected = rows_left * finished / num_done
        unfinished = max(self.computed_tokens - finished, 0)
        return round(expected - min(unfinished, expected / 2))

    def _rate(self) -> float:
        """Computed tokens per second over the last half minute."""
        if len(self._samples) < 2:
            return 0.0
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        return (after - before) / (now - then)

    def _sample(self) -> None:
        now = time.monotonic()
        if self.computed_tokens and self.sink is not None:
            self._samples.append((now, self.computed_tokens))
        while self._samples and now - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()

    def _watch(self) -> None:
        while not self._end.wait(_TICK_S):
            self._sample()
            num_tokens = self.computed_tokens if self._phase == GENERATING else 0
            is_preparing = self.clock.account in ("load", "read") and self._phase not in (GENERATING, KEEPING)
            self.stopper.check_limits(num_tokens, self._phase if is_preparing else "")
            if self.sink is not None and self._phase == GENERATING:
                self.sink.tick()
            self.display.show(snapshot := self.snapshot())
            if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
                self._save(self._content(snapshot))


def read_progress(folder: Path) -> dict[str, Any] | None:
    """The content of ``progress.json``; None if it does not exist, or was not written by a run of this version."""
    with suppress(OSError, *MALFORMED):
        progress = dict(json.loads(read_regular(folder / PROGRESS_NAME)))
        if progress.pop("digest") == _digest(progress) and progress["version"] == _VERSION:
            return progress
    return None


def _digest(progress: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(progress).encode(), digest_size=8).hexdigest()


def row_counts(total: int | None, done: int, failed: int, reused: int = 0) -> dict[str, Any]:
    """Row counts as in ``progress.json`` and ``batchgen status --json``, with ``reused`` if rows were reused."""
    left = None if total is None else max(total - done - failed, 0)
    return {"total": total, "done": done, "failed": failed, "left": left} | ({"reused": reused} if reused else {})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
