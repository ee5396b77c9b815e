"""`as_tool` with custom transforms, and the transforms that it rejects."""

import functools

import pytest
from helpers.legacy_envs import call, divide, run
from torchrl.envs import StepCounter
from torchrl.envs.llm.transforms import (
    BrowserTransform,
    ExecuteToolsInOrder,
    MCPToolTransform,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)

from torchrl_agentic import ToolResult, as_tool


class Own:
    """A custom transform with the one stable method."""

    def __init__(self, answer=lambda content, index: [content]):
        self.answer, self.closed = answer, 0

    def _process_batch_item(self, content, index):
        return self.answer(content, index)

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset

    def close(self):
        self.closed += 1


class Bare:
    """Nothing but the seam."""

    def _process_batch_item(self, content, index):
        return [content]


class TestOwn:
    def test_it_gets_the_call_in_torchrl_s_tags_with_its_row(self, chat):
        chat = chat(2, as_tool(Own(lambda content, index: [f"{index}: {content}"]), name="own"))
        assert chat.step(*[call("own", a="é<")] * 2) == [
            [f'{i}: <tool name="own">{{"a": "é<"}}</tool>'] for i in range(2)
        ]

    def test_own_syntax_is_written_by_render_call(self, chat):
        own = as_tool(Own(), name="own", render_call=lambda name, args: f"CALL {name}({args['x']})")
        assert chat(1, own).step(call("own", x=1)) == [["CALL own(1)"]]

    def test_render_call_comes_before_any_layer(self, chat):
        """A transform that defines the syntax wants to read it itself."""
        simple = SimpleToolTransform(tools={"f": divide})
        tool = as_tool(
            simple, name="f", render_call=lambda name, args: f"<tool>{name}\n" + '{"a": 1, "b": 2}</tool>'
        )
        assert "0.5" in chat(1, tool).step(call("f"))[0][0]

    def test_several_results_are_the_parts_of_one(self):
        result = run(as_tool(Own(lambda content, index: ["one", "two"]), name="own"), {})
        assert [part.text for part in result.parts] == ["one", "two"]

    def test_results_are_written_as_it_writes_them(self):
        class Loud(Own):
            def _format_result(self, result):
                return result.upper()

        assert run(as_tool(Loud(lambda content, index: ["one"]), name="own"), {}).text == "ONE"

    def test_a_string_is_one_result_and_not_its_letters(self):
        assert run(as_tool(Own(lambda content, index: "abc"), name="own"), {}).text == "abc"

    def test_finding_no_call_is_an_error_that_names_the_remedy(self, chat):
        chat = chat(1, as_tool(Own(lambda content, index: None), name="own"))
        assert "render_call" in chat.step(call("own"))[0][0]
        assert chat.errors() == [1]

    def test_failure_text_of_torchrl_is_an_error(self):
        assert run(as_tool(Own(lambda content, index: ["Tool f failed:\nno"]), name="own"), {}).is_error

    def test_exception_of_the_transform_affects_only_its_row(self, chat, caplog):
        def answer(content, index):
            if index == 0:
                raise KeyError("a bug")
            return ["fine"]

        chat = chat(2, as_tool(Own(answer), name="own"))
        assert chat.step(*[call("own")] * 2)[1] == ["fine"]
        assert chat.errors() == [1, 0]

    def test_it_is_closed_with_the_environment_once(self, chat):
        own = Own()
        chat = chat(1, as_tool(own, name="own"))
        chat.compose.close()
        chat.compose.close()
        assert own.closed == 1

    def test_it_can_be_reset_though_it_has_no_reset(self, chat):
        chat = chat(2, as_tool(Bare(), name="bare"))
        chat.reset(True, False)
        assert chat.errors() == [0, 0]

    def test_given_schema_is_used(self):
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        assert as_tool(Own(), name="own", input_schema=schema).spec()["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "thing", [None, "python", StepCounter(), object(), divide, functools.partial(divide, 1)]
)
def test_transform_without_a_tool_is_rejected(thing):
    with pytest.raises(TypeError, match="not a tool transform"):
        as_tool(thing, name="x")


def test_two_names_of_one_transform_are_two_tools(chat):
    simple = SimpleToolTransform(tools={"f": divide, "g": lambda: ToolResult.from_text("g")})
    chat = chat(1, as_tool(simple, name="f"), as_tool(simple, name="g"))
    assert chat.step(call("g")) == [["g"]]
    assert chat.step(call("f", a=1, b=1)) == [['{"quotient": 1.0}']]


class Named(Own):
    name = "mine"


class Sum:
    """Adds."""

    name = "sum"
    schema_in, schema_out = {"a": int}, {"sum": int}

    def __call__(self, a):
        return {"sum": a}


def registry(*names):
    services = [Sum() for _ in names]
    for service, name in zip(services, names, strict=True):
        service.name = name
    return ExecuteToolsInOrder(ToolRegistry(services), XMLBlockParser())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (PythonInterpreter, "python"),
        (BrowserTransform, "browser"),
        (lambda: SimpleToolTransform(tools={"divide": divide}), "divide"),
        (lambda: registry("sum"), "sum"),
        (Named, "mine"),
    ],
)
def test_without_a_name_it_is_called_as_the_only_tool_that_the_transform_has(make, name):
    assert as_tool(make()).name == name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SimpleToolTransform(tools={"f": divide, "g": divide}), "has the tools f, g"),
        (lambda: registry("a", "b"), "has the tools a, b"),
        (lambda: MCPToolTransform({}), "MCPToolTransform has no name of its own"),
        (Own, "Own has no name of its own"),
    ],
)
def test_a_transform_with_several_tools_or_without_a_name_needs_one(make, words):
    with pytest.raises(TypeError, match=rf"{words}: as_tool\(\w+\(\.\.\.\), name='\.\.\.'\)$"):
        as_tool(make())
