"""Whether a text can be the path of a file here, asked where a job or a flag brings it: later it would be a crash."""

from __future__ import annotations

import errno
import os
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def check_path(text: str) -> None:
    """Raises ValueError that completes "<key> = <value>: ...".

    Refused are addresses of remote files, and what no file system takes: NUL characters, names that are too long.
    Whether anything is there is not asked.
    """
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
