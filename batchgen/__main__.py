"""The process: ``batchgen`` and ``python -m batchgen``. It handles signals before anything slow is imported.

A signal during imports, or while the process exits, must not change the exit code that a script sees.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing typing or collections.abc takes a while
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn

_STOPPED = 75  # ExitCode.STOPPED, whose module is not imported yet
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; 75 if a signal comes before the command handles signals itself."""
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, _interrupt)
        _fill_standard_streams()
        from batchgen.cli.main import call

        code = call(argv)
        _ignore_signals()
    except KeyboardInterrupt:
        _ignore_signals()
        _say_interrupted()
        code = _STOPPED
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once during an import, which may replace or swallow an exception; otherwise raise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _say_interrupted()
            os._exit(_STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _say_interrupted() -> None:
    try:  # noqa: SIM105 - contextlib may be what is being imported
        os.write(2, b"batchgen: error: interrupted\n")
    except OSError:
        pass


def _fill_standard_streams() -> None:
    """Open closed standard streams on /dev/null, so that no file opened later takes their number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this stream's


def _ignore_signals() -> None:
    """Ignore signals once the exit code is decided."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
