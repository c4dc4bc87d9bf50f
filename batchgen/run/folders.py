"""Leave no trace of a run that was refused before it began: folders made for it go again, if they are empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchgen.core.errors import InputChanged, UsageError


@contextmanager
def tidy_on_refusal(folder: Path) -> Iterator[None]:
    """When a refusal passes through, remove ``folder`` and the parents that were not there before, where empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except (UsageError, InputChanged):
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise
