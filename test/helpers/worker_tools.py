"""Tools that workers of the same process share with the test, and others whose calls a test can hold."""

import asyncio
import itertools

from helpers.collector_worlds import CountedTool

from torchrl_agentic.tools.base import Effects

_known = {}
_numbers = itertools.count()


def _known_tool(number):
    return _known[number]


class SharedTool(CountedTool):
    """A counted tool of which a pickle is the tool itself, in this process."""

    def __init__(self, act=None):
        super().__init__(act)
        self._number = next(_numbers)
        _known[self._number] = self

    def __reduce__(self):
        return _known_tool, (self._number,)


class HeldTool(SharedTool):
    """The first call of the second turn sets `arrived`, and waits for `gate`."""

    def __init__(self):
        super().__init__(self._hold)
        self.gate, self.arrived = asyncio.Event(), asyncio.Event()

    @classmethod
    def opened(cls):
        """Return a tool that never waits."""
        tool = cls()
        tool.gate.set()
        return tool

    async def _hold(self, key):
        if key.endswith("#1") and not self.arrived.is_set():
            self.arrived.set()
            await self.gate.wait()


class PlainTool(HeldTool):
    """The same without sessions and without effects."""

    stateful = False
    effects = Effects.PURE
