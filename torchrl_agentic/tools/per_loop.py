"""`PerLoop`, one value per event loop: an HTTP client serves only the loop that opened its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop that asks for it; a pickled copy is empty."""

    def __init__(self) -> None:
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self, create: Callable[[], T]) -> T:
        """Return the value of the running loop.

        Args:
            create: Creates the value; called if the loop has none yet.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            self._values = {one: value for one, value in self._values.items() if not one.is_closed()}
            self._values[loop] = create()
        return self._values[loop]

    def pop(self) -> T | None:
        """Remove and return the value of the running loop, or return None if it has none."""
        return self._values.pop(asyncio.get_running_loop(), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())
