"""A call does not run with a damaged end tag in the value of an argument, in any format with raw values."""

from typing import Any

import pytest
from helpers.read_message import read_message
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, get_parser
from torchrl_agentic.parsers.engine.xml_params import XMLParamsParser

RAW = [name for name in PARSERS if isinstance(get_parser(name), XMLParamsParser)]
WANTED = {"path": "first", "text": "second"}
STRING = {"type": "string"}
TOOLS = {"save": {"type": "object", "properties": {"path": STRING, "text": STRING}}}


def end_tag(name: str) -> str:
    """Return the end tag of the argument `path`."""
    parser: Any = get_parser(name)
    return parser.format.parameter_end or "]<]minimax[>[</path>"


def written(name: str, args: Any = None) -> str:
    return get_parser(name).render_calls([ParsedCall("save", args or WANTED, "call_0_0")])


def read(name: str, text: str, tools: Any = TOOLS) -> list[Any]:
    """Return the calls and the codes of errors of a message."""
    result = read_message(name, text, tools=tools, sizes=(1, 4, 50))
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]


@st.composite
def damages(draw: st.DrawFn, tag: str) -> str:
    """Return an end tag with one character dropped, repeated, added or replaced, cut off, or in capitals."""
    kind = draw(st.sampled_from(["drop", "repeat", "add", "replace", "cut", "capitals"]))
    at = draw(st.integers(1, len(tag) - 1))
    before, one, after = tag[:at], tag[at], tag[at + 1 :]
    if kind == "cut":
        return tag[: max(at, tag.rindex("<") + 4)]
    if kind == "capitals":
        return tag.upper()
    if kind == "replace" and one in "/<>":
        return f"{before}{after}"
    other = draw(st.sampled_from("1x_-=. \n/|"))
    return {
        "drop": f"{before}{after}",
        "repeat": f"{before}{one}{one}{after}",
        "add": f"{before}{other}{one}{after}",
        "replace": f"{before}{other}{after}",
    }[kind]


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(data=st.data())
def test_no_call_runs_with_a_damaged_end_tag_in_a_value(name: str, data: st.DataObject):
    tag = end_tag(name)
    damaged = data.draw(damages(tag))
    if damaged == tag:
        return
    which = data.draw(st.sampled_from([1, -1]), label="the first or the last argument")
    head, middle, tail = written(name).partition(tag) if which == 1 else written(name).rpartition(tag)
    assert middle
    following = written(name, {"path": "x", "text": "y"})
    for tools in (TOOLS, None):
        for text in (f"{head}{damaged}{tail}", f"{head}{damaged}{tail}\n{following}"):
            found = read(name, text, tools)
            runs = [call for call in found if not isinstance(call, str)]
            assert all(args in (WANTED, {"path": "x", "text": "y"}) for _, args in runs), damaged
            assert len(found) == 1 + (following in text), damaged


SPELLINGS = [
    "</parameter/>", "</parameter1>", "</parameter", "</param>", "</ parameter>", "<//parameter>",
    "</parameter_path>", "</parameter=path>", "</path>", "<parameter>", "</Parameter>", "</parameters>",
    "</parameter>>", "</parameter>.", "</parameter >", "</paramter>", "<\\/parameter>", "[/parameter]",
    "&lt;/parameter&gt;", "/parameter>", "</>", "</", "</parameter)", "</function>", "</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["qwen3_coder", "mimo"])
def test_a_damaged_end_tag_is_an_error_and_the_next_call_runs(name: str, spelling: str):
    text = written(name).replace("</parameter>", spelling, 1)
    good = ("save", WANTED)
    assert read(name, f"{text}\n{written(name)}") == ["unclosed", good]
    (call, _) = get_parser(name).parse(f"{text}\n{written(name)}", tools=TOOLS).calls
    assert call.error is not None
    assert "path has no </parameter>" in call.error.message
    assert (call.tool, read(name, text)) == ("save", ["unclosed"])


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("glm45", "</arg_value1>"), ("glm45", "</arg_key>"), ("glm45", "</value>"), ("glm45", "<arg_value>"),
        ("minimax_m2", "</parameter1>"), ("minicpm5", "</parameter>"), ("deepseek_v4", "</parameter>"),
        ("step3", "</parameter>"), ("kimi_k3", "</argument>"), ("kimi_k3", "<|close|>arg<|sep|>"),
        ("k2_horizon", "</arg_value>"), ("hy_v3", "</arg_value>"), ("minimax_m3", "</path>"),
    ],
)  # fmt: skip
def test_an_end_tag_of_another_dialect_is_an_error(name: str, spelling: str):
    (code,) = read(name, written(name).replace(end_tag(name), spelling, 1))
    assert code in ("unclosed", "extra_data")


@pytest.mark.parametrize("name", [name for name in RAW if name != "minimax_m3"])
def test_a_missing_end_tag_before_the_next_argument_is_still_repaired(name: str):
    (call,) = get_parser(name).parse(written(name).replace(end_tag(name), "", 1), tools=TOOLS).calls
    assert {key: str(value).strip() for key, value in call.args.items()} == WANTED
    assert call.notes == ("unclosed_parameter",)


VALUES = [
    "<launch>\n<param name='a' value='1'/>\n<param name='b'>2</param>\n</launch>",
    "<params><param>1</param></params>",
    "the end of an </param>",
    "write </parameter1> or </arg_value1>, not </parameter_path>",
    "<path>x</path>",
    "if a < b > c: print('</div>')  # </par",
    "<p>one</p>\n<p>two</p>",
    "a</>",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", RAW)
def test_tags_of_other_names_are_data(name: str, value: str):
    args = {"path": value, "text": value}
    assert read(name, written(name, args)) == [("save", args)]
    if name in ("qwen3_coder", "minimax_m2", "glm45"):  # elements of the value keep its missing end readable
        (call,) = get_parser(name).parse(written(name, args).replace(end_tag(name), "", 1), tools=TOOLS).calls
        is_complete = value.endswith(">") and not value.startswith(("the end", "a<", "write"))
        assert not is_complete or str(call.args["path"]).strip() == value


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo", "glm45", "minimax_m2"])
def test_a_value_that_would_be_read_as_damaged_cannot_be_written(name: str):
    parser: Any = get_parser(name)
    closer = parser.format.closer
    for inside in (f"{end_tag(name)[:-1]}1>\n{closer}", f"</path>\n{closer}"):
        with pytest.raises(ValueError, match="tags of the format"):
            parser.render_call(ParsedCall("save", {"path": f"a{inside}b"}, "call_0_0"))


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo"])
@pytest.mark.parametrize("broken", ["</function1>", "</Function>", "<parameter text>", "<param=text>"])
def test_a_damaged_tag_after_a_value_is_an_error(name: str, broken: str):
    text = "<tool_call><function=save><parameter=path>a</parameter>" + broken
    text += "<function=save><parameter=path>first</parameter><parameter=text>second</parameter></function>"
    assert read(name, f"{text}</tool_call>")[0] == "unclosed"


def test_a_damaged_end_of_the_name_of_an_argument_is_an_error():
    text = written("glm45").replace("</arg_key>", "</arg_key1>", 1)
    assert read("glm45", text) == ["unclosed"]


def test_damaged_end_of_a_cdata_block_is_an_error():
    value = "<param name='path'><![CDATA[a]]></param1><param name='text'><![CDATA[b]]></param>"
    assert read("minicpm5", f"<function name='save'>{value}</function>") == ["unclosed"]


def test_a_damaged_end_tag_before_the_next_plain_tag_is_an_error():
    assert read("tags", "<search>a</search1>\n<search>b</search>") == ["unclosed", ("search", {"query": "b"})]
    assert read("tags", "<search>a <b>c</b></search>") == [("search", {"query": "a <b>c</b>"})]
    with pytest.raises(ValueError, match="cannot contain"):
        get_parser("tags").render_call(ParsedCall("search", {"query": "a</search1><search>b"}, "1"))


@pytest.mark.parametrize(
    "part", ["</parameter1>", "<param></param><parameter=a>", "</param <parameter", "</"]
)
def test_many_damaged_tags_take_linear_time(part: str):
    for name in ("qwen3_coder", "mimo", "minimax_m2"):
        head, _, tail = written(name).partition("first")
        get_parser(name).parse(head + part * 8_000 + tail, tools=TOOLS)
