"""A wrapper behaves like its tool except for its own change."""

import asyncio
import pickle
from typing import Any

import pytest
import torch
from helpers.limit import limit
from helpers.wrapper_tools import Notes, add, transparent
from tensordict import TensorDict

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall, Status
from torchrl_agentic.tools import Renamed, Wrapped
from torchrl_agentic.tools.base import Effects, Tool
from torchrl_agentic.tools.legacy import LegacyTool, as_tool
from torchrl_agentic.tools.wrappers.base import pause

MEMBERS = [name for name in vars(Tool) if not name.startswith("_")]
METHODS = ["check_row", "final_reward", "initial_message", "setup", "teardown"]
CHANGED = {"run", "session", "branch", "spec", "stateful", "default_effects"}
"""What a wrapper has a reason of its own to define; tests below and of each wrapper are about these."""


class Everything(Tool):
    """Overrides every member of a Tool."""

    async def run(self, args: Any, ctx: Any) -> str:
        return ""


@pytest.mark.parametrize("name", MEMBERS)
def test_wrapper_defines_every_member_of_a_tool(name: str):
    """Also what is added to `Tool` later."""
    assert name in vars(Wrapped)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in CHANGED.union(METHODS)])
def test_wrapper_attributes_come_from_the_wrapped_tool(name: str):
    """Also what is added to `Tool` later, and what the tool changes after it was wrapped."""
    tool: Any = type("Marked", (Everything,), {name: None})()  # its own also where Tool has a property
    wrapped = Wrapped(Wrapped(tool))
    mark = object()
    setattr(tool, name, mark)
    assert getattr(wrapped, name) is mark


@pytest.mark.parametrize("name", METHODS)
async def test_wrapper_methods_delegate_to_the_wrapped_tool(name: str):
    seen: list[Any] = []

    def check_row(_: Any, row: Any) -> None:
        seen.append(row)

    async def other(_: Any) -> object:
        seen.append(mark)
        return mark

    mark = object()
    method = check_row if name == "check_row" else other
    wrapped: Any = Wrapped(Wrapped(type("Marked", (Everything,), {name: method})()))
    if name == "check_row":
        wrapped.check_row(mark)
    else:
        assert await getattr(wrapped, name)() is (
            mark if name in ("initial_message", "final_reward") else None
        )
    assert seen == [mark]


def test_wrapper_finds_members_that_only_some_tools_have():
    tool = Notes()
    wrapped: Any = Wrapped(Wrapped(tool))
    assert wrapped.diary is tool.diary
    assert not hasattr(wrapped, "reset_rows")
    assert not hasattr(wrapped, "_process_batch_item")


def test_the_reset_of_rows_reaches_a_legacy_tool():
    rows: list[Any] = []

    class Legacy:
        def _process_batch_item(self, content: str, index: int) -> None: ...

        def _reset(self, td: Any, td_reset: Any) -> None:
            rows.append((td, td_reset))

    legacy = as_tool(Legacy(), name="old")
    assert isinstance(legacy, LegacyTool)
    wrapped: Any = Renamed(legacy, "new")
    mask = TensorDict({"_reset": torch.ones(1, 1, dtype=torch.bool)}, batch_size=[1])
    wrapped.reset_rows(mask, mask)
    assert [given is mask for given in rows[0]] == [True, True]


def test_functions_and_look_alikes_can_be_wrapped():
    def double(n: int) -> int:
        """Double it."""
        return 2 * n

    assert Wrapped(double).name == "double"
    with pytest.raises(TypeError, match="a tool is a Tool"):
        Wrapped(3)


def test_uninitialised_wrapper_names_the_missing_attribute():
    with pytest.raises(AttributeError, match="diary"):
        _ = Wrapped.__new__(Wrapped).diary


@pytest.mark.parametrize("name", [name for name in transparent("unused") if name != "Cached"])
async def test_sessions_open_and_close_once_and_keep_to_their_trajectory(name: str, tmp_path: Any):
    notes = Notes()
    wrapped = transparent(tmp_path / "cassette.jsonl")[name](notes)
    dispatcher = Dispatcher([wrapped])
    one, other = dispatcher.session("one"), dispatcher.session("other")
    for text in ("a", "b"):
        call = [ParsedCall(wrapped.name, {"text": text}, text)]
        (mine,), (theirs,) = await dispatcher.run([(one, call, None), (other, call, None)])
    assert (mine.text, theirs.text) == ("a b", "a b")
    await one.close()
    await one.close()
    await dispatcher.close()
    opened = ["open one", "open other"]
    assert sorted(notes.diary[1:3]) == opened
    assert sorted(notes.diary[3:5]) == ["close one", "close other"]
    assert (notes.diary[0], notes.diary[5:]) == ("setup", ["teardown"])


@pytest.mark.parametrize("name", [name for name in transparent("unused") if name != "Cached"])
async def test_branch_continues_from_the_position_of_its_source(name: str, tmp_path: Any):
    wrapped = transparent(tmp_path / "cassette.jsonl")[name](Notes())
    dispatcher = Dispatcher([Wrapped(wrapped)])
    tool = dispatcher.tools[0].name
    source, branch = dispatcher.session("source"), dispatcher.session("branch")
    await source.run([ParsedCall(tool, {"text": "a"}, "1")])
    await source.branch([branch])
    (there,) = await branch.run([ParsedCall(tool, {"text": "b"}, "2")])
    (here,) = await source.run([ParsedCall(tool, {"text": "c"}, "2")])
    assert (there.text, here.text) == ("a b", "a c")
    await dispatcher.close()


async def test_a_stopped_call_is_stopped_at_the_tool():
    ended = asyncio.Event()

    async def sleep() -> None:
        """Sleep."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    dispatcher = Dispatcher([Wrapped(Wrapped(sleep))], per_call_timeout=0.01)
    (result,) = await dispatcher.session("t").run([ParsedCall("sleep", {}, "c")])
    assert result.status is Status.TIMEOUT
    await ended.wait()
    await dispatcher.close()


async def test_a_tool_that_reads_its_sandbox_off_the_context_finds_it():
    seen: list[Any] = []

    class Boxed(Tool):
        name, sandbox, effects = "boxed", object(), Effects.PURE

        async def run(self, args: Any, ctx: Any) -> str:
            seen.append(ctx.sandbox)
            return ""

    dispatcher = Dispatcher([Wrapped(Boxed())])
    await dispatcher.session("t").run([ParsedCall("boxed", {}, "c")])
    assert seen == [Boxed.sandbox]


def test_model_sees_the_new_name_and_description():
    spec = Renamed(add, "plus", "Plus.").spec()["function"]
    assert (spec["name"], spec["description"]) == ("plus", "Plus.")
    assert spec["parameters"] == add.spec()["function"]["parameters"]
    assert Renamed(add, "plus").description == "Add two numbers."
    assert repr(Renamed(add, "plus")) == "Renamed(FunctionTool('add'), 'plus')"
    with pytest.raises(ValueError, match="an empty one"):
        Renamed(add, "")


async def test_two_tools_of_one_name_live_side_by_side_under_two():
    first, second = Notes(), Notes()
    dispatcher = Dispatcher([first, Renamed(second, "memo")])
    session = dispatcher.session("t")
    await session.run([ParsedCall("note", {"text": "a"}, "1")])
    (memo,) = await session.run([ParsedCall("memo", {"text": "b"}, "2")])
    assert memo.text == "b"
    await dispatcher.close()


def test_the_name_of_a_wrapper_follows_its_tool_also_when_pickled():
    wrapped = Wrapped(Notes())
    assert repr(pickle.loads(pickle.dumps(wrapped))) == "Wrapped(Notes('note'))"


async def test_a_pause_may_come_from_a_clock_on_another_thread():
    def call_later(seconds: float, callback: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, callback)

    await asyncio.wait_for(pause(3600, call_later), limit(10))
