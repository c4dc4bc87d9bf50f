"""Check of texts that are to be paths of local files, made where a job or a flag brings them, and their absolute form.

Later such a text would be a crash. Files are not looked for here.
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

    Refused are addresses of remote files, and what no file system takes: NUL characters, names that are too long.
    Whether anything is there is not asked.
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
