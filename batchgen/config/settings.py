"""Raw settings from a job file or from flags, before they are merged: resolves places, paths, names and files.

A job file is TOML; ``${NAME}`` in it is a variable of the environment. The files of schemas, grammars and templates
become part of the job, so that a resume has the same content; rows cannot name files on this machine.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchgen.config.job import KEYS
from batchgen.core.addresses import check_address, masked, refusal_of_variable, scheme_of
from batchgen.core.errors import UsageError
from batchgen.core.keys import nearest, resembling
from batchgen.core.remote import READABLE
from batchgen.core.storage import absolute, check_path, read_text
from batchgen.core.structured import FORMS, OLD_NAMES, OPTIONS, canonical, object_of
from batchgen.core.synonyms import synonym_of, value_of
from batchgen.core.units import shown

_ENV = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_BYTES = 16 << 20  # of a job file
_HOMES = [(name, section) for section, keys in KEYS.items() for name in keys]
_NUM_HOMES = Counter(name for name, _ in _HOMES)
MAIN_SECTIONS = {"prompt": "input", "dtype": "model"}  # the section that a user means by a key that several have
# Keys that may be outside sections: keys of a single section, and these.
_SHORT = {name: (section, name) for name, section in _HOMES if _NUM_HOMES[name] == 1}
_SHORT |= {name: (name, "path") for name in ("model", "input", "output")}
_SHORT |= {name: (section, name) for name, section in MAIN_SECTIONS.items()}
_MAX_FILE_BYTES = 1 << 20  # of a file; without its white space a schema must be far smaller


@dataclass(frozen=True)
class RawSettings:
    """Unchecked values of one origin, a job file or flags: section -> key -> value.

    Paths in them are relative to ``base``, which is empty (the working directory) for flags; if it is None, paths stay
    unchanged. ``text`` is the content of the job file.
    """

    values: Mapping[str, Mapping[str, Any]]
    base: Path | None = Path()
    file: str = ""
    text: str = field(default="", repr=False)

    def location(self, section: str, key: str) -> str:
        """Place of a value: ``job.toml:12: model.dtype`` or ``--dtype``."""
        if not self.file:
            name = key.partition(".")[0]
            return f"--{KEYS[section][name].flag if name in KEYS[section] else key}"
        line = _line_of(self.text, f"{section}.{key}")
        return f"{self.file}{f':{line}' if line else ''}: {section}.{key}"

    def error(self, section: str, key: str, value: object, why: object) -> UsageError:
        """The error for one value; a long value is shortened, and an address is masked."""
        if isinstance(value, list | tuple):
            value = [masked(item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str):
            value = masked(value)
        return UsageError(f"{self.location(section, key)} = {shown(value, 60)}: {why}")

    def parsed(self, section: str, key: str) -> Any:
        """The checked value of a key, with absolute paths. Raises UsageError."""
        value, kind = self.values[section][key], KEYS[section][key].kind
        try:
            parsed = kind.parse(value)
            return parsed if self.base is None else _resolve(self.base, section, key, parsed)
        except ValueError as error:
            hint, meant = "", None
            if isinstance(value, str):
                hint, meant = resembling(value, kind.choices), synonym_of(value)
                if better := value_of(f"{section}.{key}", value):
                    hint, meant = f' (did you mean "{better}"?)', None
            if meant and meant.note and meant.topic == f"{section}.{key}":
                hint = f" ({meant.note})"
            raise self.error(section, key, value, f"{error}{hint}") from None

    def structured(self) -> dict[str, str]:
        """``structured_outputs``, if it is given, as a canonical text with the contents of files. Raises UsageError."""
        section, key = "sampling", "structured_outputs"
        value = self.values.get(section, {}).get(key)
        if value is None:
            return {}
        try:
            return {key: canonical(value if self.base is None else with_files(value, partial(_absolute, self.base)))}
        except FileError as error:
            raise self.error(section, f"{key}.{error.part}", error.value, error) from None
        except ValueError as error:
            raise self.error(section, key, value, error) from None


def read_settings(path: Path) -> RawSettings:
    """The settings of a job file, ``${NAME}`` replaced from the environment (``$${NAME}`` stays literal).

    Raises ``UsageError`` if the file cannot be read, is not TOML, or holds unknown sections or keys.
    """
    try:
        text = read_text(path, _MAX_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the job file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise UsageError(f"the job file {path} {error}: give a TOML file, and rows in an input file") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    except ValueError as error:  # tomllib leaves integers to int()
        raise UsageError(f"{path}: holds a number of too many digits") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply for a job file") from error
    sections = _with_sections(table, path)
    settings = RawSettings(sections, path.resolve().parent, str(path), text)
    check_names(settings)
    for section, values in sections.items():
        for key, value in values.items():
            try:
                values[key] = _expand(settings, section, key, value)
            except RecursionError as error:  # dotted keys nest without brackets
                raise UsageError(f"{settings.location(section, key)}: nested too deeply for a job file") from error
    return settings


def _with_sections(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The table with all values moved to sections. Raises UsageError for a value that is given twice."""
    own = {name for name, value in table.items() if name in KEYS or name == "prompt" if isinstance(value, Mapping)}
    sections = {name: value for name, value in table.items() if name not in _SHORT or name in own}
    for name, value in table.items():
        section, key = _SHORT.get(name, ("", ""))
        values = sections.get(section, {})
        if name in sections or not isinstance(values, Mapping):  # which is refused later
            continue
        if key in values:
            raise UsageError(f"{path}: {name} and {section}.{key} are one key: give one of them")
        sections[section] = {**values, key: value}
    return sections


def check_names(settings: RawSettings) -> None:
    """Raises UsageError on unknown sections and keys."""
    source = settings.file or "flags"
    for section, values in settings.values.items():
        if section not in KEYS:
            home = next((name for name, keys in KEYS.items() if section in keys), "")
            what = f"section [{section}]" if isinstance(values, Mapping) else f"key {section}"
            line = _line_of(settings.text, section)
            hint = f" (it belongs in [{home}])" if home else _hint_outside(section)
            raise UsageError(f"{source}{f':{line}' if line else ''}: unknown {what}{hint}")
        if not isinstance(values, Mapping):
            raise UsageError(f"{source}: {section} = {shown(values, 60)}: must be a section, [{section}]")
        for key in values:
            if key not in KEYS[section]:
                elsewhere = [name for name, keys in KEYS.items() if key in keys]
                hint = f" (it belongs in [{elsewhere[0]}])" if elsewhere else _hint(section, key)
                location = settings.location(section, key) if settings.file else f"flags: {section}.{key}"
                raise UsageError(f"{location}: unknown key{hint}")


def _hint_outside(name: str) -> str:
    hint = resembling(name, [*KEYS, *_SHORT])
    return hint if hint and not synonym_of(name) else nearest(name, [*KEYS])


def _hint(section: str, key: str) -> str:
    if section == "sampling" and key in ("response_format", *OLD_NAMES):
        return f" (in a job it is structured_outputs = {{ {OLD_NAMES.get(key, 'json')} = ... }})"
    return nearest(key, [*KEYS[section]])


def _expand(settings: RawSettings, section: str, key: str, value: object) -> object:
    if isinstance(value, list):
        return [_expand(settings, section, key, item) for item in value]
    if isinstance(value, dict):
        return {name: _expand(settings, section, key, item) for name, item in value.items()}
    if not isinstance(value, str):
        return value

    def substitute(match: re.Match[str]) -> str:
        escape, name = match.groups()
        if escape:
            return match[0][1:]
        if match[0] in masked(value) and (why := refusal_of_variable(name)):
            raise UsageError(f"{settings.location(section, key)}: {why}")
        if name not in os.environ:
            why = f"the environment has no {name} (write $${{{name}}} for the text itself)"
            raise settings.error(section, key, value, why)
        return os.environ[name]

    return _ENV.sub(substitute, value)


def _line_of(text: str, dotted: str) -> int | None:
    """The 1-based line where a key ``a.b.c``, or its table, begins; None if it is written in an unusual way."""
    lines: list[tuple[str, int]] = []
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, is_assigned, _ = line.partition("=")
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _plain(match[1])
            lines.append((f"{table}.", number))
        elif is_assigned:
            parts = (table, _plain(name)) if table else _SHORT.get(_plain(name), (_plain(name),))
            lines.append((".".join((*parts, "")), number))
    while dotted:
        for name, number in lines:
            if name.startswith(f"{dotted}."):
                return number
        dotted = dotted.rpartition(".")[0]
    return None


def _plain(name: str) -> str:
    """A dotted name without the blanks and quotes that TOML allows in it."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _resolve(base: Path, section: str, key: str, value: Any) -> Any:
    """Make paths absolute; ``-``, ``hf:``, addresses and Hub ids stay. Raises ValueError for other values."""
    if (section, key) == ("input", "path"):
        return tuple(_input(base, item) for item in value)
    if (section, key) == ("input", "chat_template"):
        return value if value in ("auto", "none") else _template(Path(_absolute(base, value)))
    if section == "output" and key in ("path", "reuse"):
        return _absolute(base, value) if key == "path" else tuple(_absolute(base, item) for item in value)
    if section == "model" and key in ("path", "adapter", "tokenizer") and value and not value.startswith("dummy:"):
        check_path(value)
        looks_like_path = value.startswith((".", "/", "~"))
        return _absolute(base, value) if looks_like_path or (base / value).exists() else value
    return value


def _template(path: Path) -> str:
    """The chat template in a file. Raises ValueError, which names the file, if its text is not a template."""
    text = read_part(path)
    if text.strip() in ("", "auto", "none"):
        raise ValueError(f"{path} holds {text.strip()!r}, no template" if text.strip() else f"{path} is blank")
    return text


def _input(base: Path, item: str) -> str:
    if scheme_of(item) not in (None, "file"):
        check_address(item, READABLE)
        return item
    if not item.startswith("hf:"):
        return item if item == "-" else _absolute(base, item)
    name, mark, options = item.removeprefix("hf:").partition("?")
    check_path(name)
    is_folder = name.startswith((".", "/", "~")) or (bool(name) and (base / name).is_dir())
    return f"hf:{_absolute(base, name)}{mark}{options}" if is_folder else item


def _absolute(base: Path, path: str) -> str:
    check_path(path)
    try:
        normal = os.path.normpath(absolute(base / Path(path).expanduser()))
    except RuntimeError:
        raise ValueError("has a ~ that does not name a folder") from None
    check_path(normal)
    return normal


class FileError(ValueError):
    """The file that ``part`` names as ``value`` cannot be used; ``str()`` completes "<part> = <value>: ..."."""

    def __init__(self, part: str, value: str, message: str) -> None:
        super().__init__(message)
        self.part = part
        self.value = value


def with_files(outputs: object, resolve: Callable[[str], str]) -> dict[str, Any]:
    """A job's ``structured_outputs`` with the contents of files in place of paths, which ``resolve`` makes absolute.

    A text (or ``json``) is a JSON object if it begins with ``{``; a ``grammar`` is not a path if it holds a colon or a
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
        return read_text(path, _MAX_FILE_BYTES)
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
