"""Every parser keeps the promises of `ParserContract`."""

import os
import sys

from helpers.processes import run_program
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
    markers = (
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "abcdefghi",
        f"[{CALL}]",
        "f",
        "[TOOL_CALLS]f[ARGS]",
        "[THINK]",
        "[/THINK]",
    )


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
    markers = (
        "<|tool_call_start|>", "<|tool_call_end|>", "[f(a='x')]", "[f(", "a=1", ")]", "'''", '"""',
        "<|tool_call_start|>[f(a='it's')]<|tool_call_end|>", "a='", "', a=", "<|im_end|>",
        '[{"name": "f", "arguments": {}}]',
    )  # fmt: skip
    malformed = (
        "<|tool_call_start|>[f(a='x\ny', 'z', b=y)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a='x 'y', b='z'')]<|tool_call_end|>",
        "<|tool_call_start|>[f(a='it's')]",
        '<|tool_call_start|>[{"name": "f"}<|tool_call_end|>',
        '<|tool_call_start|>{"a": 1}<|tool_call_end|>',
    )


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


class TestGemma4(ParserContract):
    parser = get_parser("gemma4")
    markers = (
        "<|tool_call>", "<tool_call|>", "<|tool_call>call:f{", "call:f", "{a:", '<|"|>', ",b:1.5", "[",
        "true}", "None", "a=", "{{a:", "}}", "<|channel>thought\n", "<|channel>", "<channel|>",
        "<|tool_response>", "<tool_response|>", "<turn|>",
    )  # fmt: skip
    malformed = (
        "<|tool_call>",
        "<|tool_call><tool_call|>",
        "<|tool_call>call:",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call:f<tool_call|>",
        "<|tool_call>call:f g{}<tool_call|>",
        "<|tool_call>call:f(a:1)<tool_call|>",
        "<|tool_call>f{a:1}<tool_call|>",
        '<|tool_call>{"name": "f", "arguments": {}}<tool_call|>',
        '<|tool_call>call:f{"a": "x" y}<tool_call|>',
        "<|tool_call>call:f{a:1",
        "<|tool_call>call:f{a:1<tool_call|>",
        "<|tool_call>call:f{a:1}} <tool_call|>",
        "<|tool_call>call:f{a:1,}<tool_call|>",
        "<|tool_call>call:f{a:[1,]}<tool_call|>",
        "<|tool_call>call:f{,a:1}<tool_call|>",
        "<|tool_call>call:f{a}<tool_call|>",
        "<|tool_call>call:f{:1}<tool_call|>",
        "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>call:f{a:word}<tool_call|>",
        "<|tool_call>call:f{a:007}<tool_call|>",
        "<|tool_call>call:f{a:1e999}<tool_call|>",
        "<|tool_call>call:f{a:NaN}<tool_call|>",
        "<|tool_call>call:f{a:" + "1" * 5000 + "}<tool_call|>",
        "<|tool_call>call:f{a:[1}<tool_call|>",
        "<|tool_call>call:f{a:{b:1]}<tool_call|>",
        '<|tool_call>call:f{a:<|"|>text<tool_call|>',
        '<|tool_call>call:f{a:<|"|>one<|"|> <|"|>two<|"|>}<tool_call|>',
        "<|tool_call>call:f{a:" + "[" * 100_000,
        "<|tool_call>call:f{a:" + "[" * 201 + "]" * 201 + "}<tool_call|>",
        "<|tool_call>call:f{a:1} and more<tool_call|>",
    )


class TestFunctionGemma(ParserContract):
    parser = get_parser("functiongemma")
    markers = (
        "<start_function_call>", "<end_function_call>", "call:f", "{a:", "<escape>", "}", "<end_of_turn>",
        "<start_function_response>", "<end_function_response>",
    )  # fmt: skip
    malformed = (
        "<start_function_call>call:f{a:<escape>text",
        "<start_function_call>call:f{a:text}<end_function_call>",
        '<start_function_call>call:f{a:<|"|>text<|"|>}<end_function_call>',
    )


class TestKimiK3(ParserContract):
    parser = get_parser("kimi_k3")
    markers = (
        "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", '<|open|>call tool="f" index="1"<|sep|>', "<|sep|>",
        "<|close|>call<|sep|>", '<|open|>argument key="a" type="string"<|sep|>', "<|close|>argument<|sep|>",
        '<|open|>argument key="a" type="number"<|sep|>1', "<|open|>json<|sep|>", "<|close|>json<|sep|>",
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|end_of_msg|>", '<|open|>message role="tool"',
        "<|open|>", "<|close|>",
    )  # fmt: skip
    malformed = (
        "<|open|>tools<|sep|>",
        "<|open|>tools<|sep|><|close|>tools<|sep|>",
        "<|open|>call",
        "<|open|>call<|sep|><|close|>call<|sep|>",
        '<|open|>call index="1"<|sep|><|close|>call<|sep|>',
        '<|open|>call tool="" index="1"<|sep|><|close|>call<|sep|>',
        '<|open|>call tool="f" index=1<|sep|><|close|>call<|sep|>',
        '<|open|>call tool="f"<|sep|>',
        '<|open|>call tool="f"<|sep|>text<|close|>call<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>argument key="a"<|sep|>1<|close|>call<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>argument type="string"<|sep|>1<|close|>argument<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{oops}<|close|>json<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>json<|sep|>[1]<|close|>json<|sep|><|close|>call<|sep|>',
        '<|open|>call tool="f"<|sep|><|open|>json<|sep|>{"a": 1}<|close|>json<|sep|>',
    )


class TestInkling(ParserContract):
    parser = get_parser("inkling")
    markers = (
        "<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>", "f", "<|content_thinking|>",
        '{"name": "f", "args": {}}', "<|content_text|>", "<|content_model_end_sampling|>", "<|message_tool|>",
        "<|message_user|>", "<|content_invoke_tool_text|>", "<|message_model|>f",
    )  # fmt: skip
    malformed = (
        "<|content_invoke_tool_json|>",
        "<|content_invoke_tool_json|><|end_message|>",
        "<|message_model|>f<|content_invoke_tool_json|>{oops<|end_message|>",
        '<|content_invoke_tool_json|>{"name": "", "args": {}}<|end_message|>',
        '<|content_invoke_tool_json|>{"name": "f", "args": [1]}<|end_message|>',
        '<|content_invoke_tool_json|>{"name": "f", "args": {"a": NaN}}<|end_message|>',
        '<|content_invoke_tool_json|>{"name": "f", "args": {"a": "x"',
        '<|content_invoke_tool_json|>{"name": "f", "args": {}} more<|end_message|>',
        "<|message_model|>f<|content_invoke_tool_text|>do it<|end_message|>",
    )


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


def test_calls_do_not_depend_on_the_hash_seed():
    """Two processes with different seeds read one message in every format."""
    program = (
        "from torchrl_agentic.parsers import PARSERS, get_parser\n"
        'text = \'<tool_call>{"name": "f"}</tool_call> <search>x</search>\\n[f(a=1)]\\n[TOOL_CALLS]f{}\'\n'
        "for name in PARSERS:\n"
        "    print(name, get_parser(name).parse(text, tools={'f': {}, 'g': {}}, turn=1))\n"
    )
    outputs = [
        run_program(
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


class TestMiMo(ParserContract):
    parser = get_parser("mimo")
    markers = (
        "<tool_call>\n", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>\n",
        "<tool_call>\n<function=f>\n<parameter=a>", "<parameter=", ">", "\n\n", XML_CALL,
    )  # fmt: skip
    malformed = ("<tool_call>\n<function=f>\n<parameter=a>1", "<tool_call>{}</tool_call>")


LIST = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'


class TestJamba(ParserContract):
    parser = get_parser("jamba")
    markers = ("<tool_calls>", "</tool_calls>", "<tool_calls>\n", LIST, CALL, "[]", "<|eom|>", ", ")
    malformed = (
        "<tool_calls>", "<tool_calls>[", "<tool_calls>[]</tool_calls>", "<tool_calls></tool_calls>",
        "<tool_calls>[3]</tool_calls>", f"<tool_calls>{LIST} and</tool_calls>", f"<tool_calls>{LIST[:-1]}",
        '<tool_calls>[{"name": "f", "arguments": [1]}]</tool_calls>', "<tool_calls>" + "[" * 100_000,
    )  # fmt: skip


class TestApriel(ParserContract):
    parser = get_parser("apriel")
    markers = (
        "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]\n", "[END FINAL RESPONSE]", "<tool_calls>",
        "</tool_calls>", LIST, "<|end|>",
    )  # fmt: skip
    malformed = ("[BEGIN FINAL RESPONSE]\n<tool_calls>[{}]</tool_calls>",)


class TestHunyuanA13B(ParserContract):
    parser = get_parser("hunyuan_a13b")
    markers = (
        "<answer>", "</answer>", "<tool_calls>", "</tool_calls>", LIST, "<|eos|>", "<tool_response>",
        "</tool_response>",
    )  # fmt: skip
    malformed = ("<answer><tool_calls>[{}]</tool_calls></answer>",)


class TestNemotronNanoV2(ParserContract):
    parser = get_parser("nemotron_nano_v2")
    markers = (
        "<TOOLCALL>", "</TOOLCALL>", LIST, CALL, "<SPECIAL_12>", "<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>",
    )  # fmt: skip
    malformed = ("<TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[{}</TOOLCALL>", f"<TOOLCALL>{LIST[1:]}")


class TestXLAM(ParserContract):
    parser = get_parser("xlam")
    at_line_start = True
    markers = (
        LIST, CALL, "[", '[{"name"', '[{"name": "f", ', "[TOOL_CALLS]", "[TOOL", "<tool_call>",
        "</tool_call>", "```json\n", "[]", "<|im_end|>", '[{"arguments": {}, "name": "f"}',
        '[{"function": {"name": "f"}}]',
    )  # fmt: skip
    malformed = (
        LIST[:-1], "[TOOL_CALLS]", "[TOOL_CALLS][3]", "<tool_call>oops</tool_call>", "<tool_call>[",
        '[{"name": "f", "arguments": [1]}]', '[{"name": "f", "arguments": {"a": NaN}}]',
        '[{"name": "f", "arguments": ' + "[" * 100_000,
    )  # fmt: skip


class TestLongCat(ParserContract):
    parser = get_parser("longcat")
    markers = (
        "<longcat_tool_call>", "</longcat_tool_call>", "<longcat_tool_call>\n", CALL, "<longcat_think>",
        "</longcat_think>", "</longcat_s>",
    )  # fmt: skip
    malformed = (
        "<longcat_tool_call>", "<longcat_tool_call></longcat_tool_call>", "<longcat_tool_call>f<",
        f"<longcat_tool_call>{CALL[:-1]}</longcat_tool_call>", f"<longcat_tool_call>{CALL}{CALL}",
    )  # fmt: skip


class TestInternLM(ParserContract):
    parser = get_parser("internlm")
    markers = (
        "<|action_start|>", "<|plugin|>", "<|interpreter|>", "<|action_end|>", "<|im_end|>", CALL,
        '{"name": "f", "parameters": {}}', "<|action_start|><|plugin|>", "<|action_start|> <|plugin|>\n",
    )  # fmt: skip
    malformed = (
        "<|action_start|>", "<|action_start|><|plugin|>", "<|action_start|><|plugin|><|action_end|>",
        f"<|action_start|>{CALL}<|action_end|>", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        f"<|action_start|>\n{CALL}\n<|action_end|>", f"<|action_start|><|plugin|>{CALL} and<|action_end|>",
    )  # fmt: skip


class TestGigaChat3(ParserContract):
    parser = get_parser("gigachat3")
    markers = (
        "<|function_call|>", "<|message_sep|>", "<|message_sep|>\n\n", "function call", "<|role_sep|>",
        "function call<|role_sep|>\n", "<|message_sep|>\n\nfunction call<|role_sep|>\n", CALL, "</s>",
    )  # fmt: skip
    malformed = (
        "<|function_call|>", "<|function_call|>{", "function call<|role_sep|>\n{}",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n" + CALL[:-1],
        "<|message_sep|>function call<|role_sep|>",
    )  # fmt: skip


class TestGigaChat35(ParserContract):
    parser = get_parser("gigachat35")
    markers = (
        "<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>", '<｜GCML｜invoke name="f">', "</｜GCML｜invoke>",
        '<｜GCML｜parameter name="a" string="true">', "</｜GCML｜parameter>", '<｜GCML｜parameter name="b" ',
        'string="false">', "<|message_sep|>",
    )  # fmt: skip
    malformed = ("<｜GCML｜tool_calls>", '<｜GCML｜tool_calls><｜GCML｜invoke name="f">', "<｜GCML｜invoke>")


class TestApertus(ParserContract):
    parser = get_parser("apertus")
    markers = (
        "<|tools_prefix|>", "<|tools_suffix|>", '[{"f": {"a": 1}}, {"g": {}}]', LIST, '{"f": {}}', "[]",
        "<|inner_prefix|>", "<|inner_suffix|>", "<|assistant_end|>",
    )  # fmt: skip
    malformed = (
        "<|tools_prefix|>", "<|tools_prefix|>[]<|tools_suffix|>", "<|tools_prefix|>[{}]<|tools_suffix|>",
        '<|tools_prefix|>[{"f": [1]}]<|tools_suffix|>',
        '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"f": {}}',
    )  # fmt: skip


class TestMiniMaxM1(ParserContract):
    parser = get_parser("minimax_m1")
    markers = ("<tool_calls>", "<tool_calls>\n", "\n</tool_calls>", CALL, f"{CALL}\n{CALL}", LIST, "[]")
    malformed = (
        "<tool_calls>", "<tool_calls></tool_calls>", "<tool_calls>\n{}\n</tool_calls>",
        f"<tool_calls>\n{CALL[:-1]}\n</tool_calls>", f"<tool_calls>\n{CALL} and\n</tool_calls>",
    )  # fmt: skip


class TestMiniMaxM3(ParserContract):
    parser = get_parser("minimax_m3")
    markers = (
        "]<]minimax[>[", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>", "]<]minimax[>[</invoke>",
        ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>", "]<]minimax[>[</a>", "]<]minimax[>[<item>",
        "]<]minimax[>[</item>", "<mm:think>", "</mm:think>", "[e~[", "]<]minimax[>[ <invoke>",
    )  # fmt: skip
    malformed = (
        "]<]minimax[>[<tool_call>",
        "]<]minimax[>[<tool_call>\n]<]minimax[>[</tool_call>",
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1',
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</b>]<]minimax[>[</invoke>',
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</invoke>',
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1[e~[',
        ']<]minimax[>[<invoke name="f">a = 1]<]minimax[>[</invoke>',
        ']<]minimax[>[<invoke name="f">' + "]<]minimax[>[<a>" * 500,
        "]<]minimax[>[<invoke>]<]minimax[>[</invoke>",
        '<tool_call>]<]minimax[>[<invoke name="',
    )


class TestDeepSeekV41(ParserContract):
    parser = get_parser("deepseek_v41")
    markers = (
        "<｜DSML｜ calls>", "</｜DSML｜ calls>", '<｜DSML｜ invoke name="f">', "</｜DSML｜ invoke>",
        '<｜DSML｜ parameter name="a" string="true">', '<｜DSML｜ parameter name="a" string="false">',
        "</｜DSML｜ parameter>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
    )  # fmt: skip
    malformed = (
        "<｜DSML｜ calls>",
        "<｜DSML｜ calls></｜DSML｜ calls>",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        "<｜DSML｜function_calls>",
    )


class TestCohere(ParserContract):
    parser = get_parser("cohere_command3")
    markers = (
        "<|START_ACTION|>", "<|END_ACTION|>", '[{"tool_name": "f", "parameters": {"a": 1}}]', "[", "\n]",
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {}}', "<|START_THINKING|>", "<|END_THINKING|>",
        "<|START_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", "<|END_OF_TURN_TOKEN|>",
    )  # fmt: skip
    malformed = (
        "<|START_ACTION|>",
        "<|START_ACTION|><|END_ACTION|>",
        "<|START_ACTION|>[]<|END_ACTION|>",
        "<|START_ACTION|>{}<|END_ACTION|>",
        "<|START_ACTION|>[1, null]<|END_ACTION|>",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "x',
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}',
        '<|START_ACTION|>[{"tool_name": "f", "parameters": [1]}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": "0", "parameters": {}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_name": "f"}] and more<|END_ACTION|>',
    )


class TestCommandR(ParserContract):
    parser = get_parser("command_r")
    markers = (
        "Action:\n```json", "Action: ```json\n", '[{"tool_name": "f", "parameters": {"a": 1}}]', "]```", "[",
        "<results>", "</results>", "<|END_OF_TURN_TOKEN|>", "Action:",
    )  # fmt: skip
    malformed = (
        "Action: ```json",
        "Action: ```json\n```",
        "Action:\n```json\n[]\n```",
        'Action:\n```json\n[{"tool_name": "f", "parameters": {"a": "x',
        'Action:\n```json\n[{"parameters": {}}]\n```',
    )
