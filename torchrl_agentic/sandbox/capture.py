"""Reading a pipe on the event loop, in bounded memory."""

from __future__ import annotations

import asyncio
import os

from torchrl_agentic.sandbox.inside.capture import CHUNK, Capture

__all__ = ["Capture", "Drain"]


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
