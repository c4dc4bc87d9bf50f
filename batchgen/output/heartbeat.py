"""Heartbeat of the process that works on a mirrored run: ``progress.json`` there, with a key that names the process.

A process that wrote nothing for two minutes, by the clock of the store, has lost its machine and is taken over; what
it may yet write does not count. Of two that begin at once the later writer stays; the other one learns of it within a
second, or at its next beat. This keeps two machines from computing the same rows, no more: ``mirror`` loses no row
where both write.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from batchgen.core.errors import LockedError
from batchgen.core.remote import RemoteError
from batchgen.core.units import printable, shortened
from batchgen.output.bucket import Bucket
from batchgen.output.rundir import PROGRESS_NAME

SILENT_S = 120.0
SETTLE_S = 1.0  # after which a second process that began at the same time has written too
_KEY, _CLOCK = "mirror", "run.clock"


class Heartbeat:
    """The heartbeat of this process, which holds the run directory ``folder``.

    A directory that held the run last takes it at once: the local lock proves that the earlier process is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS_NAME
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._me = {"holder": holder, "place": _place(folder), "token": uuid4().hex}
        self._tokens = {self._me["token"]}  # this process's, and that of the one before it
        self.before: dict[str, Any] = {}  # progress.json of earlier processes, as it was there

    def take(self, bucket: Bucket) -> str:
        """Begin. Returns a note about the process that the run was taken from, or "". Raises LockedError."""
        self.before, found = read_heartbeat(bucket)
        note = ""
        if found and not found.get("released") and found.get("place") != self._me["place"]:
            silent_s = self._silent_s(bucket)
            if silent_s < SILENT_S:
                raise LockedError(
                    f"{bucket.address} is in use by {_holder(found)}, heard from {silent_s:.0f} s ago; wait for it or "
                    f"stop it (a process silent for {SILENT_S:.0f} s is taken over)"
                )
            note = f"{bucket.address} is taken over from {_holder(found)}, silent for {silent_s:.0f} s"
        self._tokens.add(str(found.get("token")))
        self._write(bucket, is_released=False)
        time.sleep(SETTLE_S)
        found = read_heartbeat(bucket)[1]
        if found and found.get("token") not in self._tokens:
            raise LockedError(f"{bucket.address} is in use by {_holder(found)}, which has just begun; wait for it")
        return note

    def beat(self, bucket: Bucket, *, is_released: bool = False) -> bool:
        """Show that this process lives, or that it leaves. Returns whether the last heartbeat was still there.

        Raises LockedError if another process has taken the run over.
        """
        found = read_heartbeat(bucket)[1]
        if found and found.get("token") not in self._tokens:
            raise LockedError(f"{bucket.address} was taken over by {_holder(found)}")
        self._write(bucket, is_released=is_released)
        return bool(found)

    def end(self, bucket: Bucket) -> None:
        """Remove it: the run is finished."""
        bucket.remove([PROGRESS_NAME, _CLOCK])

    def _write(self, bucket: Bucket, *, is_released: bool) -> None:
        progress: Any = None
        with suppress(OSError, ValueError, RecursionError):
            progress = json.loads(self._path.read_bytes())
        if not isinstance(progress, dict):
            progress = self.before
        bucket.write(PROGRESS_NAME, json.dumps({**progress, _KEY: {**self._me, "released": is_released}}).encode())

    def _silent_s(self, bucket: Bucket) -> float:
        """How long ago the heartbeat that is there was written, by the clock of the store."""
        bucket.write(_CLOCK, b"")
        silent = bucket.modified_at(_CLOCK) - bucket.modified_at(PROGRESS_NAME)
        with suppress(RemoteError):
            bucket.remove([_CLOCK])
        return silent.total_seconds()


def read_heartbeat(bucket: Bucket) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``progress.json`` that is there, and what it says of the process that wrote it; {} for what is none."""
    try:
        found = json.loads(bucket.read(PROGRESS_NAME) or b"{}")
    except (ValueError, RecursionError):
        found = {}
    holder = found.pop(_KEY, None) if isinstance(found, dict) else None
    return (found, holder) if isinstance(holder, dict) else ({}, {})


def _holder(found: dict[str, Any]) -> str:
    return shortened(printable(str(found.get("holder") or "another process")), 100)


def _place(folder: Path) -> str:
    """What identifies a directory on one running machine."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    found = folder.stat()
    return sha256(f"{machine} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:32]
