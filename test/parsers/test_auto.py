"""Detecting the format of a chat template, and showing tools in the prompt."""

import json
import logging
from dataclasses import replace

import pytest
from helpers.call_templates import ARGS, NAME, tokenizer_with
from torchrl.data.llm.history import _CHAT_TEMPLATES
from typer.testing import CliRunner

from torchrl_agentic import tool
from torchrl_agentic.cli.main import app
from torchrl_agentic.parsers import (
    PARSERS,
    HermesParser,
    Mismatch,
    check_parser,
    get_parser,
    tool_instructions,
    with_tools,
    with_tools_message,
)
from torchrl_agentic.parsers.auto import detect
from torchrl_agentic.testing.tokenizers import byte_tokenizer, chat_tokenizer

QWEN = _CHAT_TEMPLATES["qwen"]
PARAMS = "{% for k, v in c.function.arguments.items() %}%s{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "' + NAME + '", "arguments": ' + ARGS + "}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function={NAME}>\n"
    + PARAMS.replace("%s", f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n")
    + "</function>\n</tool_call>",
    "llama3_json": '{"name": "' + NAME + '", "parameters": ' + ARGS + "}",
    "mistral": '[TOOL_CALLS] [{"name": "' + NAME + '", "arguments": ' + ARGS + ', "id": "{{ c.id }}"}]',
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": f"<tool_call>{NAME}\n"
    + PARAMS.replace("%s", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n")
    + "</tool_call>",
    "harmony": f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{ARGS}<|call|>",
    "granite": '<|tool_call|>[{"name": "' + NAME + '", "arguments": ' + ARGS + "}]",
    "lfm2": f"<|tool_call_start|>[{NAME}("
    + PARAMS.replace(
        "%s", "{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ', ' * (not loop.last) }}"
    )
    + ")]<|tool_call_end|>",
}


@tool
def add(first: int, second: float, *, note: str = "a") -> float:
    """Add two numbers."""
    return first + second


@pytest.mark.parametrize("name", WRITTEN)
def test_the_parser_is_that_of_the_calls_which_the_template_writes(name):
    parser = get_parser("auto", tokenizer=tokenizer_with(WRITTEN[name]))
    assert parser.name == name
    assert not parser.reasoning_open


def test_auto_detects_the_template_of_torchrl():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN
    assert get_parser("auto", tokenizer=tokenizer).name == "hermes"


def test_parser_knows_that_the_template_opens_reasoning():
    assert get_parser("auto", tokenizer=tokenizer_with(WRITTEN["hermes"], "<think>\n")).reasoning_open
    closed = tokenizer_with(WRITTEN["hermes"], "<think>\n\n</think>\n\n")
    assert not get_parser("auto", tokenizer=closed).reasoning_open


def test_a_template_that_wants_arguments_as_a_string_gets_one():
    """It writes a mapping as Python does."""
    written = f'<tool_call>\n{{"name": "{NAME}", "arguments": {{{{ c.function.arguments }}}}}}\n</tool_call>'
    assert get_parser("auto", tokenizer=tokenizer_with(written)).name == "hermes"


def test_a_template_that_knows_types_by_one_word_can_show_the_sentinel():
    """Those of Hermes 2 Pro and Hermes 3 look into a list of types for ever if one of them is null."""
    types = (
        "{% macro type(t) %}{% if t in ('string', 'integer', 'boolean', 'object') %}{{ t }}"
        "{% elif t is iterable %}{% for one in t %}{{ type(one) }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for tool in tools %}{% for p in tool.function.parameters.properties.values() %}"
        "{{ type(p.type) if p.type is defined else 'any' }}{% endfor %}{% endfor %}"
    )
    tokenizer = tokenizer_with(WRITTEN["hermes"])
    tokenizer.chat_template = types + tokenizer.chat_template
    assert get_parser("auto", tokenizer=tokenizer).name == "hermes"


def test_template_that_writes_argument_descriptions_can_show_the_sentinel():
    tokenizer = tokenizer_with(WRITTEN["hermes"])
    described = "{% for t in tools or [] %}{% for k, p in t.function.parameters.properties.items() %}"
    described += "{{ k + ': ' + p.description }}{% endfor %}{% endfor %}"
    tokenizer.chat_template = described + tokenizer.chat_template
    assert get_parser("auto", tokenizer=tokenizer).name == "hermes"


def test_end_of_turn_decides_between_similar_formats():
    class Other(HermesParser):
        name = "other"
        format = replace(HermesParser.format, turn_end=("<|bye|>",))

    parsers = {"hermes": HermesParser, "other": Other}
    tokenizer = tokenizer_with(WRITTEN["hermes"])
    assert detect(tokenizer, parsers).name == "hermes"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|bye|>")
    assert detect(tokenizer, parsers).name == "other"


def test_templates_without_calls_or_with_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="renders no tool calls"):
        get_parser("auto", tokenizer=tokenizer_with(""))
    with pytest.raises(ValueError, match=r"no parser reads.*CALL sentinel_tool"):
        get_parser("auto", tokenizer=tokenizer_with(f"CALL {NAME} WITH {ARGS}"))
    with pytest.raises(TypeError, match="needs a tokenizer"):
        get_parser("auto")


def test_a_template_without_calls_names_the_formats_whose_markers_it_or_the_tokenizer_has():
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    markers = ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>")
    tokenizer = chat_tokenizer(source, eos="<|im_end|>", control=markers, added=())
    with pytest.raises(ValueError, match=r"renders no tool calls.*the markers of lfm2: try these$"):
        get_parser("auto", tokenizer=tokenizer)
    source += "{% if tools %}Call as <tool_call>JSON</tool_call>{% endif %}"
    tokenizer = chat_tokenizer(source, eos="<|im_end|>", control=("<|im_start|>",), added=())
    with pytest.raises(ValueError, match=r"renders no tool calls.*the markers of hermes, .*: try these$"):
        get_parser("auto", tokenizer=tokenizer)


def test_a_parser_is_checked_with_a_call_of_every_tool():
    tokenizer = tokenizer_with(WRITTEN["hermes"])
    check_parser(get_parser("hermes"), [add], tokenizer, parsers=PARSERS)
    with pytest.raises(Mismatch, match=r"'xml' does not read a call of 'add'.*'hermes' does"):
        check_parser(get_parser("xml"), [add], tokenizer, parsers=PARSERS)
    for name in PARSERS.keys() - {"fence", "tags"}:
        assert check_parser(get_parser(name), [add]) == ["add"]
    for name in ("fence", "tags"):
        with pytest.raises(Mismatch, match="none of these tools: add"):
            check_parser(get_parser(name), [add])


def test_default_that_violates_its_schema_is_not_used_as_example():
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    assert check_parser(get_parser("qwen3_coder"), {"f": schema}) == ["f"]


def test_a_template_that_writes_values_wrong_is_not_the_parsers_fault():
    arguments = PARAMS.replace("%s", '{{ k }}="{{ v }}"{{ ", " if not loop.last }}')
    tokenizer = tokenizer_with(f"\n[{NAME}({arguments})]")
    with pytest.warns(UserWarning, match="values that are not words in a call of 'add' do not"):
        assert check_parser(get_parser("pythonic"), [add], tokenizer, parsers=PARSERS) == ["add"]


def test_a_template_that_does_not_escape_quotes_is_not_the_parsers_fault():
    """As vLLM's template for the pythonic calls of Llama 4."""
    value = "{{ v if v is not string else '\"' + v + '\"' }}"
    arguments = PARAMS.replace("%s", f"{{{{ k }}}}={value}" + '{{ ", " if not loop.last }}')
    tokenizer = tokenizer_with(f"\n[{NAME}({arguments})]")
    with pytest.warns(UserWarning, match="quotes, newlines or null in a call of 'add' do not read back"):
        assert check_parser(get_parser("pythonic"), [add], tokenizer, parsers=PARSERS) == ["add"]
    assert get_parser("auto", tokenizer=tokenizer).name == "pythonic"


SEED = "<seed:tool_call>\n<function={name}>\n{params}</function>\n</seed:tool_call>".format(
    name=NAME, params=PARAMS.replace("%s", f"<parameter={{{{ k }}}}>{VALUE}</parameter>\n")
)


def test_a_parser_that_leaves_the_tags_of_another_format_over_is_refused():
    tokenizer = tokenizer_with(SEED)
    assert get_parser("auto", tokenizer=tokenizer).name == "seed_oss"
    with pytest.raises(Mismatch, match="'seed_oss' does"):
        check_parser(get_parser("qwen3_coder"), [add], tokenizer, parsers=PARSERS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<|unknown_call|>", ""),
        ("<unknown_calls>\n", "\n</unknown_calls>"),
        ("<|start|><|other|>", "<|stop|>"),
    ],
)
def test_bare_json_between_tags_of_an_unknown_format_is_refused(before, after):
    tokenizer = tokenizer_with(f"\n{before}\n{WRITTEN['llama3_json']}{after}")
    with pytest.raises(ValueError, match="no parser reads"):
        get_parser("auto", tokenizer=tokenizer)
    with pytest.raises(Mismatch, match="no other parser does either"):
        check_parser(get_parser("llama3_json"), [add], tokenizer, parsers=PARSERS)


@tool
def edit(path: str, *, dry_run: bool, limit: int | None) -> str:
    """Edit a file."""
    return path


def test_a_parser_that_reads_other_values_is_refused():
    """It reads strings where another parser reads typed values."""

    class Stringly(HermesParser):
        name = "stringly"

        def parse(self, response, *, tools=None, turn=0):
            result = super().parse(response, tools=tools, turn=turn)
            calls = [replace(c, args={k: str(v) for k, v in c.args.items()}) for c in result.calls]
            return replace(result, calls=tuple(calls))

    with pytest.raises(Mismatch, match="'hermes' does"):
        check_parser(Stringly(), [edit], tokenizer_with(WRITTEN["hermes"]), parsers=PARSERS)


def test_the_role_of_results_is_one_that_the_template_names():
    """A template that prints any role does not know the role."""
    assert get_parser("auto", tokenizer=tokenizer_with(WRITTEN["llama3_json"])).result_role == "tool"


def test_tool_that_the_format_cannot_express_is_found():
    """Kimi's ids end names at a colon."""
    with pytest.raises(ValueError, match="cannot express the name"):
        get_parser("kimi_k2").render_call(get_parser("hermes").parse('<tool_call>{"name": "a:b"}').calls[0])


def test_a_family_name_that_means_several_formats_names_the_likely_one():
    with pytest.raises(ValueError, match="did you mean 'deepseek_v31'"):
        get_parser("deepseek")


SPECS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": 'a "b" \\ c\n%} {{ x }} 😀 é',
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": None, "default": True, "minimum": 1.5}},
            },
        },
    },
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_with_tools_renders_like_a_template_that_gets_the_tools():
    tokenizer = byte_tokenizer()
    told = tokenizer.apply_chat_template(MESSAGES, tools=SPECS, chat_template=QWEN, tokenize=False)
    assert "%} {{ x }} 😀" in told
    shown = tokenizer.apply_chat_template(MESSAGES, chat_template=with_tools(QWEN, SPECS), tokenize=False)
    assert shown == told


def test_policy_reference_and_history_see_the_same_tools():
    """TorchRL renders histories itself; the same template gives the same text there."""
    from torchrl.data.llm import History

    tokenizer, template = byte_tokenizer("tiny-qwen"), with_tools(QWEN, [add])
    history = History.from_chats([MESSAGES])
    options = {"chat_template": template, "add_generation_prompt": True}
    text = history.apply_chat_template(tokenizer=tokenizer, **options)
    assert json.dumps(add.spec()["function"]["name"]) in text[0]
    assert text[0] == tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)


def test_template_without_tools_is_rejected_and_a_message_can_describe_them():
    with pytest.raises(ValueError, match="with_tools_message"):
        with_tools("{{ messages }}", SPECS)
    parser = get_parser("hermes")
    told = with_tools_message(MESSAGES, [add], parser)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '"name": "add"' in told[0]["content"]
    assert parser.shape in told[0]["content"]
    assert MESSAGES[0]["content"] == "Be brief."
    assert with_tools_message(MESSAGES[1:], [add], parser)[0]["content"] == tool_instructions([add], parser)


def test_the_command_checks_a_configuration(tmp_path):
    config = tmp_path / "demo.yaml"
    config.write_text("conversations: [a.json]\nparser: qwen3_coder\ntools: [stop]\n")
    good = CliRunner().invoke(app, ["check", str(config)])
    assert good.exit_code == 0, good.output
    assert "qwen3_coder" in good.output
    bad = CliRunner().invoke(app, ["check", str(config), "--parser", "hermse"])
    assert bad.exit_code == 2
    assert "did you mean 'hermes'" in " ".join(bad.output.split())


def test_the_command_checks_a_parser_against_a_tokenizer(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    config = tmp_path / "demo.yaml"
    config.write_text("conversations: [a.json]\ntools: [stop]\n")
    tokenizer_with(WRITTEN["glm45"]).save_pretrained(tmp_path / "model")
    arguments = ["check", str(config), "--tokenizer", str(tmp_path / "model"), "--parser"]
    bad = CliRunner().invoke(app, [*arguments, "hermes"])
    assert bad.exit_code == 1
    assert "'glm45' does" in " ".join(bad.output.split())
    for name in ("glm45", "auto"):
        good = CliRunner().invoke(app, [*arguments, name])
        assert good.exit_code == 0, good.output


def test_a_template_that_writes_quotes_and_numbers_wrong_is_recognized_by_a_simple_call():
    arguments = '{% for k, v in c.function.arguments.items() %}{{ k }}="{{ v }}"{% endfor %}'
    assert get_parser("auto", tokenizer=tokenizer_with(f"\n[{NAME}({arguments})]")).name == "pythonic"


def test_results_get_the_role_that_the_template_takes():
    tokenizer = tokenizer_with(WRITTEN["llama3_json"])
    tokenizer.chat_template += "{# the roles are 'user', 'assistant' and 'ipython' #}"
    assert get_parser("auto", tokenizer=tokenizer).result_role == "ipython"
    refusal = (
        "{% for m in messages if m.role == 'ipython' %}{{ raise_exception('no such role') }}{% endfor %}"
    )
    tokenizer.chat_template = refusal + tokenizer.chat_template
    assert get_parser("auto", tokenizer=tokenizer).result_role == "tool"


def test_template_gets_the_options_of_the_caller():
    written = tokenizer_with(WRITTEN["hermes"], "{% if thinking %}<think>\n{% endif %}")
    assert get_parser("auto", tokenizer=written, thinking=True).reasoning_open
    assert not get_parser("auto", tokenizer=written).reasoning_open


@pytest.mark.parametrize("template", ["\n  {{ tools | tojson }}", "\n\n{{ tools | length }}", "{{ tools }}"])
def test_white_space_at_the_start_of_a_template_stays(template):
    tokenizer = byte_tokenizer()
    told = tokenizer.apply_chat_template(MESSAGES, tools=SPECS, chat_template=template, tokenize=False)
    shown = tokenizer.apply_chat_template(MESSAGES, chat_template=with_tools(template, SPECS), tokenize=False)
    assert shown == told


def test_text_that_a_template_appends_is_not_part_of_the_answer():
    """The user's turn ends as Phi's turns do, and an end of text comes last: only the answer counts."""
    tokenizer = byte_tokenizer()
    written = '<|tool_call|>{"name": "' + NAME + '", "arguments": ' + ARGS + "}<|/tool_call|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}"
        + written
        + "{% endfor %}<|end|>{% endfor %}<|im_end|>"
    )
    assert get_parser("auto", tokenizer=tokenizer).name == "phi4_mini"
