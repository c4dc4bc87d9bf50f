"""Messages between the driver and a process of this machine: pickles over a socket, each behind its length.

The driver's end never blocks: what the socket does not take waits in memory. Both ends trust each other.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 18


class Pipe:
    """One end of a socket. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.is_closed = False  # the other end is gone
        self._received = bytearray()
        self._to_send: deque[memoryview] = deque()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))

    @property
    def has_more_to_send(self) -> bool:
        """Whether ``flush`` has left something."""
        return bool(self._to_send)

    def send(self, message: object) -> None:
        """Send a message: all of it on a socket that blocks, or what goes at once; ``flush`` sends the rest."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._to_send.append(memoryview(_LENGTH.pack(len(content)) + content))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        try:
            while self._to_send:
                sent = self.end.send(self._to_send[0])
                if sent < len(self._to_send[0]):
                    self._to_send[0] = self._to_send[0][sent:]
                else:
                    self._to_send.popleft()
        except BlockingIOError:
            return
        except OSError:  # the other end is gone: what it had sent before is still to be received
            self._to_send.clear()

    def receive(self) -> Iterator[Any]:
        """The messages that are there, or on a socket that blocks all up to the end of the other side."""
        while not self.is_closed:
            yield from self._whole()
            try:
                size = self.end.recv_into(self._chunk)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            self.is_closed = not size
            self._received += self._chunk[:size]

    def _whole(self) -> Iterator[Any]:
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                message = pickle.loads(view[_LENGTH.size : end])  # our own process has written it
            del self._received[:end]
            yield message
