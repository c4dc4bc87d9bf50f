"""Version of the package, which ``pyproject.toml`` reads from here, and of its results."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__version__ = "0.2.0"
RESULTS = 6  # goes up with each change of any byte of any record; rows of another one are not kept


@cache
def build() -> str:
    """The version with the commit if that is known, such as ``0.2.0 (1a2b3c4d)``.

    pip records the commit of a package installed from git (PEP 610, direct_url.json); a checkout has it in ``.git``.
    """
    with suppress(PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        source = json.loads(distribution("batchgen").read_text("direct_url.json") or "{}")
        if "vcs_info" in source:
            return f"{__version__} ({source['vcs_info']['commit_id'][:8]})"
    with suppress(OSError):
        folder = Path(__file__).parents[2] / ".git"
        head = (folder / "HEAD").read_text().strip()
        commit = head if not head.startswith("ref: ") else (folder / head.removeprefix("ref: ")).read_text().strip()
        return f"{__version__} ({commit[:8]})"
    return __version__
