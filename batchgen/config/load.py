"""From a TOML job file and flags to a ``JobSpec``: raw settings are merged, flags win, and the result is checked.

Every refusal names the key, the value, the place (file and line, or flag) and the nearest valid name. Nothing here
opens the input or the model.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchgen.config.grammar_files import FileError, with_files
from batchgen.config.job import KEYS, SECTIONS, JobSpec
from batchgen.config.sampling import ParamError, card_values, merge_params
from batchgen.core.errors import UsageError
from batchgen.core.keys import nearest, resembling
from batchgen.core.records import SamplingParams
from batchgen.core.remote import READABLE, check_address, redacted, refusal_of_variable, scheme_of
from batchgen.core.storage import absolute, check_path, read_text
from batchgen.core.structured import ALIASES, canonical
from batchgen.core.units import shown

_ENV = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_BYTES = 16 << 20  # of a job file
_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
PLACES = ("model", "input", "output")  # sections whose path a job needs


@dataclass(frozen=True)
class RawSettings:
    """Unchecked values of one origin, a job file or flags: section -> key -> value.

    Paths in them are relative to ``base`` (flags have an empty one: the working directory), or taken unchanged where
    that is None. ``text`` is the job file's.
    """

    values: Mapping[str, Mapping[str, Any]]
    base: Path | None = Path()
    file: str = ""
    text: str = field(default="", repr=False)

    def place(self, section: str, key: str) -> str:
        """Where a value was written: ``job.toml:12: model.dtype`` or ``--dtype``."""
        if not self.file:
            name = key.partition(".")[0]
            return f"--{KEYS[section][name].flag if name in KEYS[section] else key}"
        line = _line_of(self.text, f"{section}.{key}")
        return f"{self.file}{f':{line}' if line else ''}: {section}.{key}"

    def error(self, section: str, key: str, value: object, why: object) -> UsageError:
        """The error for one value; a long value is shortened, and no secret in an address is shown."""
        if isinstance(value, list | tuple):
            value = [redacted(item) for item in value]
        return UsageError(f"{self.place(section, key)} = {shown(redacted(value), 60)}: {why}")

    def parsed(self, section: str, key: str) -> Any:
        """The value of a key, checked, paths made absolute. Raises UsageError."""
        value, kind = self.values[section][key], KEYS[section][key].kind
        try:
            parsed = kind.parse(value)
            return parsed if self.base is None else _resolve(self.base, section, key, parsed)
        except ValueError as error:
            hint = resembling(value, kind.choices) if isinstance(value, str) else ""
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


def load_job(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    needs: Sequence[str] = PLACES,
    begun: Mapping[str, Any] | None = None,
) -> JobSpec:
    """The validated job of a TOML file, of flags, or of both; flags win. ``begun`` is one of a run directory instead.

    ``flags`` holds values of the types TOML would hold, by section and key. Paths in the file are relative to its
    folder, paths in flags to the working directory. ``needs`` are the sections that must have a path: a benchmark has
    neither input nor output. Raises ``UsageError`` with one line that names the key.
    """
    origins = [] if path is None else [read_settings(path)]
    if begun is not None:
        origins = [RawSettings({section: begun.get(section, {}) for section in KEYS}, None, "job.json")]
    if flags:
        origins.append(RawSettings(flags))
        _check_names(origins[-1])
    spec = _merge(origins)
    for section in needs:
        if not getattr(spec, section).path:
            item = KEYS[section]["path"]
            if path is None:
                raise UsageError(f"--{item.flag} is missing ({item.help})")
            raise UsageError(f"{path}: {section}.path is missing: set it in [{section}] or give --{item.flag}")
    _check_together(spec)
    return spec


def job_from_dict(data: Mapping[str, Any], source: object = "job.json") -> JobSpec:
    """The spec that ``JobSpec.to_dict`` described, as read back from JSON.

    Raises UsageError naming ``source`` on unknown keys and on impossible values.
    """
    settings = RawSettings({section: data.get(section, {}) for section in KEYS}, None, str(source))
    try:
        _check_names(settings)
        spec = _merge([settings])
        if lacking := [section for section in PLACES if not getattr(spec, section).path]:
            raise UsageError(f"{source}: lacks {lacking[0]}.path")
    except UsageError as error:
        raise UsageError(f"cannot read {error}; was it edited?") from None
    return spec


def job_from_values(values: Mapping[str, Mapping[str, Any]], source: str) -> JobSpec:
    """The job of a Python caller's values by section and key; relative paths are to the working directory.

    It needs neither input nor output. Raises UsageError naming ``source`` and the key.
    """
    settings = RawSettings(values, Path(), source)
    _check_names(settings)
    spec = _merge([settings])
    if not spec.model.path:
        raise UsageError(f"{source}: model.path is missing")
    _check_together(spec)
    return spec


def read_settings(path: Path) -> RawSettings:
    """The settings of a job file, ``${NAME}`` replaced from the environment (``$${NAME}`` stays literal).

    Raises ``UsageError`` where the file cannot be read, is not TOML, or holds unknown sections or keys.
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
    settings = RawSettings(table, path.resolve().parent, str(path), text)
    _check_names(settings)
    for section, values in table.items():
        for key, value in values.items():
            try:
                values[key] = _expand(settings, section, key, value)
            except RecursionError as error:  # dotted keys nest without brackets
                raise UsageError(f"{settings.place(section, key)}: nested too deeply for a job file") from error
    return settings


def _check_names(settings: RawSettings) -> None:
    """Raises UsageError on unknown sections and keys."""
    where = settings.file or "flags"
    for section, values in settings.values.items():
        if section not in KEYS:
            raise UsageError(f"{where}: unknown section [{section}]{nearest(section, [*KEYS])}")
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: {section} = {shown(values, 60)}: must be a section, [{section}]")
        for key in values:
            if key not in KEYS[section]:
                elsewhere = [name for name, keys in KEYS.items() if key in keys]
                hint = f" (it belongs in [{elsewhere[0]}])" if elsewhere else _hint(section, key)
                place = settings.place(section, key) if settings.file else f"flags: {section}.{key}"
                raise UsageError(f"{place}: unknown key{hint}")


def _hint(section: str, key: str) -> str:
    """A hint at what to write in place of an unknown key."""
    if section == "sampling" and key in ("response_format", *ALIASES):
        return f" (in a job it is structured_outputs = {{ {ALIASES.get(key, 'json')} = ... }})"
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
        if why := refusal_of_variable(name):
            raise UsageError(f"{settings.place(section, key)}: {why}")
        if name not in os.environ:
            why = f"the environment has no {name} (write $${{{name}}} for the text itself)"
            raise settings.error(section, key, value, why)
        return os.environ[name]

    return _ENV.sub(substitute, value)


def _line_of(text: str, dotted: str) -> int | None:
    """The 1-based line where a key ``a.b.c`` begins, under whatever ``[table]``, or else the one that holds it.

    None where the file writes it in another way.
    """
    lines: list[tuple[str, int]] = []
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, is_assigned, _ = line.partition("=")
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _plain(match[1])
            lines.append((f"{table}.", number))
        elif is_assigned:
            lines.append((f"{table}.{_plain(name)}.".lstrip("."), number))
    while "." in dotted:
        for name, number in lines:
            if name.startswith(f"{dotted}."):
                return number
        dotted = dotted.rpartition(".")[0]
    return None


def _plain(name: str) -> str:
    """A dotted name without the blanks and quotes that TOML allows in it."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _parse_section(settings: RawSettings, section: str) -> dict[str, Any]:
    given = settings.values.get(section, {})
    return {key: settings.parsed(section, key) for key in KEYS[section] if given.get(key) is not None}


def _merge(origins: Sequence[RawSettings]) -> JobSpec:
    """The job of all origins; later ones win, and of presets only the last counts.

    Single values are checked, combinations of sections are not.
    """
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for origin in origins:
        for section in SECTIONS:
            values = _parse_section(origin, section)
            if section == "embed" and section in origin.values and origin.base is not None:  # job.json names it
                values = {"pooling": "auto"} | values
            if section == "input" and any(key in values for key in _PROMPT_KEYS):
                for key in _PROMPT_KEYS:  # a flag that says what the prompt is replaces all that the file says of it
                    merged[section].pop(key, None)
            merged[section] |= values
    card, sampling = card_values(merged["model"].get("path", "")), SamplingParams()
    columns: tuple[str, ...] = ()
    over_preset: tuple[str, ...] | None = None
    with_preset = [origin for origin in origins if origin.values.get("sampling", {}).get("preset") is not None]
    for origin in origins:
        given = {**origin.values.get("sampling", {}), **origin.structured()}
        if given.pop("columns", None) is not None:
            columns = origin.parsed("sampling", "columns")
        if given.get("preset") is not None:
            over_preset = () if given["preset"] == "model" else None
        if over_preset is not None:
            given.pop("preset", None)
            over_preset += tuple(name for name, value in given.items() if value is not None)
        try:
            sampling = merge_params(sampling, given, {"card": card if [origin] == with_preset[-1:] else {}})
        except ParamError as error:
            raise UsageError(f"{origin.place('sampling', error.key)}: {error}") from error
    parts = {section: cls(**merged[section]) for section, cls in SECTIONS.items()}
    is_open = all(origin.values.get("sampling", {}).get("max_tokens") is None for origin in origins)
    is_open &= parts["input"].may_have_batch_lines
    return JobSpec(sampling=sampling, sampling_columns=columns, over_preset=over_preset, fills_context=is_open, **parts)


def _resolve(base: Path, section: str, key: str, value: Any) -> Any:
    """Make paths absolute; what is no path (``-``, ``hf:``, an address, a Hub id) stays unchanged.

    Raises ValueError for what can be neither.
    """
    if (section, key) == ("input", "path"):
        return tuple(_input(base, item) for item in value)
    if section == "output" and key in ("path", "reuse"):
        return _absolute(base, value) if key == "path" else tuple(_absolute(base, item) for item in value)
    if section == "model" and key in ("path", "adapter", "tokenizer") and value and not value.startswith("dummy:"):
        check_path(value)
        looks_like_path = value.startswith((".", "/", "~"))
        return _absolute(base, value) if looks_like_path or (base / value).exists() else value
    return value


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
        found = os.path.normpath(absolute(base / Path(path).expanduser()))
    except RuntimeError:
        raise ValueError("has a ~ that stands for no folder") from None
    check_path(found)
    return found


def _check_together(spec: JobSpec) -> None:
    """Refuse values that are each possible but not together. Raises ``UsageError``."""
    if spec.model.activations == "int8" and spec.model.weights != "int8":
        raise UsageError('model.activations = "int8" needs model.weights = "int8": integers multiply integers')
    named = [name for name in _PROMPT_KEYS if getattr(spec.input, name) is not None]
    if len(named) > 1:
        raise UsageError(f"input.{named[0]} and input.{named[1]} exclude each other: a row has one prompt")
    for name in ("system", "chat_template_kwargs"):
        if getattr(spec.input, name) is not None and not spec.input.chat:
            raise UsageError(f"input.{name} needs input.chat = true: a raw completion has no chat template")
    if "-" in spec.input.path and len(spec.input.path) > 1:
        raise UsageError('input.path = "-" (stdin) cannot be combined with other inputs')
    if spec.input.delimiter and spec.input.format not in ("auto", "csv"):
        raise UsageError(f'input.delimiter is of tables, and input.format = "{spec.input.format}"')
    spec.check_embed()
    spec.check_destination()
    if Path(spec.output.path).is_file():
        raise UsageError(f"output.path = {spec.output.path!r} is a file: it must be a folder for the run")
