"""Standard input, or rows of a Python caller, as a file in the run directory, so that a resume can read them again.

A new copy replaces the old one only when the job has been accepted: refused invocations leave a run unchanged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from batchgen.config.job import InputSpec
from batchgen.core.errors import StorageError, UsageError
from batchgen.core.storage import commit_staged, staged_file, temporary_name


class StdinCopy:
    """The copy of standard input, or of ``lines`` instead, at ``path``; call ``keep`` or ``drop`` after ``read``."""

    def __init__(self, path: Path, lines: Iterable[bytes] | None = None) -> None:
        self._path = path
        self._lines = lines
        self._staged: Path | None = None

    @property
    def path(self) -> Path:
        """The file that holds the rows now."""
        return self._staged or self._path

    def read(self, *, is_resumed: bool) -> Path | None:
        """The file that holds the rows: a new copy of standard input, or the copy from the run's first start.

        None if a resume gets no rows and the old copy is gone. Raises UsageError if a new run's standard input is a
        terminal or closed, StorageError.
        """
        if self._lines is not None:
            self._staged = _stage(self._lines, self._path)
            return self._staged
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
            commit_staged(self._path)
            self._staged = None

    def drop(self) -> None:
        """Remove the staged copy unless it was kept; if that fails, the next invocation sweeps it away."""
        if self._staged is not None:
            with suppress(OSError):
                self._staged.unlink(missing_ok=True)
            self._staged = None


@contextmanager
def stdin_as_file(spec: InputSpec, kept: Path | None = None) -> Iterator[InputSpec]:
    """``spec`` with a temporary copy of standard input in place of ``-``. Raises as ``stage_stdin`` does.

    If standard input is a terminal, the copy that an earlier start has ``kept`` is used.
    """
    if spec.path != ("-",):
        yield spec
        return
    if kept is not None and kept.is_file() and (sys.stdin is None or sys.stdin.isatty()):
        yield replace(spec, path=(str(kept),))
        return
    with temporary_folder() as folder:
        copy = folder / "stdin"
        with in_temporary_folder():
            stage_stdin(copy)
            commit_staged(copy)
        yield replace(spec, path=(str(copy),))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end. Raises StorageError if it cannot be created."""
    try:
        made = tempfile.TemporaryDirectory(prefix="batchgen-")
    except OSError as error:
        raise StorageError(f"no temporary folder: {error.strerror or error}; name one in TMPDIR") from error
    with made as folder:
        yield Path(folder)


@contextmanager
def in_temporary_folder() -> Iterator[None]:
    """Let a StorageError inside say that nothing is kept, and which disk needs space."""
    try:
        yield
    except StorageError as error:
        what, folder = str(error).partition("; ")[0], tempfile.gettempdir()
        advice = f"nothing is kept there: free some space in {folder}, or name another folder in TMPDIR"
        raise StorageError(f"{what}; {advice}") from error


def stage_stdin(target: Path, stdin: BinaryIO | None = None) -> Path:
    """Copy standard input to a file next to ``target`` and return it; ``commit_staged(target)`` puts it in place.

    Raises UsageError when standard input is a terminal, closed or cannot be read, StorageError when the copy cannot be
    written.
    """
    if stdin is None and sys.stdin is None:
        raise UsageError("input.path is - and standard input is closed; pipe rows into it")
    source = stdin or sys.stdin.buffer
    if source.isatty():
        raise UsageError("input.path is - and standard input is a terminal; pipe rows into it")
    pieces = iter(lambda: source.read(1 << 20), b"")
    try:
        return _stage(pieces, target)
    except OSError as error:
        raise UsageError(f"input.path is - and standard input cannot be read: {error.strerror or error}") from error


def _stage(pieces: Iterable[bytes], target: Path) -> Path:
    """Write the pieces to a file next to ``target``. OSErrors of reading are raised unchanged."""
    failures: list[OSError] = []

    def read() -> Iterator[bytes]:
        try:
            yield from pieces
        except OSError as error:  # raised below: in there it would be one of writing
            failures.append(error)

    with staged_file(target) as file:
        file.writelines(read())
    staged = temporary_name(target)
    for error in failures:
        staged.unlink(missing_ok=True)
        raise error
    return staged
