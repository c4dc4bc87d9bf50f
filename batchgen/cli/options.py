"""Options of the command line: one for every key of the job file, made from its declaration, and shared ones.

Flags of job keys become the raw values that a job file would hold; ``config.load`` checks them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from batchgen.config import cluster
from batchgen.config.job import KEYS
from batchgen.core.addresses import masked, prefix_of
from batchgen.core.keys import BOOL, Key, resembling
from batchgen.core.storage import check_path
from batchgen.core.synonyms import Synonym, is_done_anyway, synonym_of
from batchgen.core.units import Shard, parse_clock, parse_count, parse_duration, parse_share, shortened

F = TypeVar("F", bound=Callable[..., Any])


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A value that ``parse`` reads from a flag's text; ``name`` is its placeholder in help."""

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
            raise click.UsageError(f"{name} {shortened(masked(value), 60)}: {error}", ctx) from None


def local_path(text: str) -> Path:
    """A file or folder on this machine, which need not exist."""
    check_path(text)
    return Path(text)


def _job(text: str) -> str:
    if not prefix_of(text):
        check_path(text)
    return text


def _points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = -1.0
    if not 0 <= points <= 100:
        raise ValueError("must be percentage points such as 1 or 0.5")
    return points


AMOUNT = Parsed("AMOUNT", lambda text: cluster.AMOUNT.parse(cluster.AMOUNT.from_text(text)))
CLOCK = Parsed("TIME", lambda text: parse_clock(text, datetime.now().astimezone()))
COUNT = Parsed("N", parse_count)
DURATION = Parsed("DURATION", parse_duration)
JOB = Parsed("JOB", _job)  # see ``run.argument``
PATH = Parsed("FILE", local_path)
POINTS = Parsed("POINTS", _points)
SHARD = Parsed("I/N", Shard.parse)
SHARE = Parsed("SHARE", parse_share)


class RunOption(click.Option):
    """An option of one invocation, not of the job."""


run_option = partial(click.option, cls=RunOption)


_EXPERT_KEYS = {  # shown by --help-all alone
    "model": "revision",
    "input": "prompt_token_ids delimiter encoding chat_template_kwargs continue_final_message regenerate "
    "special_tokens",
    "sampling": "min_tokens min_p presence_penalty frequency_penalty repetition_penalty stop_token_ids ignore_eos "
    "logprobs prompt_logprobs max_repeats logit_bias allowed_token_ids bad_words",
    "classify": "by",
    "embed": "normalize dimensions truncate dtype",
    "engine": "max_num_batched_tokens kv_cache_dtype block_size",
    "output": "token_ids logprobs_dtype",
    "cluster": "cpus_per_worker gpus_per_worker resources step_timeout load_timeout",
}
_SHORT = {"model.path": "-m", "input.path": "-i", "input.prompt": "-p", "output.path": "-o"}
_ALL = "batchgen.all"  # key in click's context: whether help shows options for experts


def _show_all(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class GroupedCommand(click.Command):
    """A command whose help groups its options, and shows those for experts with ``--help-all`` only."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show all options.",
        )
        self.params.append(help_all)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, except other tools' options for what batchgen does anyway."""
        return super().parse_args(ctx, [*_needed(args, _flags(self))])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the heading of their section, and the number of hidden ones."""
        blocks: dict[str, list[tuple[str, str]]] = {}
        num_hidden = 0
        for option in [copy(item) for item in self.get_params(ctx) if isinstance(item, click.Option) and item.help]:
            if option.hidden and option.expose_value:
                num_hidden += 1
                option.hidden = _ALL not in ctx.meta
            record = option.get_help_record(ctx)
            if record is not None:
                section, is_key, name = (option.name or "").partition("__")
                if option.secondary_opts:  # --x / --no-x: the flag that is not the default
                    record = record[0].split(" / ")[KEYS[section][name].default], record[1]
                other = "This run" if isinstance(option, RunOption) else "Other"
                blocks.setdefault(section.capitalize() if is_key else other, []).append(record)
        for heading, records in sorted(blocks.items(), key=lambda block: block[0] == "Other"):
            with formatter.section(heading):
                formatter.write_dl(records)
        if num_hidden and _ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"{num_hidden} more options, for experts: {ctx.command_path} --help-all")


def usage_error(error: click.ClickException, argv: Sequence[str]) -> str:
    """The message for arguments that click refuses; for another tool's option it names the one to use here."""
    ctx = getattr(error, "ctx", None)
    read = f"; try '{ctx.command_path} --help'" if ctx else ""
    name = error.option_name if isinstance(error, click.NoSuchOption) else ""
    if not name.startswith("--"):  # click reads -ngl as -n -g -l, or where -n takes a value as -n gl
        words = (word for word in argv if re.fullmatch(r"-[a-z]{2,}", word) and word.startswith(name))
        name = next(filter(synonym_of, words), name)
    if not name:
        return f"{error.format_message().rstrip('.')}{read}"
    flags = _flags(ctx.command) if ctx else set()
    others = (word.partition("=")[0] for word in _needed(argv, flags) if word.startswith("--"))
    names = dict.fromkeys([name, *(other for other in others if other not in flags)])
    hints = [f"{other!r}{_hint(other, flags)}" for other in names]
    if len(hints) == 1:
        return f"No such option {hints[0]}{'' if hints[0].endswith(')') else read}"
    return f"No such options {', '.join(hints)}"


def _hint(name: str, flags: Collection[str]) -> str:
    synonym = Synonym("sampling.n", "the limit of tokens is --max-tokens") if name == "-n" else synonym_of(name)
    if synonym is None:
        return resembling(name.replace("_", "-"), [*flags])
    section, _, key = synonym.topic.partition(".")
    return synonym.hint(f"--{KEYS[section][key].flag}" if synonym.is_key else "")


def _flags(command: click.Command) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def _needed(args: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """The arguments, except other tools' options (and their values) for what batchgen does anyway."""
    words = deque(args)
    while words:
        flag, sign, text = (word := words.popleft()).partition("=")
        name = "" if flag in flags else flag.removeprefix("--").replace("-", "_")
        if not sign and words and is_done_anyway(name, _value(words[0])):
            words.popleft()
        elif not is_done_anyway(name, _value(text) if sign else True):
            yield word


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def json_option(text: str = "One JSON object instead of text.") -> Callable[[F], F]:
    """``--json``, passed as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


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
    shown = f"{default:g}" if isinstance(default, float) else "" if item.kind is BOOL else default
    shown = ",".join(shown) if isinstance(shown, tuple) else shown
    short = _SHORT.get(f"{section}.{item.name}")
    return click.option(
        *([short] if short else []),
        f"--{item.flag}/--no-{item.flag}" if item.kind is BOOL else f"--{item.flag}",
        f"{section}__{item.name}",
        metavar=item.kind.metavar or None,
        default=None,
        multiple=item.kind.repeats,
        help=f"{item.help}{'' if shown in (None, '') else f' [{shown}]'}.",
        hidden=item.name in _EXPERT_KEYS.get(section, "").split(),
    )


def take_job_flags(values: dict[str, Any], job: str | None = "") -> dict[str, dict[str, Any]]:
    """Remove the job's flags from a command's arguments: section -> key -> value as TOML would hold it.

    Raises click.UsageError if there are no flags and ``job``, a command's optional argument, is None.
    """
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
    if job is None and not flags:
        raise click.UsageError("give a job file, or data with --model and --prompt", click.get_current_context())
    return flags
