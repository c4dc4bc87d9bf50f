"""The options of the command line: one for every key of the job file, made from the keys' own declarations.

It turns texts into the raw values a job file would have held; judging them is left to ``spec_load``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from batchgen.config.job import BOOL, COLUMNS, SECTIONS, Kind, flag_name
from batchgen.core.paths import check_path
from batchgen.core.records import SamplingParams
from batchgen.core.units import shortened, shown

F = TypeVar("F", bound=Callable[..., Any])

SAMPLING_HELP = {
    "max_tokens": "Most tokens to generate",
    "min_tokens": "Fewest tokens before an end token counts",
    "temperature": "0 is greedy",
    "top_p": "Nucleus sampling",
    "top_k": "Keep the K likeliest tokens; 0 keeps all",
    "min_p": "Least probability, as a share of the likeliest",
    "repetition_penalty": "Above 1: tokens seen before become less likely",
    "presence_penalty": "Taken off the logits of generated tokens",
    "frequency_penalty": "The same, once for each time generated",
    "seed": "Seed of the job",
    "stop": "Text that ends the output and is no part of it; may be repeated",
    "stop_token_ids": "Further end tokens, as in 2,7",
    "ignore_eos": "Go on after an end token",
    "n": "Samples per row",
    "logprobs": "Add log-probabilities, and the K likeliest tokens",
    "prompt_logprobs": "The same for the prompt, and its perplexity",
    "max_repeats": "End a row that says one thing N times over; 0: never",
    "choices": "Text to score instead of generating; repeated, one for each",
    "preset": "card: the values that the model's card recommends",
}
_COLUMNS_HELP = "Columns that hold a row's own sampling values; * for all so named"
_METAVARS = {"stop": "TEXT", "stop_token_ids": "IDS", "logprobs": "K", "prompt_logprobs": "K", "choices": "TEXT"}
_REPEATED = {("input", "path"), ("sampling", "stop"), ("sampling", "choices")}
TITLES = {
    "model": "Model",
    "input": "Input",
    "sampling": "Sampling",
    "engine": "Engine",
    "output": "Output",
    "run": "This run",
}


class LocalPath(click.Path):
    """A file or folder on this machine, which need not exist."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Fails where ``check_path`` does."""
        try:
            check_path(os.fspath(value))
        except ValueError as error:
            self.fail(f"{shown(value, 60)}: {error}", param, ctx)
        return super().convert(value, param, ctx)


class GroupedOption(click.Option):
    """An option that says under which heading help lists it."""

    def __init__(self, *args: Any, heading: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a block per heading, in order of first appearance; those without one come last."""
        blocks: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                blocks.setdefault(getattr(parameter, "heading", ""), []).append(record)
        for heading, records in sorted(blocks.items(), key=lambda block: not block[0]):
            with formatter.section(heading or "Other"):
                formatter.write_dl(records)


def job_options(*sections: str, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Options for the keys of the named sections of the job file but some; see ``take_job_flags``."""

    def decorate(command: F) -> F:
        for section in reversed(sections):
            for option in reversed(_options_of(section, without)):
                command = option(command)
        return command

    return decorate


def take_job_flags(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the job's flags out of a command's arguments: section -> key -> value as TOML would hold it."""
    flags: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if "__" in name]:
        section, _, key = name.partition("__")
        value = values.pop(name)
        if value is None or value == ():
            continue
        flags.setdefault(section, {})[key] = (
            _sampling_value(key, value) if section == "sampling" else _value(section, key, value)
        )
    return flags


def _options_of(section: str, without: tuple[str, ...]) -> list[Callable[[F], F]]:
    heading = TITLES[section]
    options = []
    if section == "sampling":
        for item in fields(SamplingParams):
            flag, text = item.name.replace("_", "-"), SAMPLING_HELP[item.name]
            metavar = _METAVARS.get(item.name) or _metavar(item.default)
            options.append(_option(section, item.name, flag, metavar, text + _shown(item), heading))
        options.append(_option(section, "preset", "preset", "NAME", SAMPLING_HELP["preset"], heading))
        options.append(_option(section, "columns", "sampling-columns", COLUMNS.metavar, _COLUMNS_HELP, heading))
        return options
    for item in fields(SECTIONS[section]):
        if item.name in without:
            continue
        kind: Kind = item.metadata["kind"]
        metavar = None if kind is BOOL else kind.metavar
        text = item.metadata["help"] + _shown(item)
        options.append(_option(section, item.name, flag_name(item), metavar, text, heading))
    return options


def _option(section: str, key: str, flag: str, metavar: str | None, text: str, heading: str) -> Callable[[F], F]:
    declaration = f"--{flag}" if metavar else f"--{flag}/--no-{flag}"
    return click.option(
        declaration,
        f"{section}__{key}",
        cls=GroupedOption,
        heading=heading,
        metavar=metavar,
        default=None,
        multiple=(section, key) in _REPEATED,
        help=f"{text}.",
    )


def _shown(item: Field[Any]) -> str:
    """The default of a key, where it says more than "none"."""
    is_silent = item.default is MISSING or isinstance(item.default, bool) or item.default in (None, "", ())
    return "" if is_silent else f" [{item.default}]"


def _metavar(default: object) -> str | None:
    if isinstance(default, bool):
        return None
    return "NUMBER" if isinstance(default, float) else "N"


def _value(section: str, key: str, value: Any) -> object:
    kind: Kind = next(item for item in fields(SECTIONS[section]) if item.name == key).metadata["kind"]
    return kind.from_text(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def _sampling_value(key: str, value: Any) -> object:
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    if key == "columns":
        return COLUMNS.from_text(value)
    if key == "stop_token_ids":
        return [_number(part) for part in value.split(",")]
    return _number(value)


def _number(text: str) -> object:
    """The number a text holds; any other text stays, for a better message than a conversion would give."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def take(values: Mapping[str, Any], name: str, parse: Callable[[str], Any]) -> Any:
    """The parsed value of a run option, None if it was not given. Raises ``click.UsageError``."""
    text = values[name]
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise click.UsageError(f"--{name.replace('_', '-')} {shortened(text, 60)}: {error}") from None
