"""Options of the command line: one for every key of the job file, made from the key's declaration, and shared ones.

Flags of job keys become the raw values that a job file would hold; ``config.load`` checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from batchgen.config.job import KEYS
from batchgen.core.keys import BOOL, Key
from batchgen.core.records import Shard
from batchgen.core.remote import redacted
from batchgen.core.storage import check_path
from batchgen.core.units import parse_clock, parse_count, parse_duration, parse_share, shortened

F = TypeVar("F", bound=Callable[..., Any])


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A value that ``parse`` reads from a flag's text; ``name`` stands for it in help."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            name = param.opts[-1] if param else self.name
            raise click.UsageError(f"{name} {shortened(redacted(value), 60)}: {error}", ctx) from None


def _local_path(text: str) -> Path:
    """A file or folder on this machine, which need not exist."""
    check_path(text)
    return Path(text)


CLOCK = Parsed("HH:MM", lambda text: parse_clock(text, datetime.now().astimezone()))
COUNT = Parsed("N", parse_count)
DURATION = Parsed("DURATION", parse_duration)
PATH = Parsed("FILE", _local_path)
SHARD = Parsed("I/N", Shard.parse)
SHARE = Parsed("SHARE", parse_share)


class RunOption(click.Option):
    """An option of one invocation, not of the job."""


run_option = partial(click.option, cls=RunOption)


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings: the job's sections, this run, others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        blocks: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                section, is_key, _ = (parameter.name or "").partition("__")
                other = "This run" if isinstance(parameter, RunOption) else "Other"
                blocks.setdefault(section.capitalize() if is_key else other, []).append(record)
        for heading, records in sorted(blocks.items(), key=lambda block: block[0] == "Other"):
            with formatter.section(heading):
                formatter.write_dl(records)


def json_option(text: str = "One JSON object instead of text.") -> Callable[[F], F]:
    """``--json``, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


_HEARTBEAT_HELP = "Time between progress lines if stderr is no terminal [30s]."
_PROGRESS = (
    run_option("--heartbeat", "heartbeat_s", type=DURATION, default="30s", help=_HEARTBEAT_HELP),
    run_option("--json-progress", is_flag=True, help="Progress as JSON lines on stderr."),
    run_option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
)


def progress_options(command: F) -> F:
    """How progress is shown; see ``RunOptions``."""
    for option in _PROGRESS:
        command = option(command)
    return command


def job_options(*sections: str, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Options for the keys of some sections of the job file; see ``take_job_flags``."""

    def decorate(command: F) -> F:
        for section in reversed(sections):
            for item in reversed(KEYS[section].values()):
                if item.name not in without:
                    command = _job_option(section, item)(command)
        return command

    return decorate


def _job_option(section: str, item: Key) -> Callable[[F], F]:
    default = item.written(item.default)
    is_silent = isinstance(default, bool) or default in (None, "", ())
    return click.option(
        f"--{item.flag}/--no-{item.flag}" if item.kind is BOOL else f"--{item.flag}",
        f"{section}__{item.name}",
        metavar=item.kind.metavar or None,
        default=None,
        multiple=item.kind.repeats,
        help=f"{item.help}{'' if is_silent else f' [{default}]'}.",
    )


def take_job_flags(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Remove the job's flags from a command's arguments: section -> key -> value as TOML would hold it."""
    flags: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if "__" in name]:
        value = values.pop(name)
        if value is None or value == ():
            continue
        section, _, key = name.partition("__")
        from_text = KEYS[section][key].kind.from_text
        flags.setdefault(section, {})[key] = (
            from_text(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
        )
    return flags
