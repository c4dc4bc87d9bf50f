"""Lock of a run in an object store: ``run.lock``, taken by conditional writes and kept by a heartbeat.

A holder that was silent for two minutes by the clock of the store has lost its machine, and is taken over. Where the
store knows no conditional writes two takers may both succeed; the earlier one learns of it at its next heartbeat.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from batchgen.core.errors import LockedError
from batchgen.core.remote import RemoteError
from batchgen.core.units import printable, shortened
from batchgen.output.bucket import Bucket, Entry

SILENT_S = 120.0
_NAME, _CLOCK = "run.lock", "run.clock"


class RemoteLock:
    """The lock of the run in ``bucket`` for the process that holds the run directory ``folder``.

    A directory that held it last takes it at once: the local lock proves that the earlier process is gone.
    """

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket = bucket
        self._place = _place(folder)
        self._token = uuid4().hex
        self.has_moved = False  # whether another directory held it before

    def acquire(self) -> str:
        """Take the lock. Returns a note about the holder that it was taken from, or "". Raises LockedError."""
        entry, found = self._read()
        note = ""
        if found and not found.get("released") and found.get("place") != self._place:
            silent_s = self._silent_s()
            if silent_s < SILENT_S:
                raise LockedError(
                    f"{self._bucket.address} is in use by {_holder(found)}, heard from {silent_s:.0f} s ago; wait for "
                    f"it or stop it (a holder silent for {SILENT_S:.0f} s is taken over)"
                )
            note = f"{self._bucket.address} is taken over from {_holder(found)}, silent for {silent_s:.0f} s"
        self.has_moved = bool(found) and found.get("place") != self._place
        self._write(entry, is_released=False)
        return note

    def beat(self) -> None:
        """Show that the holder lives. Raises LockedError if another one has taken the lock over."""
        entry, found = self._read()
        if found and found.get("token") != self._token:
            raise self._lost(found)
        self._write(entry, is_released=False)

    def release(self) -> None:
        """Free the lock, unless another one has it."""
        entry, found = self._read()
        if found.get("token") == self._token:
            self._write(entry, is_released=True)

    def _read(self) -> tuple[Entry | None, dict[str, Any]]:
        entry = self._bucket.entry(_NAME)
        content = None if entry is None else self._bucket.read(_NAME)
        try:
            found = json.loads(content or b"{}")
        except (ValueError, RecursionError):
            found = None
        return entry, found if isinstance(found, dict) else {}

    def _write(self, entry: Entry | None, *, is_released: bool) -> None:
        """Replace what ``_read`` found. Raises LockedError if it has changed since."""
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        state = {"holder": holder, "place": self._place, "token": self._token, "released": is_released}
        content = json.dumps(state).encode() + b"\n"
        try:
            self._bucket.write(_NAME, content, over=entry or "nothing")
        except RemoteError as error:
            if error.kind == "changed":
                found = self._read()[1]
                if found.get("token") != self._token:  # else an attempt whose answer was lost
                    raise self._lost(found) from error
            elif "NotImplemented" in str(error.__cause__) or getattr(error.__cause__, "errno", None) == errno.ENOSYS:
                self._bucket.write(_NAME, content)
            else:
                raise

    def _silent_s(self) -> float:
        """How long ago the holder wrote, by the clock of the store."""
        self._bucket.write(_CLOCK, self._token.encode())
        silent = self._bucket.modified_at(_CLOCK) - self._bucket.modified_at(_NAME)
        with suppress(RemoteError):
            self._bucket.remove([_CLOCK])
        return silent.total_seconds()

    def _lost(self, found: dict[str, Any]) -> LockedError:
        return LockedError(f"{self._bucket.address} was taken over by {_holder(found)}")


def _holder(found: dict[str, Any]) -> str:
    return shortened(printable(str(found.get("holder") or "another process")), 100)


def _place(folder: Path) -> str:
    """What identifies a directory on one running machine."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    found = folder.stat()
    return sha256(f"{machine} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:32]
