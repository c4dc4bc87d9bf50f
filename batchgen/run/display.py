"""Displays of progress on stderr: a bar on a terminal, lines elsewhere, JSON lines for programs, or nothing.

A display only shows the snapshots (see ``progress``) and notes that it gets.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, TextIO

from batchgen.core.units import counted, format_duration, printable

Snapshot = Mapping[str, Any]
_WAITING = "batchgen: {desc} [{elapsed}]"
_RUNNING = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}{postfix}]"
_NO_TOTAL = "{desc} [{elapsed}{postfix}]"


class Display:
    """Shows nothing; the base of the others. ``show`` is called from the progress thread."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the progress; called twice per second."""

    def note(self, text: str) -> None:
        """A line that should stay on the screen."""

    def close(self, snapshot: Snapshot) -> None:
        """Called once, at the end."""


class _Tolerant:
    """A stream that ignores errors of writing, so that a run outlives the reader of its stderr.

    The stream may belong to another program, be closed, or lack methods of a file.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(Exception):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(Exception):
            self._file.flush()

    def isatty(self) -> bool:
        with suppress(Exception):
            return self._file.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LineDisplay(Display):
    """A line every ``interval_s`` seconds with the time of day: the rows done, or what the run is waiting for."""

    def __init__(self, interval_s: float, file: TextIO) -> None:
        self._interval_s = interval_s
        self._file = file
        self._shown_at = time.monotonic()

    def show(self, snapshot: Snapshot) -> None:
        if self._is_due():
            self._shown_at = time.monotonic()
            self.note(f"{datetime.now():%H:%M:%S} {describe(snapshot)}")

    def _is_due(self) -> bool:
        return time.monotonic() - self._shown_at >= self._interval_s

    def note(self, text: str) -> None:
        print(f"batchgen: {printable(text)}", file=self._file, flush=True)


class JsonDisplay(LineDisplay):
    """One JSON object per line: ``progress`` every ``interval_s`` seconds and at each new phase, ``note``, ``end``."""

    _phase = ""

    def show(self, snapshot: Snapshot) -> None:
        if snapshot["phase"] != self._phase or self._is_due():
            self._shown_at = time.monotonic()
            self._phase = snapshot["phase"]
            self._print("progress", snapshot)

    def note(self, text: str) -> None:
        self._print("note", {"message": text})

    def close(self, snapshot: Snapshot) -> None:
        self._print("end", snapshot)

    def _print(self, event: str, data: Snapshot) -> None:
        print(json.dumps({"event": event, **data}), file=self._file, flush=True)


class BarDisplay(Display):
    """A tqdm bar of rows, with time left from their tokens."""

    def __init__(self, file: TextIO) -> None:
        from tqdm import tqdm  # slow to import, and other displays do not need it

        self._tqdm: Any = tqdm
        self._tqdm.monitor_interval = 0  # the progress thread redraws the bar
        self._file = file
        self._bar: Any = None
        self._is_running = False

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the bar; begin another one, with a new time and rate, when the engine begins or ends its work."""
        rows, is_running = snapshot["rows"], is_generating(snapshot)
        finished, total = rows["done"] + rows["failed"], rows["total"]
        layout = (_RUNNING if total else _NO_TOTAL) if is_running else _WAITING
        if self._bar is None or is_running != self._is_running:  # a new bar counts its time and rate from now
            self.close(snapshot)
            options = {"leave": False, "dynamic_ncols": True, "mininterval": 0}
            self._bar = self._tqdm(total=total, file=self._file, bar_format=layout, initial=finished, **options)
            self._is_running = is_running
        self._bar.bar_format = layout
        self._bar.total, self._bar.n = total, finished
        self._bar.set_description_str(describe_rows(rows) if is_running else snapshot["phase"], refresh=False)
        self._bar.set_postfix_str(", ".join(_figures(snapshot)) if is_running else "", refresh=False)
        self._bar.refresh()

    def note(self, text: str) -> None:
        self._tqdm.write(f"batchgen: {printable(text)}", file=self._file)

    def close(self, snapshot: Snapshot) -> None:
        if self._bar is not None:
            self._bar.close()


def make_display(mode: Literal["auto", "bar", "json", "quiet"], interval_s: float) -> Display:
    """The display of a mode; "auto" and "bar" depend on whether stderr is a terminal or a notebook."""
    if mode == "quiet" or sys.stderr is None:  # None: the caller closed it
        return Display()
    file: Any = _Tolerant(sys.stderr)
    if mode == "json":
        return JsonDisplay(interval_s, file)
    if file.isatty() or is_notebook():
        return BarDisplay(file)
    return LineDisplay(interval_s, file) if mode == "auto" else Display()


def is_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def is_generating(snapshot: Snapshot) -> bool:
    """Whether the engine has begun to compute tokens."""
    return bool(snapshot["phase"] == "generating" and snapshot["tokens"]["computed"] > 0)


def describe_rows(rows: Mapping[str, Any]) -> str:
    """``135/300 rows``: finished rows, failed ones included, of the total if it is known."""
    finished = rows["done"] + rows["failed"]
    return f"{finished:,} rows" if rows["total"] is None else f"{finished:,}/{rows['total']:,} rows"


def _figures(snapshot: Snapshot) -> list[str]:
    """The numbers of failed rows and of workers, the speed, and the time left; zeros are left out."""
    num_failed, num_workers = snapshot["rows"]["failed"], snapshot["num_workers"]
    parts = [f"{num_failed:,} failed"] if num_failed else []
    parts += [counted(num_workers, "worker")] if num_workers else []
    if snapshot["tokens_per_s"]:
        parts.append(f"{snapshot['tokens_per_s']:,.0f} tok/s computed")
    if snapshot["eta_s"] is not None:
        parts.append(f"about {format_duration(snapshot['eta_s'])} left")
    return parts


def describe(snapshot: Snapshot) -> str:
    """The snapshot as one line."""
    if not is_generating(snapshot):
        return f"{snapshot['phase']} ({format_duration(snapshot['phase_s'])})"
    return ", ".join([describe_rows(snapshot["rows"]), *_figures(snapshot)])
