"""Values without quotes get the types of the tool's schema, also where they are written in Python."""

import json
from typing import Any

import pytest

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall, Status
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.tools.function import tool
from torchrl_agentic.tools.schema import Validator

WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=k>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=k>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">{}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "glm45": "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="k" string="false">{}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="k">{}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
}
PYTHON, ODD = ("python_literals",), ("odd_schema_type",)


def _call(format: str, text: str, schema: Any) -> ParsedCall:
    tools = None if schema is None else {"f": {"type": "object", "properties": {"k": schema}}}
    (call,) = get_parser(format).parse(WRITTEN[format].replace("{}", text), tools=tools).calls
    assert call.error is None
    return call


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize(
    ("text", "schema", "value", "notes"),
    [
        ("True", {"type": "boolean"}, True, PYTHON),
        ("False", {"type": "boolean"}, False, PYTHON),
        ("FALSE", {"type": ["boolean", "null"]}, False, PYTHON),
        ("true", {"type": "boolean"}, True, ()),
        ("None", {"type": ["integer", "null"]}, None, PYTHON),
        ("none", {"type": "integer", "nullable": True}, None, PYTHON),
        ("None", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, None, PYTHON),
        ("{'a': 1, 'b': [True, None]}", {"type": "object"}, {"a": 1, "b": [True, None]}, PYTHON),
        ("['a', \"it's\"]", {"type": "array"}, ["a", "it's"], PYTHON),
        ("(1, 2)", {"type": "array"}, [1, 2], PYTHON),
        ("[1, 2]", {"type": "array"}, [1, 2], ()),
        # no literal, or a type that the schema does not allow: the text, for validation to refuse
        ("True", {"type": "integer"}, "True", ()),
        ("None", {"type": "integer"}, "None", ()),
        ("yes", {"type": "boolean"}, "yes", ()),
        ("{'a': 1}", {"type": "array"}, "{'a': 1}", ()),
        ("{'a': f()}", {"type": "object"}, "{'a': f()}", ()),
        ("{'a': 1} and", {"type": "object"}, "{'a': 1} and", ()),
        ("dict(a=1)", {"type": "object"}, "dict(a=1)", ()),
        # where a string is allowed, or nothing is known, the text may be meant
        ("True", {"type": ["boolean", "string"]}, "True", ()),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", ()),
        ("True", {"type": "string"}, "True", ()),
        ("True", {}, "True", ()),
        ("True", None, "True", ()),
        ("{'a': 1}", None, "{'a': 1}", ()),
    ],
)
def test_python_literals_count_where_no_string_is_allowed(
    format: str, text: str, schema: Any, value: Any, notes: tuple[str, ...]
):
    call = _call(format, text, schema)
    assert repr(call.args["k"]) == repr(value)
    assert call.notes == notes


@pytest.mark.parametrize("format", ["qwen3_coder", "seed_oss", "minimax_m2", "glm45"])
@pytest.mark.parametrize(
    ("text", "kind", "value", "notes"),
    [
        ("3.5", "float", 3.5, ODD),
        ("7", "int", 7, ODD),
        ("7", "Integer", 7, ODD),
        ("7", "STRING", "7", ODD),
        ("7", "str", "7", ODD),
        ("true", "bool", True, ODD),
        ("True", "bool", True, (*ODD, *PYTHON)),
        ("[1]", "list[int]", [1], ODD),
        ("[1]", "tuple", [1], ODD),
        ('{"a": 1}', "dict", {"a": 1}, ODD),
        ('{"a": 1}', "Dict[str, int]", {"a": 1}, ODD),
        ("null", "NoneType", None, ODD),
        ("7", "any", 7, ODD),
        ("seven", "any", "seven", ODD),
        ("7", ["str", "null"], "7", ODD),
        ("7", ["any", "null"], 7, ODD),
        ("7", "number", 7, ()),
        ("7", "frobnicator", "7", ()),
    ],
)
def test_types_of_other_languages_mean_those_of_json_schema(
    format: str, text: str, kind: Any, value: Any, notes: tuple[str, ...]
):
    call = _call(format, text, {"type": kind})
    assert repr(call.args["k"]) == repr(value)
    assert call.notes == notes


def test_types_in_alternatives_and_behind_references_are_translated_too():
    assert _call("glm45", "1.5", {"anyOf": [{"type": "float"}, {"type": "NoneType"}]}).args == {"k": 1.5}
    tools = {"f": {"properties": {"k": {"$ref": "#/$defs/K"}}, "$defs": {"K": {"type": "float"}}}}
    (call,) = get_parser("glm45").parse(WRITTEN["glm45"].replace("{}", "1.5"), tools=tools).calls
    assert (call.args, call.notes) == ({"k": 1.5}, ODD)


STRANGE = {
    "type": "dict",
    "properties": {
        "price": {"type": "float"},
        "tags": {"type": "list", "items": {"type": "str"}},
        "options": {"type": "dict", "properties": {"deep": {"type": "bool"}}},
        "pair": {"type": "tuple"},
        "note": {"type": "any"},
        "maybe": {"type": ["int", "NoneType"]},
    },
    "required": ["price"],
}


def _order() -> Any:
    async def order(**args: Any) -> str:
        return json.dumps(args, sort_keys=True)

    return tool(order, schema=STRANGE)


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "glm45", "deepseek_v4"])
async def test_a_tool_with_types_of_another_language_gets_its_calls(format: str):
    args = {"price": 3.5, "tags": ["a"], "options": {"deep": True}, "pair": [1, 2], "note": 7, "maybe": None}
    parser, dispatcher = get_parser(format), Dispatcher([_order()])
    text = parser.render_call(ParsedCall("order", args, "c1"))
    (call,) = parser.parse(text, tools=dispatcher.schemas).calls
    async with dispatcher.session("t") as session:
        (result,) = await session.run([call])
    assert result.status is Status.OK
    assert json.loads(result.text) == args


async def test_such_a_tool_still_refuses_values_of_other_types():
    validator = Validator(STRANGE)
    for args in ({"price": "3.5"}, {"price": 1, "tags": [1]}, {"price": 1, "options": {"deep": "yes"}}):
        with pytest.raises(ValueError, match="is not of type"):
            validator.check(args)


def test_the_model_reads_standard_types():
    (spec,) = [_order().spec()]
    properties = spec["function"]["parameters"]["properties"]
    assert properties["price"] == {"type": "number"}
    assert properties["note"] == {}
    assert properties["maybe"] == {"type": ["integer", "null"]}


def test_a_structural_tag_has_standard_types():
    tag = get_parser("qwen3_coder").structural_tag([_order()])
    assert '"number"' in json.dumps(tag)
    assert '"float"' not in json.dumps(tag)


def test_last_value_of_a_repeated_argument_counts_and_is_noted():
    first, second = (f"<arg_key>k</arg_key><arg_value>{value}</arg_value>" for value in (1, 2))
    text = f"<tool_call>f\n{first}{second}</tool_call>"
    (call,) = get_parser("glm45").parse(text).calls
    assert (call.args, call.notes) == ({"k": 2}, ("duplicate_argument",))
