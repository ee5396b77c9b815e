"""`Crashes`, the number of errors of tools by the place that raised them."""

from __future__ import annotations

from collections import Counter

MAX_CRASHES = 1_000
"""Number of places whose crashes are remembered."""


def type_and_place(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return the type of an error, and the file and line that raised it; "" and 0 if none did.

    Args:
        error: The error.
    """
    place, trace = ("", 0), error.__traceback__
    while trace is not None:
        place, trace = (trace.tb_frame.f_code.co_filename, trace.tb_lineno), trace.tb_next
    return (type(error), *place)


class Crashes:
    """Counts the crashes of tools by place, so that the log has one traceback for each place."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, type[BaseException], str, int]] = Counter()

    def count(self, tool: str, error: BaseException) -> int:
        """Return how often a tool has raised an error of this type at this place; 1 for the first time.

        Args:
            tool: Name of the tool.
            error: What it raised.
        """
        crash = (tool, *type_and_place(error))
        if len(self._seen) >= MAX_CRASHES:
            self._seen.clear()
        self._seen[crash] += 1
        return self._seen[crash]
