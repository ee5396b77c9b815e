"""Tools for tests of wrappers, and each wrapper in a form that changes nothing of a first call."""

import asyncio
import copy
import itertools
from contextlib import asynccontextmanager

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.tools import (
    Approved,
    Budgeted,
    Cached,
    Cassette,
    Faulty,
    Recorded,
    Renamed,
    Retrying,
    Truncated,
    Wrapped,
)
from torchrl_agentic.tools.base import Effects, Tool, ToolContext
from torchrl_agentic.tools.function import tool


@tool
async def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@tool
async def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


class Notes(Tool):
    """Keeps the notes of each trajectory, and logs the life of its sessions."""

    name = "note"
    description = "Take a note, and read all of them."
    input_schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}  # noqa: RUF012

    def __init__(self):
        self.diary, self.notes = [], []

    async def setup(self):
        self.diary.append("setup")

    async def teardown(self):
        self.diary.append("teardown")

    @asynccontextmanager
    async def session(self, trajectory):
        async with self._open([], trajectory) as live:
            yield live

    @asynccontextmanager
    async def branch(self, live, trajectory):
        assert isinstance(live, Notes)
        async with self._open(live.notes, trajectory) as twin:
            yield twin

    @asynccontextmanager
    async def _open(self, notes, trajectory):
        live = copy.copy(self)
        live.notes = list(notes)
        self.diary.append(f"open {trajectory}")
        yield live
        self.diary.append(f"close {trajectory}")

    async def run(self, args, ctx):
        self.notes.append(args["text"])
        return " ".join(self.notes)


class Scripted(Tool):
    """Returns given values and raises given exceptions, one per call, and records the arguments."""

    name = "scripted"
    description = "Return the next value."
    input_schema = {"type": "object", "properties": {"q": {}, "key": {"type": "string"}}}  # noqa: RUF012

    def __init__(self, *outcomes, effects=Effects.PURE):
        self.outcomes, self.effects, self.seen = outcomes, effects, []
        self._next = itertools.cycle(outcomes)

    async def run(self, args, ctx):
        self.seen.append(dict(args))
        outcome = next(self._next)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Gated(Tool):
    """Signals that a call has begun, and waits for permission to continue."""

    name = "gated"
    description = "Wait."
    effects = Effects.PURE

    def __init__(self):
        self.calls = 0
        self.begun, self.go_on = asyncio.Semaphore(0), asyncio.Event()

    async def run(self, args, ctx):
        self.calls += 1
        self.begun.release()
        await self.go_on.wait()
        return self.calls


def allowed(name, args, ctx):
    """Approve every call."""
    return True


def transparent(path):
    """Return wrappers by name, configured to change nothing of a first call that succeeds."""
    return {
        "Wrapped": Wrapped,
        "Renamed": lambda t: Renamed(t, "other"),
        "Truncated": Truncated,
        "Retrying": lambda t: Retrying(t, idempotency_key=_key),
        "Cached": Cached,
        "Budgeted": lambda t: Budgeted(t, calls=1000, tell=False),
        "Approved": lambda t: Approved(t, allowed),
        "Recorded": lambda t: Recorded(t, Cassette(path)),
        "Faulty": lambda t: Faulty(t, seed=1),
    }


def _key(args, ctx):
    return ctx.call_id


def ctx(call_id="c1", trajectory="t", **more):
    return ToolContext(call_id=call_id, trajectory=trajectory, **more)


async def by_hand(tool, call_id="c1", trajectory="t", /, **args):
    """Call a tool outside any session."""
    return ToolResult.from_value(await tool.run(args, ctx(call_id, trajectory)))


async def ask(tool, *calls, trajectory="t", **options):
    """Run calls, each a dict of arguments, as one turn of one trajectory."""
    dispatcher = Dispatcher([tool], **options)
    try:
        async with dispatcher.session(trajectory) as session:
            name = dispatcher.tools[0].name
            return await session.run([ParsedCall(name, args, f"c{i}") for i, args in enumerate(calls)])
    finally:
        await dispatcher.close()


def write_calls(cassette, trajectory, number):
    """Record `number` calls. Worker processes run this too."""
    for n in range(number):
        cassette.append(trajectory, "add", f"c{n}", {"a": n}, ToolResult.from_text("x" * 3000), 0.0)
