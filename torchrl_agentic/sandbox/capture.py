"""Keeping the head and the tail of an output of any length, in bounded memory."""

from __future__ import annotations

import asyncio
import os

CHUNK = 1 << 16


class Capture:
    """Takes bytes and keeps at most `limit` of them, half from the head, half from the tail.

    Counts the rest.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    @property
    def omitted(self) -> int:
        """How many bytes were left out."""
        return self.total - len(self._head) - min(len(self._tail), self._tail_limit)

    def add(self, data: bytes) -> None:
        """Take some bytes."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + CHUNK:
            del self._tail[: len(self._tail) - self._tail_limit]

    def text(self) -> str:
        """What was kept, as text, with a line that counts what was not; bad UTF-8 is replaced."""
        tail = self._tail[len(self._tail) - min(len(self._tail), self._tail_limit) :]
        if not self.omitted:
            return (self._head + tail).decode("utf-8", "replace")
        middle = f"\n… [{self.omitted} bytes omitted] …\n"
        return self._head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")

    def take(self) -> tuple[str, int]:
        """Give the text and how much was omitted, and begin anew."""
        text, omitted = self.text(), self.omitted
        self._head.clear()
        self._tail.clear()
        self.total = 0
        return text, omitted


class Drain:
    """Reads a pipe into a Capture whenever there is something, until its end."""

    def __init__(self, fd: int, capture: Capture) -> None:
        self.fd = fd
        self.capture = capture
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self.pull)

    def pull(self, rounds: int = 16) -> None:
        """Read what is there now, in no more than some rounds, so that a flood does not hold up others."""
        if self.ended.is_set():
            return  # the number of the pipe may be somebody else's by now
        for _ in range(rounds):
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.stop()
                return
            self.capture.add(data)

    def stop(self) -> None:
        """Read no more, and close the pipe."""
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()
