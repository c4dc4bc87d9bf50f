"""From a TOML job file and flags to a ``JobSpec``: raw settings are merged, flags win, and the result is checked.

Every refusal names the key, the value, the place (file and line, or flag) and the nearest valid name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.config.job import KEYS, SECTIONS, JobSpec
from batchgen.config.sampling import CLASSIFY_KEYS, ParamError, keys_beyond_turns, merge_params, values_of
from batchgen.config.settings import MAIN_SECTIONS, RawSettings, check_names, read_settings
from batchgen.core.errors import UsageError
from batchgen.core.keys import resembling
from batchgen.core.records import SamplingParams
from batchgen.core.synonyms import is_done_anyway, synonym_of

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PLACES = ("model", "input", "output")  # sections whose path a job needs


def load_job(
    path: Path | None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    needs: Sequence[str] = PLACES,
    begun: Mapping[str, Any] | None = None,
) -> JobSpec:
    """The validated job from a TOML file, or from ``begun``, the job of a run directory, and from flags, which win.

    ``flags`` has TOML's types by section and key. Paths are relative to the file, or in flags to the working directory.
    ``needs`` are the sections that must have a path. Raises ``UsageError`` with one line that names the key.
    """
    origins = [] if path is None else [read_settings(path)]
    if begun is not None:
        origins = [RawSettings({section: begun.get(section, {}) for section in KEYS}, None, "job.json")]
    if flags:
        origins.append(RawSettings(flags))
        check_names(origins[-1])
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
    """The inverse of ``JobSpec.to_dict``, from JSON. Raises UsageError naming ``source`` and the key."""
    settings = RawSettings({section: data.get(section, {}) for section in KEYS}, None, str(source))
    try:
        check_names(settings)
        spec = _merge([settings])
        if lacking := [section for section in PLACES if not getattr(spec, section).path]:
            raise UsageError(f"{source}: lacks {lacking[0]}.path")
    except UsageError as error:
        raise UsageError(f"cannot read {error}") from None
    return spec


def job_from_values(values: Mapping[str, Mapping[str, Any]], source: str) -> JobSpec:
    """The job of a Python caller's values by section and key; paths are relative to the working directory.

    It needs neither input nor output. Raises UsageError naming ``source`` and the key.
    """
    settings = RawSettings(values, Path(), source)
    check_names(settings)
    spec = _merge([settings])
    if not spec.model.path:
        raise UsageError(f"{source}: model.path is missing")
    _check_together(spec)
    return spec


def sections_of(arguments: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The arguments of a Python call as values by section and key; arguments that are None are left out.

    An argument is a section (a path, a mapping or ``SamplingParams``), a key that only one section has, or a key in
    ``MAIN_SECTIONS``. Raises UsageError naming ``source`` and any other argument.
    """
    sections: dict[str, Any] = {}
    single: list[tuple[str, str, Any]] = []
    unknown: list[str] = []
    for name, value in arguments.items():
        homes = [section for section, keys in KEYS.items() if name in keys]
        homes = [MAIN_SECTIONS[name]] if name in MAIN_SECTIONS else homes
        if value is None or (not homes and is_done_anyway(name, value)):
            continue
        if isinstance(value, SamplingParams) and name == "sampling":
            params = values_of(value)
            labels = {key: params.pop(key) for key in CLASSIFY_KEYS if key in params}
            sections |= {"sampling": params} | ({"classify": labels} if labels else {})
        elif name in KEYS:
            sections[name] = _section(value)
        elif len(homes) == 1:
            single.append((homes[0], name, os.fspath(value) if isinstance(value, os.PathLike) else value))
        elif homes:
            choices = " or ".join(f"{section}={{{name!r}: ...}}" for section in homes)
            raise UsageError(f"{source}: {name} is a key of several sections: give it as {choices}")
        else:
            unknown.append(f"{name!r}{_hint_at(name, source)}")
    if unknown:
        raise UsageError(f"{source}: unknown argument{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
    for section, name, value in single:
        values = sections.setdefault(section, {})
        sections[section] = {**values, name: value} if isinstance(values, Mapping) else values  # which is refused later
    return sections


def _hint_at(name: str, source: str) -> str:
    """A hint for an unknown argument of a Python call."""
    if synonym := synonym_of(name):
        section, _, key = synonym.topic.partition(".")
        if section == "cluster" and source == "LLM":
            return synonym.hint(f"{key}, which batchgen.generate takes")
        return synonym.hint(section if key == "path" else "")
    names = [*KEYS, *(key for keys in KEYS.values() for key in keys)]
    return resembling(name, names) or " (its keys: batchgen help job-file)"


def _section(value: Any) -> Any:
    """An argument of a Python call as a section of the job file, in which paths are strings."""
    if isinstance(value, str | os.PathLike):
        value = {"path": value}
    if not isinstance(value, Mapping):
        return value
    return {key: os.fspath(item) if isinstance(item, os.PathLike) else item for key, item in value.items()}


def _merge(origins: Sequence[RawSettings]) -> JobSpec:
    """The job of all origins; later ones win. Single values are checked, combinations of sections are not."""
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for origin in origins:
        for section in SECTIONS:
            raw = origin.values.get(section, {})
            values = {key: origin.parsed(section, key) for key in KEYS[section] if raw.get(key) is not None}
            if section == "embed" and section in origin.values and origin.base is not None:  # job.json names it
                values = {"pooling": "auto"} | values
            if section == "input" and any(key in values for key in _PROMPT_KEYS):
                for key in _PROMPT_KEYS:  # a flag for the prompt replaces all keys of the file for it
                    merged[section].pop(key, None)
            merged[section] |= values
    sampling = SamplingParams()
    explicit: tuple[str, ...] | None = None
    source = "input.chat_template"
    for origin in origins:
        if origin.base is not None and (file := origin.values.get("input", {}).get("chat_template")):
            source = f"{origin.location('input', 'chat_template')} = {file}"
        overrides = {**origin.values.get("sampling", {}), **origin.values.get("classify", {}), **origin.structured()}
        if overrides.pop("generation_config", None) is not None:
            explicit = () if origin.parsed("sampling", "generation_config") == "auto" else None
        if explicit is not None:
            explicit += tuple(name for name, value in overrides.items() if value is not None)
        try:
            sampling = merge_params(sampling, overrides)
        except ParamError as error:
            section = "classify" if error.key in CLASSIFY_KEYS else "sampling"
            raise UsageError(f"{origin.location(section, error.key)}: {error}") from error
    parts = {section: cls(**merged[section]) for section, cls in SECTIONS.items()}
    is_open = all(origin.values.get("sampling", {}).get("max_tokens") is None for origin in origins)
    is_open &= parts["input"].may_have_batch_lines
    return JobSpec(
        sampling=sampling,
        explicit_sampling_keys=explicit,
        max_tokens_unset=is_open,
        chat_template_source=source,
        **parts,
    )


def _check_together(spec: JobSpec) -> None:
    """Refuse values that contradict each other. Raises ``UsageError``."""
    named = [name for name in _PROMPT_KEYS if getattr(spec.input, name) is not None]
    if len(named) > 1:
        raise UsageError(f"input.{named[0]} and input.{named[1]} exclude each other: a row has one prompt")
    for name in ("system", "chat_template_kwargs"):
        if getattr(spec.input, name) is not None and not spec.input.is_templated:
            raise UsageError(f'input.{name} needs a chat template, and input.chat_template = "none"')
    has_chats = spec.input.is_templated and not (spec.input.prompt or spec.input.prompt_token_ids)
    if spec.input.continue_final_message and not has_chats:
        raise UsageError("input.continue_final_message needs chats: name their column in input.messages")
    if "-" in spec.input.path and len(spec.input.path) > 1:
        raise UsageError('input.path = "-" (stdin) cannot be combined with other inputs')
    if spec.input.delimiter and spec.input.format not in ("auto", "csv"):
        raise UsageError(f'input.delimiter applies to CSV only, but input.format is "{spec.input.format}"')
    if spec.input.encoding and spec.input.format in ("parquet", "hf"):
        raise UsageError(f'input.encoding applies to text only, but input.format is "{spec.input.format}"')
    spec.check_kind()
    _check_turns(spec)
    for item in spec.input.path:
        if (address := spec.output.publish) and item.rpartition("/")[0] == address:
            raise UsageError(f"the input {item} lies in {address}, where files are replaced: choose another folder")
    folder = Path(spec.output.path)
    if folder.is_file():
        raise UsageError(f"output.path = {spec.output.path!r} is a file: it must be a folder for the run")
    if folder.suffix in _FILE_SUFFIXES and not folder.exists():
        location = f"its answers are then in {folder.stem}/outputs{folder.suffix}"
        raise UsageError(
            f"output.path = {spec.output.path!r} is named as a file, and a run fills a folder: give "
            f"{folder.stem}, {location}"
        )


def _check_turns(spec: JobSpec) -> None:
    """Refuse what does not fit chats that are generated turn by turn. Raises UsageError."""
    source, output = spec.input, spec.output
    if source.regenerate is None:
        return
    if source.messages is None:
        raise UsageError("input.regenerate takes chats: name their column in input.messages")
    is_beyond = {
        **{f"sampling.{key}": True for key in keys_beyond_turns(spec.sampling)},
        "input.continue_final_message": source.continue_final_message,
        'input.chat_template = "none"': not source.is_templated,
        "output.token_ids": output.token_ids,
        "output.parse = tool_calls": "tool_calls" in output.parse,
        "output.parse = json": "json" in output.parse,
        'output.format = "openai-batch"': output.format == "openai-batch",
    }
    for name in [name for name, is_given in is_beyond.items() if is_given]:
        raise UsageError(f"{name} does not fit input.regenerate, whose turns are plain texts: leave one of them out")
