"""`ProcessBound`, a value that is valid in one process only: a connection, a thread, a certificate store."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ProcessBound(Generic[T]):
    """A value that only the process that set it can read.

    A forked child and an unpickled copy read None, so that they create a value of their own.
    """

    def __init__(self) -> None:
        self._value: T | None = None
        self._pid = 0

    def get(self) -> T | None:
        """Return the value, or None if this process has not set one."""
        return self._value if self._pid == os.getpid() else None

    def set(self, value: T) -> T:
        """Set the value of this process, and return it."""
        self._value, self._pid = value, os.getpid()
        return value

    def clear(self) -> None:
        """Remove the value."""
        self._value, self._pid = None, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())
