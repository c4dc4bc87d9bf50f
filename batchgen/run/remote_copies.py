"""Where a run is copied to: ``output.publish`` once it is finished, ``output.mirror`` while it goes.

One object per invocation, opened with the run directory locked and closed at its exit; without these keys it does
nothing.
"""

from __future__ import annotations

from types import TracebackType

from batchgen.config.job import OutputSpec
from batchgen.core.errors import BatchgenError, StorageError
from batchgen.core.remote import refusals_as_usage
from batchgen.output.manifest import Manifest
from batchgen.output.mirror import Mirror
from batchgen.output.publish import Publication, open_destination
from batchgen.output.rundir import RunDir
from batchgen.run.progress import Progress

_EXIT_S = 0.5  # between the last copy and the end of the process


class RemoteCopies:
    """The destinations of one run, which is asked to stop when another machine has taken it over."""

    def __init__(self, output: OutputSpec, run_dir: RunDir, progress: Progress, *, overwrite: bool) -> None:
        self._output = output
        self._run_dir = run_dir
        self._progress = progress
        self._overwrite = overwrite
        self._mirror: Mirror | None = None

    def __enter__(self) -> RemoteCopies:
        return self

    def open(self) -> None:
        """Take the lock of the mirror. Raises LockedError, UsageError, RemoteError."""
        if self._output.mirror:
            with self._progress.phase("opening output.mirror", "read"), refusals_as_usage():
                mirror = Mirror(
                    self._output.mirror, self._run_dir, self._progress.display.note, self._progress.stopper.request
                )
                mirror.open(None if self._overwrite else self._run_dir.read_manifest(), overwrite=self._overwrite)
                self._mirror = mirror

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._mirror is not None:
            self._mirror.close(self._progress.stopper.left_s - _EXIT_S)

    def begun(self, local: Manifest | None) -> Manifest | None:
        """The manifest of the run to go on with: of the run directory, or of the mirror if that is to be restored."""
        if self._overwrite or self._mirror is None:
            return local
        is_restored = local is None or (self._mirror.is_finished and not self._run_dir.has_outputs())
        return self._mirror.manifest if is_restored else local

    def refuse_earlier(self, manifest: Manifest) -> None:
        """Raises UsageError where another machine has gone on with the finished run of the run directory."""
        with refusals_as_usage():
            for address in filter(None, (self._output.publish, self._output.mirror)):
                Publication(open_destination(address), self._run_dir, manifest).refuse_earlier()

    @property
    def is_finished(self) -> bool:
        """Whether the mirror holds a finished run."""
        return self._mirror is not None and self._mirror.is_finished

    def restore(self) -> bytes:
        """Fetch from the mirror what the run directory lacks. Returns its ``progress.json`` if that was empty."""
        if self._mirror is None:
            return b""
        with self._progress.phase("restoring from output.mirror", "read"):
            progress = b"" if self._run_dir.manifest.exists() else self._mirror.progress()
            self._mirror.restore()
        return progress

    def claim(self, manifest: Manifest) -> None:
        """See that the finished files can be published, before anything is computed. Raises UsageError, RemoteError."""
        if self._output.publish:
            with self._progress.phase("checking output.publish", "read"), refusals_as_usage():
                self._publication(manifest).claim(overwrite=self._overwrite)

    def clear(self) -> None:
        """The run starts anew: drop what the mirror holds."""
        if self._mirror is not None:
            self._mirror.clear()

    def begin(self, manifest: Manifest) -> None:
        """Copy the run from now on."""
        if self._mirror is not None:
            self._mirror.begin(manifest)

    def finish(self, manifest: Manifest) -> tuple[str, ...]:
        """Copy the files of the finished run. Returns lines for the user; what is there already is not copied.

        Raises BatchgenError: the run stays finished, and the next invocation tries again.
        """
        try:
            with self._progress.phase("publishing", "write"):
                lines = [self._publication(manifest).publish()] if self._output.publish else []
                if self._mirror is not None:
                    self._mirror.finish(manifest)
        except BatchgenError as error:
            advice = "the run is finished and its files are kept; run again to publish them"
            raise StorageError(f"{error}; {advice}") from error
        return tuple(lines)

    def _publication(self, manifest: Manifest) -> Publication:
        return Publication(open_destination(self._output.publish), self._run_dir, manifest)
