"""`FailureLog`: log failures with the user's own line first, and then their number instead of each."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

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
        found = users_error(error)
        root = root_error(error)
        last = root.__traceback__ if found is None else found[2]
        while found is None and last is not None and last.tb_next is not None:
            last = last.tb_next
        place = None if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
        key = level, type(root), place
        self._counts[key] += 1
        count = self._counts[key]
        if count & (count - 1):
            return
        if count > 1:
            self._logger.log(level, "%s\n%s (%d such failures so far)", describe(error), said, count)
            return
        lines: list[str] = []
        if found is not None:
            one, first, _ = found
            lines = traceback.format_exception(type(one), one, first, chain=False)
        elif has_traceback or getattr(error, "__notes__", ()):
            lines = traceback.format_exception(error)
        self._logger.log(level, "%s\n%s\n%s", describe(error), said, "".join(lines).rstrip())
