"""From a TOML job file and flags to a ``JobSpec``: two layers of raw values, one check, flags win.

Every refusal names the key, the value, the place (file and line, or flag) and the nearest valid name. Sampling values
are judged by ``data.params``, the one place that knows them; nothing here opens the input or the model.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from batchgen.config.job import COLUMNS, SECTIONS, JobSpec, Kind, flag_name
from batchgen.config.presets import card_values
from batchgen.config.sampling import PARAM_KEYS, ParamError, merge_params
from batchgen.core.errors import UsageError
from batchgen.core.paths import absolute, check_path
from batchgen.core.records import SamplingParams
from batchgen.core.units import shown

Values = dict[str, dict[str, Any]]

_ENV = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_BYTES = 16 << 20  # of a job file
_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_ALL_SECTIONS = (*SECTIONS, "sampling")
_COLUMNS_KEY = "columns"  # of [sampling]: the one key there that is no sampling value
_SAMPLING_KEYS = (*PARAM_KEYS, _COLUMNS_KEY)


@dataclass(frozen=True)
class Layer:
    """One origin of raw values: section -> key -> value, and what paths in it are relative to.

    Flags have an empty ``base``: the working directory, which is asked for where a path needs it.
    """

    values: Mapping[str, Mapping[str, Any]]
    base: Path
    file: str = ""
    text: str = field(default="", repr=False)

    def place(self, section: str, key: str) -> str:
        """Where a value was written: ``job.toml:12: model.dtype`` or ``--dtype``."""
        if not self.file:
            return f"--{_flag(section, key)}"
        line = _line_of(self.text, section, key)
        return f"{self.file}{f':{line}' if line else ''}: {section}.{key}"

    def problem(self, section: str, key: str, value: object, why: str) -> UsageError:
        """The error for one value; a long value is shortened."""
        return UsageError(f"{self.place(section, key)} = {shown(value, 60)}: {why}")


def load_job(path: Path | None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> JobSpec:
    """The validated job of a TOML file, of flags, or of both; flags win.

    ``flags`` holds values of the types TOML would hold, by section and key. Paths in the file are relative to its
    folder, paths in flags to the working directory. Raises ``UsageError`` with one line that names the key.
    """
    layers = [] if path is None else [read_layer(path)]
    if flags:
        layers.append(Layer(flags, Path()))
    merged: Values = {name: {} for name in SECTIONS}
    for layer in layers:
        for name in SECTIONS:
            values = _parse_section(layer, name)
            if name == "input" and any(prompt in values for prompt in _PROMPT_KEYS):
                for prompt in _PROMPT_KEYS:  # a flag that says what the prompt is replaces whatever the file says
                    merged[name].pop(prompt, None)
            merged[name] |= values
    sampling = SamplingParams()
    columns: tuple[str, ...] = ()
    for layer in layers:
        sampling = _merge_sampling(layer, sampling, merged["model"].get("path", ""))
        columns = _sampling_columns(layer, columns)
    for name, cls in SECTIONS.items():
        for item in fields(cls):
            if name != "engine" and item.name == "path" and "path" not in merged[name]:
                raise UsageError(
                    f"{name}.path is missing: set it in the job file's [{name}] or with --{flag_name(item)}"
                )
    parts = {name: cls(**merged[name]) for name, cls in SECTIONS.items()}
    spec = JobSpec(sampling=sampling, sampling_columns=columns, **parts)
    _check_together(spec)
    return spec


def override(spec: JobSpec, flags: Mapping[str, Mapping[str, Any]]) -> JobSpec:
    """The job with other engine sizes. Raises UsageError naming the flag."""
    return replace(spec, engine=replace(spec.engine, **_parse_section(Layer(flags, Path()), "engine")))


def read_layer(path: Path) -> Layer:
    """The raw values of a job file, ``${NAME}`` replaced from the environment (``$${NAME}`` stays literal).

    Raises ``UsageError`` where the file cannot be read, is not TOML, or holds unknown sections or keys.
    """
    try:
        text = _read_text(path)
        table = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read the job file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    except ValueError as error:  # what tomllib leaves to int()
        raise UsageError(f"{path}: holds a number of too many digits") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply for a job file") from error
    layer = Layer(table, path.resolve().parent, str(path), text)
    for section, values in table.items():
        if section not in _ALL_SECTIONS:
            nearest = _nearest(section, _ALL_SECTIONS)
            raise UsageError(f"{path}: unknown section [{section}]{nearest}")
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {section} = {shown(values, 60)}: must be a section, [{section}]")
        for key, value in values.items():
            _check_known(layer, section, key)
            values[key] = _expand(layer, section, key, value)
    return layer


def _read_text(path: Path) -> str:
    """The text of a job file, line ends as ``\\n``. Raises UsageError for a device or one that is too large."""
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise UsageError(f"the job file {path} is a device: give a TOML file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UsageError(f"the job file {path} is larger than {_MAX_BYTES >> 20} MiB: rows belong in an input file")
    return content.decode().replace("\r\n", "\n").replace("\r", "\n")


def _check_known(layer: Layer, section: str, key: str) -> None:
    known = _SAMPLING_KEYS if section == "sampling" else tuple(item.name for item in fields(SECTIONS[section]))
    if key in known:
        return
    elsewhere = [name for name, cls in SECTIONS.items() if key in {item.name for item in fields(cls)}]
    elsewhere += ["sampling"] if key in _SAMPLING_KEYS else []
    hint = f" (it belongs in [{elsewhere[0]}])" if elsewhere else _nearest(key, known)
    raise UsageError(f"{layer.place(section, key)}: unknown key{hint}")


def _expand(layer: Layer, section: str, key: str, value: object) -> object:
    if isinstance(value, list):
        return [_expand(layer, section, key, item) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        escape, name = match.groups()
        if escape:
            return match[0][1:]
        if name not in os.environ:
            why = f"the environment has no {name} (write $${{{name}}} for the text itself)"
            raise layer.problem(section, key, value, why)
        return os.environ[name]

    return _ENV.sub(replace, value)


def _parse_section(layer: Layer, name: str) -> dict[str, Any]:
    parsed = {}
    for item in fields(SECTIONS[name]):
        if item.name not in layer.values.get(name, {}):
            continue
        value = layer.values[name][item.name]
        kind: Kind = item.metadata["kind"]
        try:
            parsed[item.name] = _resolve(layer.base, name, item.name, kind.parse(value))
        except ValueError as error:
            hint = _close(value, kind.choices) if isinstance(value, str) else ""  # the error lists them
            raise layer.problem(name, item.name, value, f"{error}{hint}") from None
    return parsed


def _merge_sampling(layer: Layer, base: SamplingParams, model: str) -> SamplingParams:
    values = {key: value for key, value in layer.values.get("sampling", {}).items() if key != _COLUMNS_KEY}
    try:
        return merge_params(base, values, card_values(model))
    except ParamError as error:
        raise UsageError(f"{layer.place('sampling', error.key)}: {error}") from error


def _sampling_columns(layer: Layer, base: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that hold sampling values, ``base`` where the layer says nothing of them."""
    if _COLUMNS_KEY not in layer.values.get("sampling", {}):
        return base
    value = layer.values["sampling"][_COLUMNS_KEY]
    try:
        names: tuple[str, ...] = COLUMNS.parse(value)
    except ValueError as error:
        raise layer.problem("sampling", _COLUMNS_KEY, value, str(error)) from None
    for name in names:
        if name not in ("*", *PARAM_KEYS):
            why = f"{name!r} is no sampling key{_nearest(name, PARAM_KEYS)}"
            raise layer.problem("sampling", _COLUMNS_KEY, value, why)
    return names


def _resolve(base: Path, section: str, key: str, value: Any) -> Any:
    """Make paths absolute; what is no path (``-``, ``hf:``, ``dummy:``, a Hub id) stays as it is.

    Raises ValueError for what can be neither.
    """
    if section == "input" and key == "path":
        return tuple(_input(base, item) for item in value)
    if section == "output" and key == "path":
        return _absolute(base, value)
    if section == "model" and key in ("path", "tokenizer") and value and not value.startswith("dummy:"):
        check_path(value)
        looks_like_path = value.startswith((".", "/", "~"))
        return _absolute(base, value) if looks_like_path or (base / value).exists() else value
    return value


def _input(base: Path, item: str) -> str:
    if not item.startswith("hf:"):
        return item if item == "-" else _absolute(base, item)
    check_path(item.removeprefix("hf:").partition("?")[0])  # which may be a folder
    return item


def _absolute(base: Path, path: str) -> str:
    check_path(path)
    try:
        found = os.path.normpath(absolute(base / Path(path).expanduser()))
    except RuntimeError:
        raise ValueError("has a ~ that stands for no folder") from None
    check_path(found)
    return found


def _check_together(spec: JobSpec) -> None:
    """Refuse values that are each fine but impossible together. Raises ``UsageError``."""
    named = [name for name in _PROMPT_KEYS if getattr(spec.input, name) is not None]
    if len(named) > 1:
        raise UsageError(f"input.{named[0]} and input.{named[1]} exclude each other: a row has one prompt")
    if spec.input.system is not None and not spec.input.chat:
        raise UsageError("input.system needs input.chat = true: a raw completion has no system prompt")
    if "-" in spec.input.path and len(spec.input.path) > 1:
        raise UsageError('input.path = "-" (stdin) cannot be combined with other inputs')
    if Path(spec.output.path).is_file():
        raise UsageError(f"output.path = {spec.output.path!r} is a file: it must be a folder for the run")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    return _close(name, known) or f" (known: {', '.join(known)})"


def _close(name: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(name, known, n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""


def _flag(section: str, key: str) -> str:
    if (section, key) == ("sampling", _COLUMNS_KEY):
        return "sampling-columns"
    for item in fields(SECTIONS[section]) if section in SECTIONS else ():
        if item.name == key:
            return flag_name(item)
    return key.replace("_", "-")


def _line_of(text: str, section: str, key: str) -> int | None:
    """The 1-based line of ``key =`` under ``[section]``; None where the file writes it in another way."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            current = match[1].strip()
        elif current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return None
