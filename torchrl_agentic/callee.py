"""Functions that people bring, and how they are to be called: awaited or on a thread, with which keywords."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called like one, is known to block nobody."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Callee:
    """A function that is called as what it is, which is looked up once.

    What is no coroutine function may block, and runs on a thread; what it returns is awaited where it can be.
    """

    __slots__ = ("function", "is_async")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_async = is_async(function)

    async def __call__(self, in_thread: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any) -> Any:
        """Call it. in_thread: `in_thread(function, *args, **kwargs)` runs a function on a thread."""
        if self.is_async:
            return await self.function(*args, **kwargs)
        value = await in_thread(self.function, *args, **kwargs)
        return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True, slots=True)
class Keywords:
    """Which keywords a function takes: those with these names, and perhaps any other."""

    names: frozenset[str]
    any_other: bool

    def __contains__(self, name: str) -> bool:
        return self.any_other or name in self.names


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """Give the keywords that a function takes; one that does not tell may take any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Keywords(frozenset(), any_other=True)
    named = (each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return Keywords(frozenset(named), any(each.kind is each.VAR_KEYWORD for each in parameters))
