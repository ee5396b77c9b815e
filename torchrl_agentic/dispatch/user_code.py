"""Find the user's own code in the traceback of an error, which is what the user wants to read first."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (_PACKAGE, sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"])


def is_users_file(filename: str) -> bool:
    """Return True if code is neither of this package, nor of an installed one, nor of Python.

    Args:
        filename: Name of the file as tracebacks have it; that of a notebook cell may be in angle brackets.
    """
    if filename.startswith("<"):
        return not filename.startswith("<frozen")
    path = Path(filename)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def users_error(error: BaseException) -> tuple[BaseException, TracebackType, TracebackType] | None:
    """Return the error that the user's code raised or let pass; None if none of it was running.

    Args:
        error: The error that ended a trajectory; what it was raised from is looked at, too.

    Returns:
        The error, its traceback from the first line of the user's code on, and from the last one on.
    """
    for one in _chain(error):
        frames: list[TracebackType] = []
        step = one.__traceback__
        while step is not None:
            if is_users_file(step.tb_frame.f_code.co_filename):
                frames.append(step)
            step = step.tb_next
        if frames:
            return one, frames[0], frames[-1]
    return None


def root_error(error: BaseException) -> BaseException:
    """Return the error that the user's code raised, or else the one that an error was raised from first."""
    found = users_error(error)
    return list(_chain(error))[-1] if found is None else found[0]


def describe(error: BaseException) -> str:
    """Return an error in one line, with the place in the user's code first, if there is one.

    Args:
        error: The error.
    """
    found = users_error(error)
    if found is None:
        return f"{type(error).__name__}: {error}"
    one, _, last = found
    code = last.tb_frame.f_code
    return f"{code.co_filename}:{last.tb_lineno}, in {code.co_name}: {type(one).__name__}: {one}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from, one after the other."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
