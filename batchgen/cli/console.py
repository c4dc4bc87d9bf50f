"""Output of commands: results on stdout, one-line messages on stderr, without terminal control characters.

A full or closed stdout changes the exit code; a full or closed stderr does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

import click

from batchgen.core.addresses import masked_in
from batchgen.core.units import printable


def show(text: str) -> None:
    """Write ``text`` to stdout, a newline after it. Raises OSError; see ``is_of_stdout``."""
    click.echo("\n".join(map(printable, text.split("\n"))))


def say(text: str) -> None:
    """Write a message to stderr; its further lines are indented, so that they do not look like separate messages."""
    first, *more = (printable(line) for line in masked_in(text).split("\n"))
    with suppress(OSError, ValueError):
        click.echo("\n".join([f"batchgen: {first}", *(f"  {line.strip()}" for line in more)]), err=True)


def say_next(
    command: str, argument: Path | str | None, flags: Mapping[str, Any] | None = None, *, needs_update: bool = False
) -> None:
    """Name the command that comes next for a job or a run directory, at the end of a command's output."""
    words = " ".join(["batchgen", command, *([quote(str(argument))] if argument else [])])
    update = f"{' and' if flags else ''} --update" if needs_update else ""
    say(f"next: {words}{' with the same flags' if flags else ''}{update}")


def point_out_backslashes(flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn of a prompt flag with a backslash and an n in place of a new line: a shell leaves ``\\n`` as it is."""
    for key in ("prompt", "system"):
        text = flags.get("input", {}).get(key, "")
        if "\\n" in text and "\n" not in text:
            say(f"warning: --{key} holds a backslash and an n, not a new line: in a shell write it as $'...\\n...'")


def is_of_stdout(error: OSError) -> bool:
    """Whether ``error`` was raised by writing to stdout: by us, or by click for ``--help`` and ``--version``."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is click.echo.__code__:
            return True
        traceback = traceback.tb_next
    return False


def settle() -> None:
    """Drop unwritten text of broken standard streams: flushing it at exit would fail again and change the exit code."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
