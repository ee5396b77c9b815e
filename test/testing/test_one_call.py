"""`call_tool` runs one call as a ToolCompose would."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from torchrl_agentic import StopTool, Tool, ToolContext, ToolError
from torchrl_agentic.messages import Status
from torchrl_agentic.testing import call_tool
from torchrl_agentic.tools import Gsm8kTool, LifecycleTool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Diary(Tool):
    """Writes down what happens to it; a call runs in its session."""

    name = "diary"
    description = "Write."
    input_schema = {"type": "object", "properties": {"what": {"enum": ["ok", "error", "crash", "hang"]}}}  # noqa: RUF012
    wants_state = needs_row = True

    def __init__(self) -> None:
        self.events: list[Any] = []

    async def setup(self) -> None:
        self.events.append("setup")

    async def teardown(self) -> None:
        self.events.append("teardown")

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        self.events.append(("open", trajectory))
        yield self
        self.events.append("close")

    async def run(self, args: Any, ctx: ToolContext) -> Any:
        match args["what"]:
            case "error":
                raise ToolError("mistaken")
            case "crash":
                raise OSError("broken")
            case "hang":
                await asyncio.Event().wait()
        self.events.append((ctx.state, dict(ctx.row.columns)))
        return "written"


class Duck:
    name, description, input_schema = "duck", "Quack.", {"type": "object"}

    def run(self, args: Any, ctx: ToolContext) -> str:
        return f"{ctx.trajectory} {args}"


def test_a_call_is_set_up_and_runs_in_a_session_that_is_closed_again():
    tool = Diary()
    result = call_tool(tool, {"what": "ok"}, state={"x": 1}, row={"y": 2}, trajectory="mine")
    assert (result.status, result.text) == (Status.OK, "written")
    assert tool.events == ["setup", ("open", "mine"), ({"x": 1}, {"y": 2}), "close", "teardown"]


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("error", Status.ERROR),
        ("crash", Status.CRASH),
        ("hang", Status.TIMEOUT),
        ("other", Status.INVALID_ARGS),
    ],
)
def test_failures_become_results(what: str, status: Status):
    assert call_tool(Diary(), {"what": what}, timeout=0.05 if what == "hang" else 30).status is status


def test_functions_look_alikes_and_tools_without_arguments_can_be_called():
    assert call_tool(add, {"a": 20, "b": 22}).text == "42"
    assert call_tool(add, {"a": "x"}).status is Status.INVALID_ARGS
    assert call_tool(Duck(), {"a": 1}).text == "test {'a': 1}"
    assert call_tool(StopTool()).stop


async def test_a_test_that_has_an_event_loop_can_call_tools_too():
    assert call_tool(add, {"a": 1, "b": 1}).text == "2"


def test_a_tool_of_a_toolset_is_called_while_that_is_open():
    class Pool:
        tools = (add,)
        is_open = False

        async def open(self) -> None:
            self.is_open = True

        async def close(self) -> None:
            self.is_open = False

    pool = Pool()
    assert call_tool(pool, {"a": 1, "b": 1}, name="add").text == "2"
    assert not pool.is_open
    with pytest.raises(ValueError, match="no tool 'sub'; its tools: add"):
        call_tool(pool, name="sub")
    assert not pool.is_open


def test_a_row_reaches_tools_that_begin_with_the_trajectory():
    row = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}}}
    result = call_tool(LifecycleTool(Gsm8kTool()), {"answer": "7"}, row=row)
    assert result.status is Status.OK, result.text


def test_object_that_is_not_a_tool_raises():
    with pytest.raises(TypeError, match="int lacks name"):
        call_tool(3)
    with pytest.raises(TypeError, match=r"args maps names of arguments to values; got \[1\]"):
        call_tool(add, [1])  # pyright: ignore[reportArgumentType]
