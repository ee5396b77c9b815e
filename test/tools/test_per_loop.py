"""Each event loop has a value of its own, which ends with the loop or when it is taken."""

import asyncio
import gc
import pickle
import weakref

from torchrl_agentic.tools.per_loop import PerLoop


class Value:
    """Something that can be referred to weakly."""


async def test_a_loop_finds_the_value_that_it_created():
    values = PerLoop[Value]()
    first = values.get(Value)
    assert values.get(Value) is first
    assert values.pop() is first
    assert values.pop() is None
    assert values.get(Value) is not first


def test_values_of_two_loops_differ_and_that_of_a_closed_loop_is_dropped():
    values = PerLoop[Value]()

    async def get() -> Value:
        return values.get(Value)

    with asyncio.Runner() as one:
        first = one.run(get())
        with asyncio.Runner() as other:
            second = other.run(get())
        assert first is not second
        assert one.run(get()) is first
    gone = weakref.ref(first)
    del first
    assert asyncio.run(get()) is not second
    gc.collect()
    assert gone() is None


async def test_a_pickled_copy_is_empty():
    values = PerLoop[list[int]]()
    values.get(list).append(1)
    assert pickle.loads(pickle.dumps(values)).pop() is None
