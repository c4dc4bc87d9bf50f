"""Text files that a job names, whose content becomes part of it: a JSON schema, a grammar, a chat template.

Rows cannot name files: a dataset must not decide what is read on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.core.storage import read_text
from batchgen.core.structured import FORMS, OPTIONS, object_of

_MAX_BYTES = 1 << 20  # of a file; without its white space a schema must be far smaller


class FileError(ValueError):
    """The file that ``part`` names as ``value`` cannot be used; ``str()`` completes "<part> = <value>: ..."."""

    def __init__(self, part: str, value: str, message: str) -> None:
        super().__init__(message)
        self.part = part
        self.value = value


def with_files(outputs: object, resolve: Callable[[str], str]) -> dict[str, Any]:
    """A job's ``structured_outputs`` with the contents of files in place of paths, which ``resolve`` makes absolute.

    A text (or ``json``) is a JSON object if it begins with ``{``; a ``grammar`` is one if it holds a colon or a
    newline. Raises FileError, or ValueError if ``outputs`` is not an object.
    """
    if isinstance(outputs, str) and outputs and not _is_json(outputs):
        outputs = {"json": outputs}
    parts = object_of(outputs)
    for part, is_content, read in (("json", _is_json, _read_schema), ("grammar", _is_grammar, read_part)):
        value = parts.get(part)
        if isinstance(value, str) and value and not is_content(value):
            try:
                parts[part] = read(Path(resolve(value)))
            except ValueError as error:
                raise FileError(part, value, str(error)) from None
    return parts


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _is_grammar(text: str) -> bool:
    return ":" in text or "\n" in text


def read_part(path: Path) -> str:
    """The text of a file. Raises ValueError, which names it."""
    try:
        return read_text(path, _MAX_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _read_schema(path: Path) -> Any:
    try:
        schema = json.loads(read_part(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if schema is None:
        raise ValueError(f"{path} holds null, which asks for nothing")
    if schema and isinstance(schema, dict) and schema.keys() <= {*FORMS, *OPTIONS}:  # a schema that restricts nothing
        raise ValueError(f"{path} is a whole structured_outputs, not a JSON schema: give it as structured_outputs")
    return schema
