"""Small findings about this machine, kept for later runs as JSON objects by key in files of the user's cache.

If a file is missing, damaged or cannot be written, the finding is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError
from batchgen.core.storage import write_atomic


def cache_folder() -> Path:
    """The folder of such files. Raises RuntimeError for a user without a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"


def keep(path: Path, key: str, finding: Mapping[str, Any]) -> None:
    """Keep a finding for later runs; findings under other keys stay."""
    with suppress(OSError, BatchgenError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**_all(path), key: finding}, indent=2).encode() + b"\n")


def kept(path: Path, key: str) -> Mapping[str, Any] | None:
    """The last finding under this key, or None."""
    finding = _all(path).get(key)
    return finding if isinstance(finding, dict) else None


def _all(path: Path) -> dict[str, Any]:
    try:
        findings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return findings if isinstance(findings, dict) else {}
