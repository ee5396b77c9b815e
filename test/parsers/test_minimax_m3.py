"""MiniMax M3: elements named after arguments, nested like values, a namespace token before each tag."""

import pytest

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallFailed, CallReady, TextDelta, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

N = "]<]minimax[>["
M3 = get_parser("minimax_m3")
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer"},
        "dry_run": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
        "point": {"$ref": "#/$defs/point"},
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "filter": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"$ref": "#/$defs/point"}]},
        "limit": {
            "oneOf": [{"type": "integer"}, {"type": "object", "properties": {"max": {"type": "number"}}}]
        },
        "box": {"type": "object", "properties": {"item": {"type": "string"}}},
        "maybe": {"type": ["string", "null"]},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "number"}, "label": {"type": "string"}}}
    },
}
TOOLS = {"edit": SCHEMA, "stop": {"type": "object", "properties": {}}}


def element(name: str, *inner: str) -> str:
    return f"{N}<{name}>{''.join(inner)}{N}</{name}>"


def invoke(*elements: str, name: str = "edit") -> str:
    return f'{N}<invoke name="{name}">{"".join(elements)}{N}</invoke>'


def section(*calls: str) -> str:
    return "\n".join([f"{N}<tool_call>", *calls, f"{N}</tool_call>"])


def items(*values: str) -> str:
    return "".join(element("item", value) for value in values)


def read(text: str, tools=TOOLS):
    """Return the calls and the text of a message, read as a whole and a character at a time."""
    result = M3.parse(text, tools=tools)
    stream = M3.stream(tools=tools)
    for character in text:
        stream.feed(character)
    assert stream.close() == result
    return [call.error.code if call.error else (call.tool, call.args) for call in result.calls], result


@pytest.mark.parametrize(
    ("elements", "args"),
    [
        ("", {}),
        (element("path", "a.py") + element("lines", "12"), {"path": "a.py", "lines": 12}),
        (element("dry_run", "true") + "\n" + element("lines", " -3 "), {"dry_run": True, "lines": -3}),
        (element("path", '\n  <b>12</b> & "c" </path>\n'), {"path": '\n  <b>12</b> & "c" </path>\n'}),
        (element("path", "12"), {"path": "12"}),
        (element("path", "null") + element("maybe", "null"), {"path": "null", "maybe": None}),
        (element("maybe", "none"), {"maybe": "none"}),
        (element("path"), {"path": ""}),
        (element("names") + element("point") + element("filter"), {"names": [], "point": {}, "filter": []}),
        (element("names", items("12", "b")), {"names": ["12", "b"]}),
        (element("names", "\n", items("b"), "\n"), {"names": ["b"]}),
        (element("pair", items("1", "2")), {"pair": ["1", 2]}),
        (element("point", element("x", "1.5"), element("label", "7")), {"point": {"x": 1.5, "label": "7"}}),
        (
            element("points", items(element("label", "1"), element("x", "2"))),
            {"points": [{"label": "1"}, {"x": 2}]},
        ),
        (element("filter", items("1")), {"filter": ["1"]}),
        (element("filter", element("label", "1")), {"filter": {"label": "1"}}),
        (element("limit", "5"), {"limit": 5}),
        (element("limit", element("max", "5")), {"limit": {"max": 5}}),
        (element("box", items("1")), {"box": {"item": "1"}}),
        (element("env", element("PORT", "80")), {"env": {"PORT": "80"}}),
        (element("unknown", items("1", element("tool_call", "x"))), {"unknown": [1, {"tool_call": "x"}]}),
        (element("unknown", element("k", "v")), {"unknown": {"k": "v"}}),
        (
            element("point", element("invoke", "x"), element("a b", "y")),
            {"point": {"invoke": "x", "a b": "y"}},
        ),
    ],
)
def test_values_follow_the_schema_at_any_depth(elements, args):
    found, result = read(section(invoke(elements)))
    assert repr(found) == repr([("edit", args)])
    assert result.text == ""
    assert result.calls[0].notes == ()


def test_names_that_are_repeated_are_a_list_and_that_is_noted():
    found, result = read(section(invoke(element("env", element("k", "1"), element("k", "2")))))
    assert found == [("edit", {"env": {"k": ["1", "2"]}})]
    assert result.calls[0].notes == ("repeated_element",)


def test_without_a_schema_items_are_a_list_and_text_is_json_if_it_can_be():
    found, _ = read(section(invoke(element("a", items("1", "x")), element("b", "[1]"))), tools=None)
    assert found == [("edit", {"a": [1, "x"], "b": [1]})]


def test_several_calls_in_one_section_or_more_and_text_around():
    one, two = invoke(element("lines", "1")), invoke(element("lines", "2"))
    found, result = read(f"First this.{section(one, two)} and {section(invoke(name='stop'))}Bye.[e~[\n")
    assert found == [("edit", {"lines": 1}), ("edit", {"lines": 2}), ("stop", {})]
    assert result.text == "First this.\n and Bye.[e~[\n"
    assert read(f"So: {one}{two}")[0] == found[:2]


def test_call_in_reasoning_is_a_draft():
    call = section(invoke(element("lines", "1")))
    found, result = read(f"<mm:think>maybe {call} no</mm:think>Done.")
    assert (found, result.reasoning) == ([], f"maybe {call} no")
    assert result.notes == ("call_in_reasoning",)
    assert (
        read(f"<mm:think>so</mm:think>{call}")[0] == read(f"</mm:think>{call}")[0] == [("edit", {"lines": 1})]
    )


GOOD, RAN = invoke(element("lines", "1")), ("edit", {"lines": 1})
TURN = f"[e~[\n]~b]user\n{section(GOOD)}"


@pytest.mark.parametrize(
    ("text", "expected", "said"),
    [
        (f"{N}<tool_call>", ["unclosed"], "ends inside"),
        (section(), ["empty"], "nothing between"),
        (section('{"name": "edit"}'), ["wrong_dialect"], "not a call of this format"),
        (f'{N}<invoke name="edit', ["unclosed"], "no end"),
        (section(f"{N}<invoke>{N}</invoke>"), ["missing_name"], "no name"),
        (f'{N}<invoke name="edit">', ["unclosed"], "invoke is not closed"),
        (f'{N}<invoke name="edit">{N}<path>a', ["unclosed"], "path is not closed"),
        (f'{N}<invoke name="edit">{N}<path>a{N}', ["unclosed"], "path is not closed"),
        (f'{N}<invoke name="edit">{N}<pa', ["unclosed"], "invoke is not closed"),
        (section(invoke(f"{N}<path>a"), GOOD), ["unclosed", RAN], "path is not closed"),
        (f'{N}<tool_call>{N}<invoke name="edit">{N}<path>a{GOOD}', ["unclosed", RAN], "path is not"),
        (section(f'{N}<invoke name="edit">', GOOD), ["unclosed", RAN], "invoke is not"),
        (f'{N}<tool_call>{N}<invoke name="edit">{section(GOOD)}', ["unclosed", RAN], "not"),
        (f'{N}<invoke name="edit">{N}<path>a{TURN}', ["unclosed"], "path is not closed"),
        (section(invoke(element("path", "a") + "junk"), GOOD), ["extra_data", RAN], "not text"),
        (section(invoke(f"{N}<path>a{N}</lines>")), ["extra_data"], f"expecting {N}</path>"),
        (section(invoke(element("point", "x", element("x", "1")))), ["extra_data"], f"expecting {N}</point>"),
        (section(invoke(element("point", element("x", "1"), "x"))), ["extra_data"], "not text"),
        (section(invoke(element("names", element("name", "x")))), ["bad_arguments"], "a list of <item>"),
        (section(invoke(f"{N} <path>a")), ["extra_data"], f"expecting {N}</invoke>"),
        (section(invoke(f"{N}<path" + "x" * 300 + ">a")), ["extra_data"], f"expecting {N}</invoke>"),
        (section(invoke(f"{N}<a>" * 300)), ["too_deep"], "deeper than 200"),
    ],
)  # fmt: skip
def test_malformed_call_is_an_error_and_other_calls_run(text, expected, said):
    found, result = read(text)
    assert found == expected
    message = result.calls[0].error.message
    assert said in message
    assert len(message) <= 500


@pytest.mark.parametrize("space", [" ", "\n"])
def test_white_space_between_token_and_tag_is_an_error(space):
    call = f"{section(GOOD)}".replace(N, f"{N}{space}")
    found, result = read(f"So {call}")
    assert (found, result.text) == (["extra_data"], "So ")
    assert "remove the white space" in result.calls[0].error.message
    assert read(f"So {call} {section(GOOD)}")[0] == ["extra_data", RAN]
    assert read(f"The token is {N}{space}a.")[0] == read(f"{N}{space}")[0] == []
    stream = M3.stream()
    events = [event for character in f"<mm:think>hm {call}" for event in stream.feed(character)]
    assert "".join(event.text for event in events) == "<mm:think>hm "
    assert len(stream.close().calls) == 1


def test_element_with_the_prefix_of_a_call_is_not_a_call():
    assert read(f"{N}<invoke_id>5{N}</invoke_id>")[0] == []


def test_events_are_sent_as_soon_as_they_are_certain():
    stream = M3.stream(tools=TOOLS)
    assert stream.feed("Hi.") == []
    assert stream.feed(f"{N}<tool_call>\n{GOOD[:-1]}") == [TextDelta("Hi.")]
    (ready,) = stream.feed(">")
    assert isinstance(ready, CallReady)
    assert ready.call.args == {"lines": 1}
    text, failed = stream.feed(f"\n{invoke(element('path', 'a') + 'junk')}")
    assert text == TextDelta("\n")
    assert isinstance(failed, CallFailed)
    assert len(stream.close().calls) == 2


@pytest.mark.parametrize(
    "args",
    [
        {"a b": "x"},
        {"text": "a\n</k> <k> ]<]", "list": [], "object": {}, "none": None, "number": 1.0},
        {"list": ["x", "", None, True, 2, [["y"]], {"k": "v"}], "object": {"k": [1], "tool_call_id": "x"}},
    ],
)
def test_rendered_calls_parse_back(args):
    kinds = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    schema = {"type": "object", "properties": {key: {"type": kinds[type(args[key])]} for key in args}}
    text = M3.render_calls([ParsedCall("f", args, "c"), ParsedCall("g", {}, "d")])
    assert repr(read(text, {"f": schema, "g": {}})[0]) == repr([("f", args), ("g", {})])


@pytest.mark.parametrize(
    "args",
    [
        {"": 1}, {"a>": 1}, {" a": 1}, {"/a": 1}, {"invoke": 1}, {"invoke x": 1}, {"a": {"<": 1}},
        {"a": f"x{N}"}, {"a": ["[e~["]}, {"a": ["12"]}, {"a": {"k": "true"}}, {"a": [[]]}, {"a": {"k": {}}},
        {"a": {"item": 1}}, {"a": [{"item": 1}]},
    ],
)  # fmt: skip
def test_ambiguous_calls_are_not_rendered(args):
    with pytest.raises(ValueError, match="format"):
        M3.render_call(ParsedCall("f", args, "c"))


def test_a_grammar_describes_the_calls():
    (section,) = M3.structural_tag({"f": {}})["format"]["tags"]
    (call,) = section["content"]["tags"]
    assert (call["begin"], call["content"]["style"]) == (f'{N}<invoke name="f">', "minimax_m3_xml")


def test_results_are_messages_of_tools():
    (message,) = M3.render([ParsedCall("f", {}, "c")], [ToolResult.from_text(f"a</response>{N}<mm:think>")])
    assert (message["role"], message["tool_call_id"]) == ("tool", "c")
    assert not any(marker in message["content"] for marker in ("</response>", N, "<mm:think>"))


TEMPLATE = """\
{%- set ns = "]<]minimax[>[" -%}
{%- macro value(v) -%}
{%- if v is mapping -%}
{%- for k, x in v.items() -%}{{ ns }}<{{ k }}>{{ value(x) }}{{ ns }}</{{ k }}>{%- endfor -%}
{%- elif v is string -%}{{ v }}
{%- elif v is iterable -%}{%- for x in v -%}{{ ns }}<item>{{ value(x) }}{{ ns }}</item>{%- endfor -%}
{%- else -%}{{ v | tojson }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{{ "]~b]tool\n<response>" ~ m.content ~ "</response>[e~[\n" }}
{%- else -%}
{{ "]~b]" ~ m.role ~ "\n" ~ m.content }}
{%- if m.tool_calls -%}
{{ "</mm:think>" ~ ns ~ "<tool_call>\n" }}
{%- for c in m.tool_calls -%}
{{ ns ~ '<invoke name="' ~ c.function.name ~ '">' }}{{ value(c.function.arguments) }}{{ ns ~ "</invoke>\n" }}
{%- endfor -%}
{{ ns ~ "</tool_call>" }}
{%- endif -%}
{{ "[e~[\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "]~b]ai\n" ~ ("<mm:think>" if thinking) }}{%- endif -%}
"""


def test_auto_detects_its_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open, parser.result_role) == ("minimax_m3", False, "tool")
    assert get_parser("auto", tokenizer=tokenizer, thinking=True).reasoning_open
    tool = {
        "type": "object",
        "properties": {"l": {"type": "array", "items": {"type": "string"}}, **SCHEMA["properties"]},
    }
    del tool["properties"]["point"], tool["properties"]["points"], tool["properties"]["filter"]
    assert check_parser(parser, {"edit": tool}, tokenizer, parsers=PARSERS) == ["edit"]
