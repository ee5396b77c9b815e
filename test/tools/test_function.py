"""`@function_tool`, hidden parameters, and files of tools."""

import dataclasses
import datetime
import enum
import inspect
import json
import pickle
import re
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import annotated_types
import pytest
from helpers.processes import run_program
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
    Strict,
    StringConstraints,
    WithJsonSchema,
    field_validator,
)
from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from torchrl_agentic import (
    Effects,
    FunctionTool,
    Inject,
    Injected,
    ParsedCall,
    Renamed,
    RowData,
    Status,
    Tool,
    ToolContext,
    ToolResult,
    Truncated,
    function_tool,
    load_function_tools,
    tool,
)
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.tools.loading import load_module, load_object
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from torchrl_agentic.tools.verl.lifecycle import LifecycleTool

DATA = RowData.of(
    {
        "ground_truth": "42",
        "tools_kwargs": {"look": {"execute_kwargs": {"limit": 3}, "create_kwargs": {"x": 1}}},
    }
)


def look(
    word: str,
    ground_truth: Injected[str],
    limit: Injected[int],
    who: Annotated[str, Inject("trajectory")],
    turn: Injected[int],
    context: Injected[Any],
    tools_kwargs: Injected[dict[str, Any]],
    colour: Injected[str] = "red",
) -> list[Any]:
    """Look.

    Args:
        word: what for.
    """
    return [word, ground_truth, limit, who, turn, context.call_id, sorted(tools_kwargs), colour]


async def test_hidden_parameters_are_filled_in_and_not_shown():
    made = tool(look)
    assert list(made.input_schema["properties"]) == ["word"]
    assert made.needs_row
    async with Dispatcher([made]).session("t5") as session:
        session.data = DATA
        session.turn = 2
        (result,) = await session.run([ParsedCall("look", {"word": "hi", "ground_truth": "mine"}, "c1")])
    kwargs = ["create_kwargs", "execute_kwargs"]
    assert result.parts[0].data == ["hi", "42", 3, "t5", 2, "c1", kwargs, "red"]
    assert result.notes == ("undeclared argument: ground_truth",)


def test_a_row_without_a_column_that_is_needed_is_refused_and_a_default_does_not_need_one():
    tool(look).check_row(DATA)
    with pytest.raises(ValueError, match="takes its 'ground_truth' from the column 'ground_truth'"):
        tool(look).check_row(RowData(tools_kwargs=DATA.tools_kwargs))


def test_state_is_asked_for_by_a_parameter():
    def peek(state: Injected[Any]) -> str:
        """Peek."""
        return str(state)

    made = tool(peek)
    assert made.wants_state
    assert not made.needs_row


async def test_hidden_parameters_work_with_a_custom_schema():
    @function_tool(schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    def f(a, who: Annotated[str, Inject("trajectory")]):
        return [a, who]

    async with Dispatcher([f]).session("t1") as session:
        (result,) = await session.run([ParsedCall("f", {"a": 1}, "c")])
    assert result.text == '[1, "t1"]'


def documented(a: int, b: int = 2) -> int:
    """Add.

    Args:
        a: one number.
        b: another.
    """
    return a + b


@pytest.mark.parametrize(
    ("decorate", "name"),
    [
        (function_tool, "documented"),
        (function_tool("plus"), "plus"),
        (function_tool(), "documented"),
        (function_tool(name="plus"), "plus"),
    ],
)
def test_decorated_function_stays_callable_and_is_accepted_as_a_tool(decorate, name):
    def copy(a: int, b: int = 2) -> int:
        """Add.

        Args:
            a: one number.
            b: another.
        """
        return a + b

    copy.__name__ = "documented"
    assert decorate(copy) is copy
    assert copy(1) == 3
    assert ensure_tool(copy).name == name
    assert ensure_tool(copy) is ensure_tool(copy)


SCHEMA = {
    "type": "function",
    "function": {
        "name": "given",
        "description": "As given.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"anyOf": [{"$ref": "#/$defs/n"}]}},
            "$defs": {"n": {}},
        },
    },
}


@pytest.mark.parametrize("schema", [SCHEMA, OpenAIFunctionToolSchema.model_validate(SCHEMA)])
def test_a_whole_schema_says_name_description_and_parameters(schema):
    def f(x):
        return x

    made = ensure_tool(function_tool(schema=schema)(f))
    assert (made.name, made.description) == ("given", "As given.")
    assert made.spec()["function"]["parameters"]["properties"]["x"] == {"anyOf": [{}]}
    assert ensure_tool(function_tool(name="mine", schema=schema)(f)).name == "mine"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int


def plain(a: str, b: int, c: float, d: bool) -> dict:
    """Do one thing
    over two lines.

    And say more.

    Args:
        a: first, and
            going on.
        b: second.
        c: third.
        d: fourth.

    Returns:
        Something.
    """


def optional(a: str | None, b: Optional[int] = None, c: list[float | None] | None = None):  # noqa: UP045
    """Take what may be null.

    Args:
        a: a text.
        b: a number.
        c: numbers.
    """


def unions(a: int | float, b: Literal["x", "y"] = "x", c: Literal[1, "z"] | None = 1):
    """Take several types.

    Args:
        a: a number.
        b: a letter.
        c: a mixture.
    """


def containers(a: list[str], b: dict[str, int], c: dict, d: Any, e: tuple[int, str]):
    """Take containers.

    Args:
        a: texts.
        b: numbers.
        c: entries.
        d: anything.
        e: a pair.
    """


def written_so_since_5_20(a: str | list[int], b: list, c: Colour):
    """Take what older releases of transformers say less about.

    Args:
        a: text or list.
        b: items.
        c: a colour (choices: ["red"])
    """


def nothing_at_all():
    """Take nothing."""


@pytest.mark.parametrize("function", [plain, optional, unions, containers, nothing_at_all])
def test_the_schema_of_a_function_tool_is_the_one_of_transformers(function):
    expected = get_json_schema(function)
    expected.pop("return", None)
    expected["function"].pop("return", None)
    assert ensure_tool(function_tool(function)).spec() == expected


def test_function_schema_equals_that_of_newer_transformers_for_any_version():
    spec = ensure_tool(function_tool(written_so_since_5_20)).spec()
    assert spec["function"]["parameters"]["properties"] == {
        "a": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}],
            "description": "text or list.",
        },
        "b": {"type": "array", "description": "items."},
        "c": {"type": "string", "enum": ["red"], "description": "a colour"},
    }


def test_a_function_tool_keeps_its_schema_in_another_process():
    made = ensure_tool(function_tool(optional))
    assert pickle.loads(pickle.dumps(made)).spec() == made.spec()


def test_types_that_transformers_lacks_keep_their_schema_without_a_default():
    @function_tool
    def go(to: Point, times: Annotated[int, Field(ge=1)] = 2):
        """Go.

        Args:
            to: where.
            times: how often.
        """

    properties = ensure_tool(go).spec()["function"]["parameters"]["properties"]
    assert properties["to"]["properties"]["x"] == {"type": "integer"}
    assert properties["times"] == {"type": "integer", "minimum": 1, "description": "how often."}


async def test_null_is_accepted_where_a_schema_is_nullable():
    @function_tool
    def f(a: str | None, b: Literal["x"] | None, c: list[int | None] | None):
        """Say.

        Args:
            a: a text.
            b: a letter.
            c: numbers.
        """
        return [a, b, c]

    g = function_tool(name="g", schema=get_json_schema(f))(lambda a, b, c: [a, b, c])
    async with Dispatcher([f, g]).session("t") as session:
        for name in ("f", "g"):
            for args in ({"a": None, "b": None, "c": None}, {"a": "x", "b": "x", "c": [1, None]}):
                (result,) = await session.run([ParsedCall(name, args, "c")])
                assert result.text == json.dumps([args["a"], args["b"], args["c"]])
            (result,) = await session.run([ParsedCall(name, {"a": 1, "b": "y", "c": ["z"]}, "c")])
            assert result.status is Status.INVALID_ARGS


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"foo": 1}, "expected schema as .* got {'foo': 1}"),
        ({}, "expected schema as"),
        ({"type": "string"}, "expected an input schema of type 'object'; got type 'string'"),
        ({"type": "object", "properties": {"x": {"type": "strin"}}}, "invalid JSON Schema"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"foo": 1}}},
            "expected schema as",
        ),
        ({"type": "function", "function": 3}, "expected schema as"),
    ],
)
def test_schema_without_a_function_is_rejected_at_registration(schema, words):
    line = documented.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"test_function\.py:{line}: .*{words}"):
        function_tool(schema=schema)(documented)


def test_strict_reaches_the_model_where_the_schema_says_it():
    strict = {**SCHEMA, "function": {**SCHEMA["function"], "strict": True}}
    assert ensure_tool(function_tool(schema=strict)(lambda x: x)).spec()["function"]["strict"] is True
    assert "strict" not in ensure_tool(function_tool(schema=SCHEMA)(lambda x: x)).spec()["function"]


def undocumented(a: int) -> int:
    return a


def half(a: int, b: int) -> int:
    """Halve.

    Args:
        a: one.
    """
    return a + b


def chosen(a: str):
    """Choose.

    Args:
        a: one (choices: a, b)
    """


def untyped(a):
    """Say.

    Args:
        a: one.
    """


def many(*args: int):
    """Say."""


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (undocumented, DocstringParsingException, r"undocumented\(\) has no docstring"),
        (half, DocstringParsingException, r"the docstring does not describe 'b'; add under 'Args:' the line"),
        (chosen, DocstringParsingException, r"expected choices as a JSON list"),
        (untyped, TypeHintParsingException, r"untyped\(\): parameter 'a' has no type annotation"),
        (many, TypeHintParsingException, r"many\(\): a model cannot fill \*args"),
    ],
)
def test_a_mistake_is_transformers_error_and_a_type_error_at_the_place_of_the_function(
    function, kind, message
):
    line = function.__code__.co_firstlineno
    with pytest.raises(kind, match=rf"test_function\.py:{line}: .*{message}") as caught:
        function_tool(function)
    assert isinstance(caught.value, TypeError)


def test_a_decorator_on_something_else_says_so():
    with pytest.raises(TypeError, match="takes a function; got int"):
        function_tool("name")(3)
    with pytest.raises(TypeError, match="expected schema as a mapping, or an object with model_dump"):
        function_tool(schema=3)(documented)


def rated() -> tuple[str, int]:
    """Rate."""
    return "good", 1


VALUES = {
    "text": ("plain", "plain", None),
    "mapping": ({"a": "é"}, '{"a": "é"}', None),
    "a list": ([1, 2], "[1, 2]", None),
    "nothing": (None, "null", None),
    "a reward": (("x", 0.5), "x", 0.5),
    "a reward that is zero": (("x", 0.0, {"n": 1}), "x", 0.0),
    "no reward": (("x", None), "x", None),
    "a response": (ToolResponse(text="hello"), "hello", None),
    "a response with a reward": ((ToolResponse(text="hello"), 1, {}), "hello", 1.0),
}


async def answer(item: Any) -> ToolResult:
    async with Dispatcher([item]).session("t") as session:
        (result,) = await session.run([ParsedCall("f", {}, "c")])
    return result


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("schema", [None, {"type": "object"}, {"function": {"name": "f"}}], ids=str)
async def test_return_values_of_verl_functions_become_results(value, schema):
    returned, text, reward = VALUES[value]

    @function_tool(schema=schema)
    def f():
        """Say."""
        return returned

    result = await answer(f)
    assert (result.status, result.text, result.reward) == (Status.OK, text, reward)


@pytest.mark.parametrize("returned", [(), (1, 2, 3, 4), ("x", "y"), ("x", 1.0, 3)])
async def test_other_tuple_than_verls_is_a_crash(returned, caplog):
    @function_tool
    def f():
        """Say."""
        return returned

    assert (await answer(f)).status is Status.CRASH
    assert "a tool returned a tuple" in caplog.text or "of a tool's result" in caplog.text


@pytest.mark.parametrize("make", [tool, lambda function: function])
async def test_a_tuple_of_a_typed_function_is_a_json_list(make):
    def f(a: int = 17, b: int = 5) -> tuple[int, int]:
        """Divide."""
        return divmod(a, b)

    result = await answer(make(f))
    assert (result.text, result.reward) == ("[3, 2]", None)


async def test_return_value_is_read_equally_in_another_process():
    made = FunctionTool(rated, returns_verl=True)
    for each in (made, pickle.loads(pickle.dumps(made))):
        result = await each.run({}, ToolContext("c"))
        assert (result.text, result.reward) == ("good", 1.0)


FILE = '''
from __future__ import annotations
import dataclasses
from helper import borrowed
from torchrl_agentic.tools.verl import function_tool, ToolResponse
from torchrl_agentic import tool

@dataclasses.dataclass
class Point:
    x: int

@function_tool
def add(a: int, b: int | None = None) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + (b or 0)

@function_tool("say")
async def whatever(text: str) -> ToolResponse:
    """Say it.

    Args:
        text: what.
    """
    return ToolResponse(text=text), 0.5, {"n": add(1, 2)}

@tool
def place(at: Point) -> int:
    """Go somewhere."""
    return at.x

def hidden():
    @function_tool
    def inner() -> str:
        """Say."""
        return "inner"
hidden()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tools.py").write_text(FILE)
    (tmp_path / "helper.py").write_text(
        textwrap.dedent('''
        from torchrl_agentic import function_tool
        @function_tool
        def borrowed() -> str:
            """Borrow."""
            return "b"
        ''')
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path


async def test_a_file_gives_all_its_tools_and_those_it_imports(folder: Path):
    tools = load_function_tools(folder / "tools.py")
    assert {each.name for each in tools} == {"add", "say", "place", "inner", "borrowed"}
    async with Dispatcher(tools).session("t") as session:
        calls = [
            ("add", {"a": 1, "b": 2}),
            ("say", {"text": "hi"}),
            ("place", {"at": {"x": 4}}),
            ("inner", {}),
        ]
        results = await session.run([ParsedCall(name, args, name) for name, args in calls])
    assert [result.text for result in results] == ["3", "hi", "4", "inner"]
    assert (results[1].reward, results[1].metrics) == (0.5, {"n": 3})


def test_each_load_has_tools_of_its_own(folder: Path):
    first, second = (load_function_tools(folder / "tools.py") for _ in range(2))
    shared = {each.name for each in first if any(each is other for other in second)}
    assert shared == {"borrowed"}  # a module that is imported is there once


def test_tools_of_a_file_can_be_pickled(folder: Path, tmp_path: Path):
    (tmp_path / "pickled").write_bytes(pickle.dumps(load_function_tools(folder / "tools.py")))
    code = f"""
import asyncio, pickle, sys
sys.path.insert(0, {str(folder)!r})
from torchrl_agentic import ToolContext
tools = pickle.loads(open({str(tmp_path / "pickled")!r}, "rb").read())
print(asyncio.run(tools[0].run({{"a": 2, "b": 3}}, ToolContext("c"))), [tool.name for tool in tools])
"""
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("5 ['add', 'say'"), done.stderr


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import nothing_of_this_name", ImportError, r"t\.py:1: ModuleNotFoundError: No module named"),
        ("\n\n1 / 0", ImportError, r"t\.py:3: ZeroDivisionError"),
        ("x = (", ImportError, r"t\.py:1: SyntaxError"),
        ("raise SystemExit(3)", ImportError, r"t\.py:1: SystemExit: 3"),
        (
            "from torchrl_agentic import function_tool\n@function_tool\ndef f(a: int): return a",
            ImportError,
            r"^[^:]*t\.py:2: f\(\) has no docstring",
        ),
        (
            'from torchrl_agentic import tool\n@tool\ndef f():\n  "F."\n@tool(name="f")\ndef g():\n  "G."\n',
            ValueError,
            r"t\.py:5: the name 'f' is already registered to .*t\.py:2",
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_says_where(tmp_path: Path, text, error, message):
    (tmp_path / "t.py").write_text(text)
    before = set(sys.modules)
    with pytest.raises(error, match=message):
        load_function_tools(tmp_path / "t.py")
    left = {name for name in set(sys.modules) - before if name.startswith("torchrl_agentic_file")}
    assert len(left) == (error is ValueError)  # of two tools with one name: the file itself is sound


def test_missing_file_and_file_without_tools_are_reported(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.py: no such file"):
        load_function_tools(tmp_path / "nothing.py")
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.warns(UserWarning, match="no function in it is marked with @function_tool"):
        assert load_function_tools(tmp_path / "empty.py") == ()


def test_a_failed_load_leaves_nothing_to_the_next(tmp_path: Path):
    good = 'from torchrl_agentic import tool\n@tool\ndef f():\n  "F."\n'
    (tmp_path / "t.py").write_text(good + "1 / 0")
    with pytest.raises(ImportError):
        load_function_tools(tmp_path / "t.py")
    (tmp_path / "t.py").write_text(good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [each.name for each in load_function_tools(tmp_path / "t.py")] == ["f"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "expected 'package.module.Name' or 'file.py:Name'"),
        ("no_such_module.Name", "No module named 'no_such_module'"),
        ("json:nothing", "json has no attribute 'nothing'"),
        ("gone.py:f", "no file 'gone.py'"),
    ],
)
def test_dangling_reference_error_names_the_missing_part(tmp_path: Path, reference, message):
    with pytest.raises(ImportError, match=message):
        load_object(reference, tmp_path)


def test_references_lead_to_modules_and_files(tmp_path: Path):
    import json

    (tmp_path / "mine.py").write_text("class K: pass")
    assert load_object("json.loads") is json.loads
    assert load_object("json:loads") is json.loads
    assert load_object("mine.py:K", tmp_path).__name__ == "K"
    assert load_module(tmp_path / "mine.py") is not load_module(tmp_path / "mine.py")


async def test_a_context_fills_in_by_hand_too():
    found = await tool(look).run({"word": "w"}, ToolContext("c", trajectory="t", row=DATA))
    assert found[:4] == ["w", "42", 3, "t"]


def test_effects_and_hidden_parameters_survive_pickling():
    made = FunctionTool(look, name="see", effects=Effects.EXCLUSIVE)
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.name, copy.effects, copy.needs_row) == ("see", Effects.EXCLUSIVE, True)


def by_default(
    count: int = Field(5, ge=1, le=10, description="How many."),
    size: Annotated[int, "In metres.", Field(le=9)] = Field(ge=2),
    names: list[str] = Field(default_factory=list),  # noqa: B008
    kept: Annotated[int, Field(7)] = 8,
    stated: Annotated[int, Field(6)] = Field(le=7),
    row: Injected[str] = Field("none"),  # noqa: B008
) -> str:
    """Count.

    Args:
        count: Of the docstring.
        size: Of the docstring.
        names: Names.
        kept: Kept.
        stated: Stated.
    """
    return f"{count} {size} {names} {kept} {stated} {row}"


@pytest.mark.parametrize("make", [tool, lambda function: function_tool(function).__tool__])
async def test_a_field_as_default_is_merged_into_the_annotation(make):
    """Its bounds and description reach the model, its default the function; without one it is required."""
    item = make(by_default)
    shown = item.input_schema["properties"]
    assert item.input_schema["required"] == ["size"]
    assert [shown["count"][key] for key in ("minimum", "maximum")] == [1, 10]
    assert [shown["size"][key] for key in ("minimum", "maximum")] == [2, 9]
    assert "row" not in shown
    async with Dispatcher([item]).session("t") as session:
        answers = await session.run([
            ParsedCall("by_default", args, "c")
            for args in ({"size": 3}, {"size": 1}, {}, {"size": 3, "count": 11}, {"size": 3, "stated": 8})
        ])  # fmt: skip
    assert answers[0].text == "5 3 [] 8 6 none"
    assert [answer.status for answer in answers[1:]] == [Status.INVALID_ARGS] * 4


def test_descriptions_in_annotations_are_kept():
    def f(a: Annotated[int, "How many."], b: Annotated[str, Field(description="Which.")], c: int = 1):
        """F.

        Args:
            a: Of the docstring.
            c: Of the docstring.
        """

    shown = tool(f).input_schema["properties"]
    assert [shown[name]["description"] for name in "abc"] == ["How many.", "Which.", "Of the docstring."]


async def test_a_field_fills_in_its_default_where_a_schema_is_given():
    def f(a: int = Field(3)):
        return a

    item = FunctionTool(f, schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    async with Dispatcher([item]).session("t") as session:
        first, second = await session.run([ParsedCall("f", args, "c") for args in ({}, {"a": 4})])
    assert (first.text, second.text) == ("3", "4")


@pytest.mark.parametrize(
    "default",
    [
        annotated_types.Ge(1), Inject("a"), AfterValidator(int), WithJsonSchema({}), Strict(), int | None,
        Annotated[int, Field(ge=1)], dataclasses.field(default=1), StringConstraints(min_length=1), list[int],
        Field(1, alias="y"), Field(default_factory=lambda data: data), Field(validation_alias="y"),
    ],
    ids=lambda default: type(default).__name__,
)  # fmt: skip
def test_other_descriptions_of_a_parameter_are_no_defaults(default: Any):
    def f(x: int = default):
        """F."""

    with pytest.raises(TypeError, match=r"f\(\): parameter 'x'"):
        tool(f)
    with pytest.raises(TypeError, match=r"f\(\): parameter 'x'"):
        FunctionTool(f, schema={"type": "object"})


@pytest.mark.parametrize(
    "default",
    [None, object(), types.SimpleNamespace(), SecretStr("a"), print],
    ids=lambda default: type(default).__name__,
)
async def test_other_objects_are_defaults(default: Any):
    @tool
    def f(x: int = default) -> bool:
        """F."""
        return x is default

    async with Dispatcher([f]).session("t") as session:
        assert (await session.run([ParsedCall("f", {}, "c")]))[0].text == "true"


class Stay(BaseModel):
    begins: datetime.date
    ends: datetime.date
    nights: list[int] = []

    @field_validator("nights")
    @classmethod
    def _check(cls, nights: list[int]) -> list[int]:
        if 0 in nights:
            raise ValueError("no night is 0")
        return nights


DATE = {"type": "string", "format": "date"}
WHOLE = {"type": "object", "properties": {"begins": DATE, "ends": DATE, "nights": {"type": "array"}}}


class Books(Tool):
    name, description, input_schema = "book", "Book.", WHOLE

    async def run(self, args: Any, ctx: Any) -> str:
        return str(Stay(**args))


class BooksInside(Books):
    input_schema = {"type": "object", "properties": {"stay": WHOLE}}  # noqa: RUF012

    async def run(self, args: Any, ctx: Any) -> str:
        return str(Stay.model_validate(args["stay"]))


class BooksForVerl(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=str(Stay(**parameters))), 0.0, {}


class Broken(Books):
    async def run(self, args: Any, ctx: Any) -> str:
        return str(Stay(begins="of the tool", ends="of the tool"))  # pyright: ignore


def book(begins: datetime.date, ends: datetime.date, nights: list[int] | None = None) -> str:
    """Book.

    Args:
        begins: First.
        ends: Last.
        nights: Nights.
    """
    return f"{begins} {ends} {nights}"


def stays(stay: Stay) -> str:
    """Book."""
    return str(stay)


BOOK_SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {"type": "function", "function": {"name": "book", "description": "Book.", "parameters": WHOLE}}
)


@pytest.mark.parametrize(
    ("item", "place"),
    [
        (tool(book), ""), (function_tool(book), ""), (tool(stays, name="book"), "stay."), (Books(), ""),
        (BooksInside(), "stay."), (LifecycleTool(BooksForVerl({}, BOOK_SCHEMA)), ""),
        (Renamed(Books(), "book"), ""), (Truncated(tool(book), max_chars=1000), ""),
    ],
)  # fmt: skip
async def test_all_values_that_only_pydantic_refuses_are_named(item: Any, place: str):
    dates = {"begins": "2026-13-01", "ends": "31.12.2026"}
    good = {"begins": "2026-12-30", "ends": "2026-12-31"}
    async with Dispatcher([item]).session("t") as session:
        bad, fine = await session.run([
            ParsedCall("book", {"stay": args} if place else args, "c") for args in (dates, good)
        ])  # fmt: skip
    assert (bad.status, fine.status) == (Status.INVALID_ARGS, Status.OK)
    first, second = bad.text.removeprefix("Error: book: ").split("; ")
    assert re.fullmatch(rf"{place}begins: .*\(got 2026-13-01\)", first)
    assert re.fullmatch(rf"{place}ends: .*\(got 31.12.2026\)", second)


async def test_values_of_the_tool_itself_that_pydantic_refuses_are_a_crash():
    async with Dispatcher([Broken()]).session("t") as session:
        (result,) = await session.run([ParsedCall("book", {"begins": "2026-12-30"}, "c")])
    assert result.status is Status.CRASH


class Carrier:
    """An object that carries the signature of a function, as tau2's tools do."""

    def __init__(self, function: Any) -> None:
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.__signature__ = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def written(a: int, b: "list[int]", context: ToolContext) -> str:
    """Add."""
    return f"{a} {b} {context.call_id}"


async def test_an_object_with_the_signature_of_a_function_is_a_tool():
    item = tool(Carrier(written))
    assert item.input_schema == tool(written).input_schema
    async with Dispatcher([item]).session("t") as session:
        (result,) = await session.run([ParsedCall("written", {"a": 1, "b": [2]}, "c")])
    assert result.text == "1 [2] c"
