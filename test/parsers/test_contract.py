"""Every parser keeps the promises of `ParserContract`."""

import os
import subprocess
import sys

from hypothesis import strategies as st

from torchrl_agentic.parsers import (
    AnthropicToolUseParser,
    HermesParser,
    JSONToolCallParser,
    OpenAIToolCallParser,
    XMLToolCallParser,
    get_parser,
)
from torchrl_agentic.testing import ParserContract

CALL = '{"name": "f", "arguments": {"a": 1}}'
XML_CALL = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"


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


class TestQwen3Coder(ParserContract):
    parser = get_parser("qwen3_coder")
    markers = (
        "<tool_call>\n", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "\n</parameter>\n",
        "<tool_call>\n<function=f>\n<parameter=a>\n", "<parameter=", ">", XML_CALL,
    )  # fmt: skip


class TestSeedOSS(ParserContract):
    parser = get_parser("seed_oss")
    markers = ("<seed:tool_call>", "</seed:tool_call>", "<function=f>", "</function>", XML_CALL)


class TestMiniMaxM2(ParserContract):
    parser = get_parser("minimax_m2")
    markers = (
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", "</parameter>",
        '<parameter name="a">', "<invoke", "<parameter", '<invoke name="',
    )  # fmt: skip


class TestDeepSeekV32(ParserContract):
    parser = get_parser("deepseek_v32")
    markers = (
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">', '<｜DSML｜parameter name="a" string="false">',
        "</｜DSML｜parameter>",
    )  # fmt: skip


class TestDeepSeekV4(ParserContract):
    parser = get_parser("deepseek_v4")
    markers = (
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
    )


class TestGLM45(ParserContract):
    parser = get_parser("glm45")
    markers = (
        "<tool_call>f", "</tool_call>", "<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>",
        "<arg_key>a</arg_key>\n<arg_value>",
    )  # fmt: skip


class TestDeepSeekV3(ParserContract):
    parser = get_parser("deepseek_v3")
    markers = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>", "function", "f", "\n```json\n", "\n```",
    )  # fmt: skip


class TestDeepSeekV31(ParserContract):
    parser = get_parser("deepseek_v31")
    markers = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>", "f",
    )  # fmt: skip


class TestKimiK2(ParserContract):
    parser = get_parser("kimi_k2")
    markers = (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "functions.f:0",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip


class TestMistral(ParserContract):
    parser = get_parser("mistral")
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcdefghi", f"[{CALL}]", "f", "[TOOL_CALLS]f[ARGS]")


class TestLlama3JSON(ParserContract):
    parser = get_parser("llama3_json")
    at_line_start = True
    markers = (
        "<|python_tag|>", '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {', "; ",
        'f.call(query="x")', "\n",
    )  # fmt: skip


class TestGranite(ParserContract):
    parser = get_parser("granite")
    markers = ("<|tool_call|>", "<tool_call>", f"[{CALL}]", CALL)


class TestGranite20B(ParserContract):
    parser = get_parser("granite-20b-fc")
    markers = ("<function_call>", f"[{CALL}]", CALL)


class TestPhi4Mini(ParserContract):
    parser = get_parser("phi4_mini")
    markers = ("functools", f"[{CALL}]", CALL)


class TestPythonic(ParserContract):
    parser = get_parser("pythonic")
    at_line_start = True
    markers = (
        "<|python_start|>", "<|python_end|>", "\n[f(a='x')]", "[f(", "a=1", ")]", "'''", "\\'", ", ", "#",
    )  # fmt: skip


class TestOLMo3(ParserContract):
    parser = get_parser("olmo3")
    markers = ("<function_calls>", "</function_calls>", "f(a='x')", "f(", "a=1", ")", "'''", '"""')


class TestLFM2(ParserContract):
    parser = get_parser("lfm2")
    markers = ("<|tool_call_start|>", "<|tool_call_end|>", "[f(a='x')]", "[f(", "a=1", ")]", "'''", '"""')


class TestHarmony(ParserContract):
    parser = get_parser("harmony")
    markers = (
        "<|start|>assistant", "<|channel|>", "commentary", "analysis", " to=functions.f",
        " <|constrain|>json",
        "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>functions.f to=assistant", "{}",
    )  # fmt: skip


class TestTags(ParserContract):
    parser = get_parser("tags")
    markers = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
    calls = st.tuples(st.just("search"), st.fixed_dictionaries({"query": st.text(min_size=1)}))

    def example(self):
        return "search", {"query": "x" * 100}


class TestFence(ParserContract):
    parser = get_parser("fence")
    at_line_start = True
    markers = ("```python\n", "\n```", "\n```\n", "```py", "``", "`")
    calls = st.tuples(st.just("python"), st.fixed_dictionaries({"code": st.text(min_size=1)}))

    def example(self):
        return "python", {"code": "x" * 100}


class TestReAct(ParserContract):
    parser = get_parser("react")
    at_line_start = True
    markers = ("Action: f\n", "Action Input:", "Action Input: {}", "\nObservation:", "\nThought:", "Action:")


class TestHyV3(ParserContract):
    parser = get_parser("hy_v3")
    markers = (
        "<tool_calls>\n", "</tool_calls>", "<tool_call>f", "<tool_sep>", "</tool_call>", "<arg_value>",
        "<arg_key>a</arg_key>", "</arg_value>", "<tool_calls:opensource>",
        "<tool_call:opensource>f<tool_sep:opensource>",
        "</tool_call:opensource>", "<arg_key:opensource>a</arg_key:opensource>", "<arg_value:opensource>",
        "</arg_value:opensource>", "<think:opensource>", "</think:opensource>", "<｜hy_eos:opensource｜>",
    )  # fmt: skip
    malformed = (
        "<tool_calls></tool_calls>", "<tool_call>f<tool_sep><arg_key>a", "<tool_call:x>f<tool_sep:x>",
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>1</tool_call:opensource>",
    )  # fmt: skip


class TestHyV4(ParserContract):
    parser = get_parser("hy_v4")
    markers = (
        "<tool_calls>", "</tool_calls>", "<tool_call>f", "</tool_call>", "<arg_key>a</arg_key>",
        "<arg_value>", "</arg_value>", "<tool_calls:x>", "<tool_call:x>f",
        "</tool_call:x>", "<think:x>", "</think:x>",
    )  # fmt: skip
    malformed = ("<tool_calls></tool_calls>", "<tool_call>f<tool_sep></tool_call>", "<tool_call:x>f")


class TestMiniCPM5(ParserContract):
    parser = get_parser("minicpm5")
    markers = (
        '<function name="f">', "</function>", '<param name="a">', "</param>", "<![CDATA[", "]]>", "&lt;",
        "<function", "<param", ' name="', '<function name="f"><param name="a"><![CDATA[',
        "]]></param></function>",
    )  # fmt: skip
    malformed = (
        '<function name="f">x</function>', "<function name=f></function>", '<function name="f"><param>',
        '<function name="f"><param name="a"><![CDATA[</param></function>',
    )  # fmt: skip


class TestStep3(ParserContract):
    parser = get_parser("step3")
    markers = (
        "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "function",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>", '<steptml:invoke name="f">', "</steptml:invoke>", "</steptml:parameter>",
        '<steptml:parameter name="a">', "<steptml:invoke", "<｜tool_call_begin｜>function<｜tool_sep｜>",
    )  # fmt: skip
    malformed = (
        "<｜tool_calls_begin｜><｜tool_calls_end｜>", "<｜tool_call_begin｜><｜tool_call_end｜>",
        "<｜tool_call_begin｜>f{}<｜tool_call_end｜>", '<steptml:invoke name="f">',
    )  # fmt: skip


class TestPlamo3(ParserContract):
    parser = get_parser("plamo3")
    markers = (
        "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>",
        "<|plamo:begin_tool_request:plamo|>", "<|plamo:begin_tool_name:plamo|>f",
        "<|plamo:end_tool_name:plamo|>", "<|plamo:begin_tool_arguments:plamo|>", "<|plamo:constrain|>json",
        "<|plamo:msg|>", "{}", "<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>",
    )  # fmt: skip
    malformed = (
        "<|plamo:begin_tool_requests:plamo|>", "<|plamo:begin_tool_request:plamo|>f{}",
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>",
    )  # fmt: skip


class TestDots(ParserContract):
    parser = get_parser("dots")
    markers = (
        "<dots_function_call>", "</dots_function_call>", '<invoke name="f">', "</invoke>", "</parameter>",
        '<parameter name="a">', "<invoke", "<parameter", CALL, '{"name": "f"',
    )  # fmt: skip
    malformed = (
        "<dots_function_call>f</dots_function_call>", "<dots_function_call>{}</dots_function_call>",
        '<dots_function_call><invoke name="f">', '<dots_function_call>{"name": "f", "arguments": {"a": 1',
    )  # fmt: skip


class TestK2Horizon(ParserContract):
    parser = get_parser("k2_horizon")
    markers = (
        "<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>f", "</ifm|tool_call>", "<ifm|arg_value>",
        "<ifm|arg_key>a</ifm|arg_key>", "</ifm|arg_value>", "<ifm|arg_type>integer</ifm|arg_type>", CALL,
        "<ifm|arg_type>", "<ifm|think_fast>", "</ifm|think_fast>", "<ifm|think>", "</ifm|think>",
    )  # fmt: skip
    malformed = (
        "<ifm|tool_calls></ifm|tool_calls>", "<ifm|tool_call>{}</ifm|tool_call>", "<ifm|tool_call>f",
        "<ifm|tool_call>f<ifm|arg_key>a</ifm|arg_key><ifm|arg_type>x</ifm|tool_call>",
    )  # fmt: skip


def test_the_same_text_gives_the_same_calls_whatever_the_hash_seed():
    """Two processes with different seeds read one message in every format."""
    program = (
        "from torchrl_agentic.parsers import PARSERS, get_parser\n"
        'text = \'<tool_call>{"name": "f"}</tool_call> <search>x</search>\\n[f(a=1)]\\n[TOOL_CALLS]f{}\'\n'
        "for name in PARSERS:\n"
        "    print(name, get_parser(name).parse(text, tools={'f': {}, 'g': {}}, turn=1))\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "call_1_0" in outputs[0]
