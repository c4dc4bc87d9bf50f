"""Output of commands: results on stdout, messages of single lines on stderr, with nothing that steers a terminal.

A stderr that is full, closed or has lost its reader changes no exit code. A stdout in that state does, since its text
is the command's result.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

import click

from batchgen.core.units import printable


def show(text: str) -> None:
    """Write ``text``, of one line or more, to stdout. Raises OSError where that cannot be; see ``is_of_stdout``."""
    click.echo("\n".join(map(printable, text.split("\n"))))


def say(text: str) -> None:
    """Write a message to stderr; further lines of it are indented, so that none passes for a message of its own."""
    first, *more = (printable(line) for line in text.split("\n"))
    with suppress(OSError, ValueError):
        click.echo("\n".join([f"batchgen: {first}", *(f"  {line.strip()}" for line in more)]), err=True)


def is_of_stdout(error: OSError) -> bool:
    """Whether ``error`` was raised by writing to stdout: by us, or by click for ``--help`` and ``--version``."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is click.echo.__code__:
            return True
        traceback = traceback.tb_next
    return False


def settle() -> None:
    """Drop what stdout and stderr could not take, over which the interpreter would fail once more as it leaves."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        if stream is not None and not _flushed(stream):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
