"""Standard input as an input like any other: copied into the run directory, compared on resume, read again from there.

A new copy is staged beside the old one and takes its place once the job has been accepted, so that a refusal costs a
run nothing. It knows bytes and no rows.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from batchgen.core.storage import publish
from batchgen.input.source import stage_stdin


class Spool:
    """The copy of standard input at ``path``; ``drop`` or ``keep`` is to be called after ``read``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged: Path | None = None

    def read(self, *, is_resumed: bool) -> Path | None:
        """The file with the rows: a copy of what standard input holds now, or else what the run was begun with.

        None where a resume is given nothing and the copy has gone, as it does when the run is finished. Raises
        UsageError if a run is to begin and standard input is a terminal or closed, StorageError.
        """
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        if is_piped or not is_resumed:
            self._staged = stage_stdin(self._path)
            if not is_resumed or self._staged.stat().st_size:
                return self._staged
            self.drop()
        return self._path if self._path.is_file() else None

    def keep(self) -> None:
        """Let the copy take the place of an earlier one; ``path`` is then where the rows are."""
        if self._staged is not None:
            publish(self._path)
            self._staged = None

    def drop(self) -> None:
        """Forget the copy, if it was not kept; one that cannot be removed is swept away by the next run."""
        if self._staged is not None:
            with suppress(OSError):
                self._staged.unlink(missing_ok=True)
            self._staged = None
