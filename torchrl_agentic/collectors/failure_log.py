"""`FailureLog`: log failures with the user's own line first, and then their number instead of each."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from torchrl_agentic.dispatch.crashes import type_and_place
from torchrl_agentic.dispatch.user_code import describe, root_error, users_error


class FailureLog:
    """Logs the first failure of each type and place, and of the others the 2nd, 4th, 8th and so on.

    Args:
        logger: Gets the lines.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: Counter[tuple[object, ...]] = Counter()

    def add(self, level: int, said: str, error: BaseException, *, has_traceback: bool = False) -> None:
        """Log a failure, unless many of its type and place were logged.

        Args:
            level: Level of the line, such as `logging.WARNING`.
            said: What failed and what follows.
            error: The error.
            has_traceback: Whether to log a traceback, even if no code of the user is in it.
        """
        key = level, *type_and_place(root_error(error))
        self._counts[key] += 1
        count = self._counts[key]
        if count & (count - 1):
            return
        if count > 1:
            self._logger.log(level, "%s\n%s (%d such failures so far)", describe(error), said, count)
            return
        lines: list[str] = []
        if (found := users_error(error)) is not None:
            one, first, _ = found
            lines = traceback.format_exception(type(one), one, first, chain=False)
        elif has_traceback or getattr(error, "__notes__", ()):
            lines = traceback.format_exception(error)
        self._logger.log(level, "%s\n%s\n%s", describe(error), said, "".join(lines).rstrip())
