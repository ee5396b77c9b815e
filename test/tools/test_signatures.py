"""User functions are called as sync or async functions."""

import asyncio
import functools
import pickle
import threading

import pytest

from torchrl_agentic.tools.base import AsyncCallable
from torchrl_agentic.tools.signatures import is_async, keywords_of


def blocking(value):
    return value, threading.current_thread().name


async def awaited(value):
    return value, threading.current_thread().name


class Awaited:
    async def __call__(self, value):
        return await awaited(value)

    async def method(self, value):
        return await awaited(value)


class Made(Awaited):
    """A class is called too, and that makes an object, at once."""


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (awaited, True),
        (Awaited(), True),
        (Awaited().method, True),
        (functools.partial(awaited, 1), True),
        (blocking, False),
        (lambda: awaited(1), False),
        (Made, False),
        (len, False),
    ],
)
def test_async_functions_are_distinguished_from_blocking_ones(function, wanted):
    assert is_async(function) is wanted


@pytest.mark.parametrize(
    ("function", "on_loop"),
    [(awaited, True), (Awaited(), True), (blocking, False), (lambda value: awaited(value), True)],
)
async def test_blocking_function_runs_on_a_thread_and_its_awaitable_is_awaited(function, on_loop):
    value, thread = await AsyncCallable(function)(asyncio.to_thread, 7)
    assert value == 7
    assert (thread == threading.current_thread().name) is on_loop


async def test_its_keywords_are_its_own():
    """A function may have parameters of the names that calling it takes itself."""

    async def own(**kwargs):
        return kwargs

    wanted = {"self": 1, "in_thread": 2, "function": 3}
    assert await AsyncCallable(own)(asyncio.to_thread, **wanted) == wanted
    assert await AsyncCallable(lambda **kwargs: kwargs)(asyncio.to_thread, **wanted) == wanted


async def test_object_can_be_pickled():
    again = pickle.loads(pickle.dumps(AsyncCallable(awaited)))
    assert (await again(asyncio.to_thread, 7))[0] == 7


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda a, *, b=1: 0, {"a", "b"}),
        (lambda a, /, *b: 0, set()),
        (lambda a, /, *b, **c: 0, {"a", "b", "c"}),
        (functools.partial(lambda a, b: 0, 1), {"b"}),
        (str, {"a", "b", "c"}),
    ],
    ids=["named", "positional", "any", "bound", "untold"],
)
def test_a_function_takes_its_keywords_and_no_others(function, taken):
    keywords = keywords_of(function)
    assert {name for name in ("a", "b", "c") if name in keywords} == taken
