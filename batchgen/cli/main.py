"""The command line: runs a command, prints errors, returns the exit code that scripts rely on.

Modules that are slow to import are imported by the command that needs them, so that help and status start at once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

import click

from batchgen.cli.bench import bench
from batchgen.cli.cat import cat
from batchgen.cli.check import check, env
from batchgen.cli.console import is_of_stdout, say, settle, show
from batchgen.cli.help import help_command
from batchgen.cli.options import RunOption, usage_error
from batchgen.cli.plan import plan, try_command
from batchgen.cli.report import report
from batchgen.cli.run import merge, run, status
from batchgen.core.addresses import masked_in
from batchgen.core.errors import BatchgenError, ExitCode, UsageError
from batchgen.core.machine import memory_errors
from batchgen.core.synonyms import command_of
from batchgen.core.version import __version__

if TYPE_CHECKING:
    from batchgen.run.loader import EngineFactory


class _Commands(click.Group):
    """The commands in the order in which users need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raises UsageError; for another tool's command it names the one to use here."""
        if args and args[0] not in self.commands and (meant := command_of(args[0])):
            raise UsageError(f"No such command {args[0]!r} (here it is {meant})")
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes, and where to read more."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), code.meaning) for code in ExitCode])
        formatter.write_paragraph()
        formatter.write_text("Documents: batchgen help")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, message="batchgen %(version)s")
def cli() -> None:
    """Run a language model over a whole dataset, offline, and never lose or repeat a row.

    \b
    Example:
      batchgen run jobs/quickstart.toml
    """


for command in (run, try_command, plan, status, report, cat, merge, check, bench, env, help_command):
    cli.add_command(command)
for option in run.params:  # the flags of run, so that "run" can be replaced by "plan" in a command line
    if isinstance(option, RunOption) and option.name not in {own.name for own in plan.params}:
        ignored = copy(option)
        ignored.hidden, ignored.expose_value = True, False
        plan.params.append(ignored)


def call(argv: Sequence[str] | None = None, engine_factory: EngineFactory | None = None) -> int:
    """Run a command and return its exit code; every error becomes a line or two on stderr.

    ``engine_factory`` replaces the model's own engine (see ``run_job``).
    """
    try:
        with memory_errors("running this command"):
            return int(cli.main(argv, prog_name="batchgen", standalone_mode=False, obj=engine_factory) or ExitCode.OK)
    except click.exceptions.NoArgsIsHelpError as error:
        show(error.format_message())
        return ExitCode.USAGE
    except click.ClickException as error:
        return _fail(usage_error(error, sys.argv[1:] if argv is None else argv), ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", ExitCode.STOPPED)
    except BatchgenError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return _unforeseen(error)
    finally:
        settle()


def _unforeseen(error: BaseException) -> int:
    """The last resort: one line for the user, and the traceback in a file."""
    if isinstance(error, OSError) and is_of_stdout(error):
        if isinstance(error, BrokenPipeError):  # the reader of the output has gone and needs no message
            return ExitCode.CRASH
        return _fail(f"cannot write to standard output: {error.strerror or error}", ExitCode.CRASH)
    return _fail(f"{type(error).__name__}: {error} ({_keep_traceback()})", ExitCode.CRASH)


def _fail(message: str, code: ExitCode) -> int:
    say(f"error: {message}")
    return code


def _keep_traceback() -> str:
    if os.environ.get("BATCHGEN_DEBUG"):
        with suppress(OSError, ValueError):
            traceback.print_exc()
        return "traceback above"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="batchgen-", suffix=".txt", delete=False) as file:
            file.write(masked_in(traceback.format_exc()))
    except (OSError, ValueError):
        return "this is a bug; BATCHGEN_DEBUG=1 shows the traceback"
    return f"this is a bug; traceback in {file.name}, BATCHGEN_DEBUG=1 shows it"
