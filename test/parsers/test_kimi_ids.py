"""Ids of Kimi K2 that do not have the form of its guide, but name the tool."""

from typing import Any

import pytest
from helpers.read_message import read_message

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.parsers import get_parser

TOOLS = {"search": {"type": "object", "properties": {"q": {"type": "string"}}}}


def block(ident: str) -> str:
    return f'<|tool_call_begin|>{ident}<|tool_call_argument_begin|>{{"q": "x"}}<|tool_call_end|>'


def section(*idents: str) -> str:
    calls = "".join(map(block, idents))
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("ident", ["functions.search:7", "search:7", " functions.search:7\n"])
def test_an_id_with_a_number_is_kept(ident: str, knows: bool):
    (call,) = read_message("kimi_k2", section(ident), tools=TOOLS if knows else None).calls
    assert (call.tool, call.args, call.call_id, call.notes) == ("search", {"q": "x"}, ident.strip(), ())


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    "ident",
    [
        "functions.search",
        "functions.search:",
        "functions.search:x",
        "functions.search:0:1",
        " functions.search ",
    ],
)
def test_an_id_that_begins_with_functions_names_the_tool(ident: str, knows: bool):
    found = read_message("kimi_k2", section(ident, "search:1"), tools=TOOLS if knows else None).calls
    assert [(call.tool, call.args, call.call_id, call.notes) for call in found] == [
        ("search", {"q": "x"}, "call_0_0", ("odd_id",)),
        ("search", {"q": "x"}, "search:1", ()),
    ]


@pytest.mark.parametrize("ident", ["search", "search:", "search:one"])
def test_an_id_without_prefix_and_number_is_read_if_it_is_the_name_of_a_known_tool(ident: str):
    (call,) = read_message("kimi_k2", section(ident), tools=TOOLS).calls
    assert (call.tool, call.args, call.error, call.notes) == ("search", {"q": "x"}, None, ("odd_id",))
    unknown: list[Any] = [None, {}, {"other": {}}]
    for tools in unknown:
        (call,) = read_message("kimi_k2", section(ident), tools=tools).calls
        assert (call.tool, call.error and call.error.code) == ("", "bad_id")


@pytest.mark.parametrize(
    "ident", ["", ":0", "functions.", "functions.:0", "call_4f1a", "call_4f1a:x", "a b:0"]
)
def test_an_id_that_names_no_tool_is_an_error_and_the_next_call_runs(ident: str):
    found = read_message("kimi_k2", section(ident, "search:1"), tools=TOOLS).calls
    assert [call.error and call.error.code for call in found] == ["bad_id", None]


def test_the_result_of_a_call_with_an_odd_id_has_an_id_in_the_form_of_the_format():
    parser = get_parser("kimi_k2")
    calls = parser.parse(section("functions.search:0", "functions.search")).calls
    messages = parser.render(calls, [ToolResult.from_text("one"), ToolResult.from_text("two")])
    assert [one["tool_call_id"] for one in messages] == ["functions.search:0", "functions.search:1"]


def test_broken_arguments_behind_an_odd_id_name_the_tool_in_their_error():
    text = section("functions.search").replace('"x"', "oops")
    (call,) = read_message("kimi_k2", text, tools=TOOLS).calls
    assert (call.tool, call.error and call.error.code) == ("search", "invalid_json")
