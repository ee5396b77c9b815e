"""`Pipe`: a pipe that code inside prints into, read continuously and kept in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchrl_agentic.sandbox.inside.capture import CHUNK, Capture
from torchrl_agentic.sandbox.inside.reactor import Reactor

ROUNDS_AT_THE_END = 64
"""Number of reads after the end: as much as the largest possible pipe contains."""


class Pipe:
    """A pipe and its captured output.

    Attributes:
        end: Descriptor of the end for the writer.

    Args:
        reactor: Main loop of this process.
        limit: Maximum bytes to keep.
        on_data: Called after each read.
    """

    def __init__(self, reactor: Reactor, limit: int, on_data: Callable[[], None] | None = None) -> None:
        self._reactor, self._on_data = reactor, on_data
        self.fd, self.end = os.pipe()
        os.set_blocking(self.fd, False)
        self.capture = Capture(limit)
        self._open = True
        reactor.watch(self.fd, self._pull)

    def _pull(self, rounds: int = 16) -> None:
        for _ in range(rounds):
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.close()
                break
            self.capture.add(data)
        if self._on_data is not None:
            self._on_data()

    def pull(self) -> None:
        """Read what is there."""
        if self._open:
            call, self._on_data = self._on_data, None
            self._pull(ROUNDS_AT_THE_END)
            self._on_data = call

    def fileno(self) -> int:
        """Return the descriptor of the end that is read."""
        return self.fd

    def close_end(self) -> None:
        """Close the writer's end here; the writer has inherited it."""
        os.close(self.end)

    def close(self) -> None:
        """Stop reading and close the pipe."""
        if self._open:
            self._open = False
            self._reactor.forget(self.fd)
            os.close(self.fd)

    def take(self) -> tuple[bytes, int]:
        """Return the output that was kept and the number of omitted bytes, and reset."""
        self.pull()
        return self.capture.take()
