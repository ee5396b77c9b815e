"""Accepted tools: functions with and without @tool and look-alikes; and rejected objects."""

import asyncio
import pickle
import threading
import types
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pydantic
import pytest

from torchrl_agentic.messages import Status
from torchrl_agentic.tools import Gsm8kTool
from torchrl_agentic.tools.base import Effects, Tool, ToolContext, Toolset, effects_of, has_sessions
from torchrl_agentic.tools.function import FunctionTool, tool
from torchrl_agentic.tools.tool_adapter import ensure_tool, ensure_toolset

CTX = ToolContext(call_id="c1")


def test_effects_can_be_given_as_words():
    told = [Effects.PURE, Effects.EXCLUSIVE, Effects(writes=["b", "a"]), Effects(["x"], ["y"])]
    assert [str(each) for each in told] == ["pure", "exclusive", "writes a, b", "reads x; writes y"]


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool(name="minus", description="Take away.", effects=Effects.EXCLUSIVE)
def subtract(a: int, b: int) -> int:
    """Subtract."""
    return a - b


def times(a: int, b: int) -> int:
    """Multiply."""
    return a * b


class Adder:
    """A callable object."""

    async def __call__(self, a: int) -> int:
        return a + 1


class Counter(Tool):
    """A tool with sessions."""

    name = "counter"

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        yield self

    async def run(self, args: Any, ctx: ToolContext) -> str:
        return "counted"


async def test_a_bare_decorator_makes_a_tool():
    assert isinstance(add, FunctionTool)
    assert (add.name, add.description, effects_of(add)) == ("add", "Add two numbers.", Effects.PURE)
    assert await add.run({"a": 2}, CTX) == 3
    assert add(2, b=5) == 7


async def test_a_decorator_with_options_makes_a_tool():
    assert (subtract.name, subtract.description) == ("minus", "Take away.")
    assert subtract.effects is Effects.EXCLUSIVE
    assert await subtract.run({"a": 2, "b": 1}, CTX) == 1


async def test_an_empty_decorator_and_a_call_make_tools():
    assert tool()(times).name == "times"
    renamed = tool(times, name="mul")
    assert renamed.name == "mul"
    assert await renamed.run({"a": 2, "b": 3}, CTX) == 6


async def test_given_schema_replaces_the_signature():
    def anything(**fields: Any) -> Any:
        """Take anything."""
        return fields

    made = tool(anything, schema={"type": "object", "properties": {"x": {}}})
    assert made.description == "Take anything."
    assert await made.run({"x": 1}, CTX) == {"x": 1}


def test_a_lambda_needs_a_name():
    with pytest.raises(TypeError, match="name="):
        tool(lambda: 1)
    assert tool(lambda: 1, name="one").name == "one"


async def test_the_context_is_filled_in_and_hidden_from_the_model():
    @tool
    async def who(context: ToolContext, name: str) -> str:
        """Tell."""
        return f"{name} in {context.call_id}"

    assert set(who.input_schema["properties"]) == {"name"}
    assert who.input_schema["required"] == ["name"]
    assert await who.run({"name": "I"}, CTX) == "I in c1"


async def test_a_sync_function_runs_off_the_event_loop_thread():
    @tool
    def where() -> int:
        """Tell the thread."""
        return threading.get_ident()

    @tool
    async def here() -> int:
        """Tell the thread."""
        return threading.get_ident()

    assert await where.run({}, CTX) != threading.get_ident()
    assert await here.run({}, CTX) == threading.get_ident()


async def test_a_callable_object_with_an_async_call_is_awaited():
    made = FunctionTool(Adder(), name="inc")
    assert await made.run({"a": 1}, CTX) == 2


async def test_a_sync_function_that_returns_an_awaitable_is_awaited():
    async def later() -> str:
        return "done"

    def sync() -> Any:
        """Give a coroutine."""
        return later()

    assert await tool(sync).run({}, CTX) == "done"


async def test_arguments_that_do_not_fit_the_signature_are_the_models_mistake():
    for args, mistake in (({"a": "many"}, "add: a: "), ({"a": 1, "nope": 2}, "'nope'")):
        result = await add.run(args, CTX)
        assert result.status is Status.INVALID_ARGS
        assert mistake in result.text


def test_a_decorated_function_pickles_as_itself():
    """By reference: the module's name leads to the tool, not to the function."""
    assert pickle.loads(pickle.dumps(add)) is add
    assert pickle.loads(pickle.dumps(subtract)) is subtract


async def test_a_function_tool_pickles_with_its_options():
    made = FunctionTool(times, name="mul", description="M.", effects=Effects(writes=["x"]))
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.name, copy.description, copy.effects) == ("mul", "M.", Effects(writes=["x"]))
    assert copy.input_schema == made.input_schema
    assert await copy.run({"a": 2, "b": 4}, CTX) == 8
    other = FunctionTool(times, schema={"type": "object", "properties": {"a": {}}})
    assert pickle.loads(pickle.dumps(other)).input_schema == other.input_schema


class AsyncDuck:
    name = "duck"
    description = "Quack."
    input_schema = {"type": "object", "properties": {"x": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self) -> None:
        self.events: list[str] = []

    async def setup(self) -> None:
        self.events.append("setup")

    def teardown(self) -> None:
        self.events.append("teardown")

    async def run(self, args: Any, ctx: ToolContext) -> Any:
        return args["x"], ctx.call_id


class BlockingDuck:
    name = "block"
    description = "Block."
    input_schema = {"type": "object"}  # noqa: RUF012

    def run(self, args: Any, ctx: ToolContext) -> int:
        return threading.get_ident()


async def test_a_look_alike_is_accepted_whether_its_run_is_async_or_blocks():
    duck = AsyncDuck()
    made = ensure_tool(duck)
    assert isinstance(made, Tool)
    assert (made.name, made.description, made.input_schema) == ("duck", "Quack.", duck.input_schema)
    await made.setup()
    assert await made.run({"x": 1}, CTX) == (1, "c1")
    await made.teardown()
    assert duck.events == ["setup", "teardown"]
    blocking = ensure_tool(BlockingDuck())
    assert await blocking.run({}, CTX) != threading.get_ident()
    await blocking.setup()
    await blocking.teardown()


def test_tools_and_functions_are_accepted():
    assert ensure_tool(add) is add
    assert ensure_tool(times).name == "times"
    counter = Counter()
    assert ensure_tool(counter) is counter


class SyncRun(Tool):
    name = "sync"

    def run(self, args: Any, ctx: ToolContext) -> str:  # type: ignore[override]
        return "x"


class SomeTransform:
    def _step(self, *_: Any) -> None: ...
    def _reset(self, *_: Any) -> None: ...
    def __call__(self, td: Any) -> Any: ...


class LegacyTransform(SomeTransform):
    def _process_batch_item(self, content: str, index: int) -> None: ...


class Set(Toolset):
    async def setup(self) -> list[Tool]:
        return []

    async def teardown(self) -> None: ...


class NoRun:
    name = "no"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (Counter, ["class", "Counter(...)"]),
        (SomeTransform(), ["transform", "outer Compose", "SomeTransform"]),
        (LegacyTransform(), ["as_tool", "LegacyTransform"]),
        (Set(), ["toolset", "add_toolset"]),
        (Gsm8kTool(), ["LifecycleTool(Gsm8kTool(...))"]),
        (NoRun(), ["NoRun lacks description, input_schema, run"]),
        (SyncRun(), ["SyncRun", "async def run"]),
        (3, ["int"]),
        (None, ["NoneType"]),
    ],
)
def test_object_that_is_not_a_tool_is_rejected_with_the_correct_form(item: Any, words: list[str]):
    with pytest.raises(TypeError) as caught:
        ensure_tool(item)
    for word in words:
        assert word in str(caught.value)


def test_effects_follow_from_sessions_unless_declared():
    counter = Counter()
    assert effects_of(counter) == Effects(writes=["counter"])
    counter.effects = Effects.PURE
    assert effects_of(counter) is Effects.PURE
    assert effects_of(ensure_tool(AsyncDuck())) == Effects.PURE


@pytest.mark.parametrize("says", [True, False])
def test_a_tool_has_sessions_if_its_class_defines_them_unless_it_says_otherwise(says: bool):
    counter, other = Counter(), ensure_tool(AsyncDuck())
    assert (has_sessions(counter), has_sessions(other)) == (True, False)
    counter.stateful = other.stateful = says
    assert (has_sessions(counter), has_sessions(other)) == (says, says)


async def test_the_default_session_is_the_tool_itself():
    async with add.session("t") as live:
        assert live is add


def test_a_spec_has_the_shape_of_chat_templates():
    spec = add.spec()
    assert spec["type"] == "function"
    assert spec["function"]["name"] == "add"
    assert spec["function"]["parameters"]["required"] == ["a"]


def test_an_abstract_tool_cannot_be_made():
    with pytest.raises(TypeError, match="run"):
        type("Bad", (Tool,), {})()


async def test_in_thread_works_by_hand():
    assert await CTX.in_thread(times, 2, b=3) == 6
    assert asyncio.get_running_loop()


async def test_parameters_may_have_the_names_that_running_on_a_thread_uses():
    def plot(function: str, self: int = 0, args: int = 0) -> str:
        """Plot a function."""
        return f"{function} {self} {args}"

    made = tool(plot)
    assert await made.run({"function": "sin", "self": 1, "args": 2}, ToolContext(call_id="c1")) == "sin 1 2"


class Remembers:
    """A complete look-alike whose members are set when it is made."""

    def __init__(self, **without: Any) -> None:
        self.name, self.description = "remembers", "Remember."
        self.input_schema = {"type": "object", "properties": {}}
        for member in without:
            delattr(self, member)

    async def run(self, args: Any, ctx: ToolContext) -> str:
        return "ok"


def test_a_complete_look_alike_is_an_instance_of_tool_and_of_no_subclass():
    assert isinstance(Remembers(), Tool)
    assert isinstance(AsyncDuck(), Tool)
    assert not isinstance(Remembers(), Counter)
    assert not isinstance(Remembers, Tool)
    assert not issubclass(Remembers, Tool)


@pytest.mark.parametrize("member", ["name", "description", "input_schema"])
def test_a_look_alike_that_lacks_a_member_is_refused_with_its_name(member: str):
    incomplete = Remembers(**{member: None})
    assert not isinstance(incomplete, Tool)
    with pytest.raises(TypeError, match=f"Remembers lacks {member}$"):
        ensure_tool(incomplete)


def given(instance: Any, **members: Any) -> Any:
    """Return an object with other members."""
    for name, value in members.items():
        setattr(instance, name, value)
    return instance


class Params(pydantic.BaseModel):
    a: int


class LangChains:
    """As LangChain's tools are: `input_schema` is a class, and `run` takes one argument and options."""

    name, description = "add", "Add."
    args_schema = input_schema = Params

    def run(self, tool_input: Any, verbose: bool | None = None, *, config: Any = None) -> Any:
        raise NotImplementedError


def execute(a: int) -> int:
    """Add."""
    return a


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (LangChains(), "LangChains looks like a tool, but input_schema is .*Params.*FunctionTool"),
        (given(Remembers(), input_schema="{}"), "input_schema is '{}' instead of a Mapping"),
        (given(Remembers(), output_schema=Params), "output_schema is"),
        (given(Remembers(), effects="none"), "effects is 'none' instead of a Effects"),
        (given(Remembers(), run=lambda args: 1), "run cannot be called as a tool's: too many"),
        (given(Remembers(), run=lambda a, b, c: 1), "run cannot be called as a tool's: missing"),
        (given(Remembers(), setup="x"), "setup cannot be called"),
        (given(Remembers(), session=lambda: 1), "session cannot be called"),
        (given(Remembers(), final_reward=1.0), "final_reward cannot be called"),
        (given(types.FunctionType(execute.__code__, {}), __registry_info__=1), "inspect_ai; .*tool"),
    ],
)
def test_members_that_are_something_else_are_refused(item: Any, words: str):
    with pytest.raises(TypeError, match=words):
        ensure_tool(item)


def test_a_look_alike_may_leave_members_out():
    assert ensure_tool(given(Remembers(), input_schema=None, effects=None, session=3)).input_schema
    assert tool(given(execute, __registry_info__=1), name="add").name == "add"


@pytest.mark.parametrize("names", [("setup", "teardown"), ("open", "close", "tools")])
def test_members_of_a_toolset_are_methods_without_arguments(names: Any):
    for value in (True, "x", lambda path: path):
        with pytest.raises(TypeError, match="SimpleNamespace lacks"):
            ensure_toolset(given(types.SimpleNamespace(), **dict.fromkeys(names, value)))
    assert ensure_toolset(given(types.SimpleNamespace(), **dict.fromkeys(names, list)))


class OpenAndClose:
    """A toolset as the PR stack has it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def open(self) -> None:
        self.events.append("open")

    def close(self) -> None:
        self.events.append("close")

    @property
    def tools(self) -> tuple[Any, ...]:
        if not self.events:
            raise RuntimeError("not open")
        return (times,)


class SetupAndTeardown:
    async def setup(self) -> list[Any]:
        return [times]

    def teardown(self) -> None: ...


@pytest.mark.parametrize("make", [OpenAndClose, SetupAndTeardown, Set])
async def test_a_toolset_may_be_a_look_alike(make: Any):
    item = make()
    toolset = ensure_toolset(item)
    assert [made.name for made in await toolset.setup()] == ([] if make is Set else ["times"])
    await toolset.teardown()
    assert getattr(item, "events", []) == (["open", "close"] if make is OpenAndClose else [])
    assert toolset.revision == 0
    with pytest.raises(TypeError, match="add_toolset"):
        ensure_tool(item)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (SetupAndTeardown, r"SetupAndTeardown\(\.\.\.\)"),
        (type("Half", (), {"setup": print})(), "Half lacks teardown"),
        (type("Half", (), {"open": print, "close": print})(), "Half lacks tools"),
        (3, "int lacks setup, teardown"),
    ],
)
def test_object_that_is_not_a_toolset_is_rejected_with_the_missing_methods(item: Any, words: str):
    with pytest.raises(TypeError, match=words):
        ensure_toolset(item)
