"""Checks that a text from a job or a flag can be the path of a local file, and makes paths absolute.

It does not look for the file: an impossible path is refused early, where its key or flag is known.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from batchgen.core.errors import UsageError

_FILE = "file://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def check_path(text: str) -> None:
    """Raises ValueError that completes "<key> = <value>: ...".

    Refused are addresses of remote files, NUL characters, and names that are too long for a file system.
    """
    if text.lower().startswith(_FILE):
        raise ValueError(f"is an address: write the path without {_FILE}")
    if scheme := _SCHEME.match(text):
        raise ValueError(
            f"{scheme[0]} is no local path, and remote files are neither read nor written: copy them to or from this "
            "machine (from the Hub, a dataset is hf:NAME and a model ORGANIZATION/NAME)"
        )
    try:
        os.lstat(text)
    except ValueError:
        raise ValueError("holds a NUL or other character that no path can have") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("is too long for a path") from None


def absolute(path: Path) -> Path:
    """The path from the root. Raises UsageError for a relative one where the working directory is gone."""
    try:
        return path.absolute()
    except OSError as error:
        raise UsageError(f"{path} is relative, and the working directory cannot be found: {error.strerror}") from None
