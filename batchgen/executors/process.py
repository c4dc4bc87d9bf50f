"""The process of a local worker: takes its share of the machine, loads the model, and answers its driver.

It lives no longer than its driver: it ends at the end of their socket, whatever it does, and on Linux the system ends
it. Signals that reach all processes of a job are not for it; its driver says when to stop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from batchgen.core.machine import limit_memory, memory_errors
from batchgen.executors.messages import HEARTBEAT_S
from batchgen.executors.pipe import Pipe
from batchgen.executors.shares import Share
from batchgen.executors.worker import Start, Worker, lost_to

_PR_SET_PDEATHSIG = 1


def main(handle: int, driver: int) -> NoReturn:
    """Work for the process ``driver`` at the other end of the socket ``handle``, until told to stop."""
    _follow(driver)
    pipe = Pipe(socket.socket(fileno=handle))
    messages = pipe.receive()
    try:
        with memory_errors("running this command"):
            _work(pipe, messages)
    except BaseException as error:
        pipe.send(lost_to(error))
        os._exit(1)
    while True:
        signal.pause()  # the driver closes the socket when it has read all, which ends this process


def _follow(driver: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != driver:  # it ended before that
            os._exit(1)


def _work(pipe: Pipe, messages: Iterator[Any]) -> None:
    share: Share = next(messages, None) or os._exit(0)
    share.take()
    if share.memory_bytes is not None:
        limit_memory(share.memory_bytes)
    start: Start = next(messages)
    listener = _Listener(messages)
    listener.start()
    worker = Worker(start)
    listener.worker = worker
    pipe.send(worker.hello)
    while True:
        answers = worker.take(HEARTBEAT_S)
        pipe.send(answers)
        if answers.stopped:
            return


class _Listener(threading.Thread):
    """Passes what the driver says to the worker, and ends the process with the driver."""

    worker: Worker

    def __init__(self, messages: Iterator[Any]) -> None:
        super().__init__(name="batchgen-listener", daemon=True)
        self._messages = messages

    def run(self) -> None:
        for grant in self._messages:  # none comes before the driver has been greeted
            self.worker.put(grant)
        os._exit(0)
