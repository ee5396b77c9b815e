"""Every parser keeps the promises of `ParserContract`."""

from torchrl_agentic.parsers import (
    AnthropicToolUseParser,
    HermesParser,
    JSONToolCallParser,
    OpenAIToolCallParser,
    XMLToolCallParser,
)
from torchrl_agentic.testing import ParserContract


class TestHermes(ParserContract):
    parser = HermesParser()
    markers = (
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f"}',
        "<tool_call>\n",
    )
    malformed = (
        "<tool_call>{oops</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "on',
        '<tool_call>{"name": "f"} {"name": "g"}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 201 + "]" * 201 + "}}</tool_call>",
    )


class TestXML(ParserContract):
    parser = XMLToolCallParser()
    markers = (
        '<tool name="f">',
        "</tool>",
        "<tool name='f' tag='A'>",
        '<tool name="f"/>',
        '{"a": 1}',
        "<tool ",
        "&quot;",
    )
    malformed = (
        '<tool name="f">{oops</tool>',
        '<tool name="f">[1]</tool>',
        '<tool name="f">',
        '<tool tag="A">{}</tool>',
        '<tool name="f">{"a": 1}',
        '<tool name="f">{"a": 1} and more</tool>',
        '<tool name="f',
        "<tool>{}</tool>",
    )


class TestJSON(ParserContract):
    parser = JSONToolCallParser()
    in_text = False
    markers = ('{"message": "", "tools": [', '{"tool": "f", "args": {}}', "]}", "```json\n", "```")
    malformed = (
        '{"tools": [{"tool": "f"',
        '{"tools": [3]}',
        '{"message": null, "tools": [{"args": {}}]}',
        '{"tools": [{"tool": "f", "args": 5}]}',
        '{"tools": "f"}',
        {"tools": [None]},
    )


class TestOpenAI(ParserContract):
    parser = OpenAIToolCallParser()
    in_text = False
    malformed = (
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{oops"}}]},
        {"tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]},
        {"tool_calls": [3]},
        {"tool_calls": [{"name": "f", "arguments": [1]}]},
        {"function_call": {"arguments": "{}"}},
        {"choices": [{"message": {"tool_calls": ["x"]}}]},
    )


class TestAnthropic(ParserContract):
    parser = AnthropicToolUseParser()
    in_text = False
    malformed = (
        {"content": [{"type": "tool_use", "id": "1", "input": {}}]},
        {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": [1]}]},
        {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": "{oops"}]},
    )
