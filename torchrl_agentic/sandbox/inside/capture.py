"""`Capture`: keeps the head and the tail of an output of any length, in bounded memory."""

from __future__ import annotations

CHUNK = 1 << 16


class Capture:
    """Keeps at most `limit` bytes, half from the head and half from the tail, and counts the others.

    Args:
        limit: Maximum number of bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    @property
    def omitted(self) -> int:
        """Number of bytes that were omitted."""
        return self.total - len(self._head) - min(len(self._tail), self._tail_limit)

    def add(self, data: bytes) -> None:
        """Append output.

        Args:
            data: Bytes of the output.
        """
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + CHUNK:
            del self._tail[: len(self._tail) - self._tail_limit]

    def kept(self) -> bytes:
        """Return the bytes that were kept, with a line that counts the omitted ones between head and tail."""
        tail = self._tail[len(self._tail) - min(len(self._tail), self._tail_limit) :]
        line = f"\n… [{self.omitted} bytes omitted] …\n" if self.omitted else ""
        return b"".join((self._head, line.encode("utf-8"), tail))

    def text(self) -> str:
        """Return the bytes that were kept as text; invalid UTF-8 is replaced."""
        return self.kept().decode("utf-8", "replace")

    def take(self) -> tuple[bytes, int]:
        """Return the bytes that were kept and the number of omitted bytes, and reset."""
        kept, omitted = self.kept(), self.omitted
        self._head.clear()
        self._tail.clear()
        self.total = 0
        return kept, omitted
