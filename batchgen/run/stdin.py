"""Copy of standard input in the run directory, so that a resume can read the same rows again.

A new copy is staged beside the old one and replaces it only when the job has been accepted: a refused invocation
costs an existing run nothing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from batchgen.core.storage import publish
from batchgen.input.source import stage_stdin


class StdinCopy:
    """The copy of standard input at ``path``; call ``keep`` or ``drop`` after ``read``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged: Path | None = None

    def read(self, *, is_resumed: bool) -> Path | None:
        """The file that holds the rows: a new copy of standard input, or the one that the run was begun with.

        None where a resume is given no rows and the old copy is gone, as after a finished run. Raises UsageError if a
        run is to begin and standard input is a terminal or closed, StorageError.
        """
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        if is_piped or not is_resumed:
            self._staged = stage_stdin(self._path)
            if not is_resumed or self._staged.stat().st_size:
                return self._staged
            self.drop()
        return self._path if self._path.is_file() else None

    def keep(self) -> None:
        """Replace an earlier copy by the staged one, at ``path``."""
        if self._staged is not None:
            publish(self._path)
            self._staged = None

    def drop(self) -> None:
        """Remove the staged copy unless it was kept; if that fails, the next invocation sweeps it away."""
        if self._staged is not None:
            with suppress(OSError):
                self._staged.unlink(missing_ok=True)
            self._staged = None
