"""How progress is shown: a bar on a terminal, lines by time elsewhere, JSON lines for a program, or nothing.

Everything goes to stderr. A display gets snapshots (see ``progress``) and notes; it computes nothing itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, TextIO

from tqdm import tqdm

from batchgen.core.units import format_duration, printable

Snapshot = Mapping[str, Any]
_WAITING = "batchgen: {desc} [{elapsed}]"
_RUNNING = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tok [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_NO_TOTAL = "{desc} {n_fmt} tok [{elapsed}, {rate_fmt}{postfix}]"


class Display(Protocol):
    """Shows a run to somebody."""

    def show(self, snapshot: Snapshot) -> None:
        """Called a few times a second."""

    def note(self, text: str) -> None:
        """A line that is worth keeping."""

    def close(self, snapshot: Snapshot) -> None:
        """Called once, at the end."""


class QuietDisplay:
    """Shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self, snapshot: Snapshot) -> None:
        """Nothing."""


class _Tolerant:
    """A stream whose reader may go away: what cannot be shown is dropped, the run goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LineDisplay:
    """A line every ``interval_s`` seconds: what is done, or what the run is waiting for."""

    def __init__(self, interval_s: float, file: TextIO) -> None:
        self._interval_s = interval_s
        self._file = file
        self._shown_at = time.monotonic()

    def show(self, snapshot: Snapshot) -> None:
        """Print if it is time to."""
        if time.monotonic() - self._shown_at >= self._interval_s:
            self._shown_at = time.monotonic()
            self.note(describe(snapshot))

    def note(self, text: str) -> None:
        """Print at once."""
        print(f"batchgen: {printable(text)}", file=self._file, flush=True)

    def close(self, snapshot: Snapshot) -> None:
        """Nothing: the command has the last word."""


class JsonDisplay:
    """One JSON object a line: ``progress`` every ``interval_s`` seconds and at each new phase, ``note``, ``end``."""

    def __init__(self, interval_s: float, file: TextIO) -> None:
        self._interval_s = interval_s
        self._file = file
        self._shown_at = -interval_s
        self._phase = ""

    def show(self, snapshot: Snapshot) -> None:
        """Print if it is time to, or a new phase began."""
        if snapshot["phase"] != self._phase or time.monotonic() - self._shown_at >= self._interval_s:
            self._shown_at = time.monotonic()
            self._phase = snapshot["phase"]
            self._print("progress", snapshot)

    def note(self, text: str) -> None:
        """Print at once."""
        self._print("note", {"message": text})

    def close(self, snapshot: Snapshot) -> None:
        """Print the last state."""
        self._print("end", snapshot)

    def _print(self, event: str, data: Snapshot) -> None:
        print(json.dumps({"event": event, **data}), file=self._file, flush=True)


class BarDisplay:
    """A tqdm bar by tokens; how many there will be is estimated from the rows finished so far."""

    def __init__(self, file: TextIO) -> None:
        tqdm.monitor_interval = 0  # this display is fed by a thread already
        self._file = file
        self._bar: Any = None
        self._is_running = False

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        is_running = snapshot["tokens"]["computed"] > 0 and snapshot["phase"] == "generating"
        if self._bar is None or is_running != self._is_running:
            self._reopen(snapshot, is_running)
        if is_running:
            self._show_running(snapshot)
        else:
            self._bar.set_description_str(snapshot["phase"], refresh=True)

    def note(self, text: str) -> None:
        """Print above the bar."""
        tqdm.write(f"batchgen: {printable(text)}", file=self._file)

    def close(self, snapshot: Snapshot) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()

    def _reopen(self, snapshot: Snapshot, is_running: bool) -> None:
        if self._bar is not None:
            self._bar.close()
        options: dict[str, Any] = {"file": self._file, "leave": False, "dynamic_ncols": True, "mininterval": 0}
        if is_running:
            options |= {"unit": "tok", "unit_scale": True, "initial": snapshot["tokens"]["computed"]}
        else:
            options |= {"bar_format": _WAITING}
        self._bar = tqdm(**options)
        self._is_running = is_running

    def _show_running(self, snapshot: Snapshot) -> None:
        rows, bar = snapshot["rows"], self._bar
        total = snapshot["tokens"]["estimated"]
        bar.bar_format = _RUNNING if total else _NO_TOTAL
        bar.total = total
        bar.n = snapshot["tokens"]["computed"]
        bar.set_description_str(describe_rows(rows), refresh=False)
        bar.set_postfix_str(f"{rows['failed']:,} failed" if rows["failed"] else "", refresh=False)
        bar.refresh()


def make_display(kind: Literal["auto", "json", "quiet"], interval_s: float) -> Display:
    """The display for where stderr leads."""
    if kind == "quiet" or sys.stderr is None:  # None: the caller closed it
        return QuietDisplay()
    file: Any = _Tolerant(sys.stderr)
    if kind == "json":
        return JsonDisplay(interval_s, file)
    return BarDisplay(file) if sys.stderr.isatty() else LineDisplay(interval_s, file)


def describe_rows(rows: Mapping[str, Any]) -> str:
    """``135/300 rows``: finished rows, failed ones included, of those there are."""
    finished = rows["done"] + rows["failed"]
    return f"{finished:,} rows" if rows["total"] is None else f"{finished:,}/{rows['total']:,} rows"


def describe(snapshot: Snapshot) -> str:
    """One line for a person on where the run is."""
    if not snapshot["tokens"]["computed"] or snapshot["phase"] != "generating":
        return f"{snapshot['phase']} ({format_duration(snapshot['phase_s'])})"
    rows = snapshot["rows"]
    parts = [describe_rows(rows)]
    if rows["failed"]:
        parts.append(f"{rows['failed']:,} failed")
    if snapshot["tokens_per_s"]:
        parts.append(f"{snapshot['tokens_per_s']:,.0f} tok/s")
    if snapshot["eta_s"] is not None:
        parts.append(f"about {format_duration(snapshot['eta_s'])} left")
    return ", ".join(parts)
