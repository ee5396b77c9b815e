"""ToolCompose knows whether answers begin inside reasoning, so that no draft runs."""

import pytest
from helpers.chat_envs import begin, chat_env, step
from typer.testing import CliRunner

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.cli.main import app
from torchrl_agentic.parsers import HermesParser
from torchrl_agentic.testing import chat_tokenizer
from torchrl_agentic.transforms import TurnTokenizer

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not false %}<think>
{% endif %}{% endif %}"""
TOKENIZER = chat_tokenizer(TEMPLATE, eos="<|im_end|>", control=("<|im_start|>",))
DRAFT = '<tool_call>\n{"name": "note", "arguments": {"text": "draft"}}\n</tool_call>'
CALL = DRAFT.replace("draft", "meant")


@pytest.fixture
def noted():
    return []


@pytest.fixture
def note(noted):
    @tool
    def note(text: str) -> str:
        """Write a note."""
        noted.append(text)
        return "ok"

    return note


@pytest.mark.parametrize("parser", ["hermes", "auto", HermesParser()])
def test_parser_uses_the_given_tokenizer(note, parser):
    assert ToolCompose([note], parser, tokenizer=TOKENIZER).parser.reasoning_open
    quiet = ToolCompose([note], parser, tokenizer=TOKENIZER, template_kwargs={"enable_thinking": False})
    assert not quiet.parser.reasoning_open


def test_explicit_reasoning_open_wins(note):
    told = ToolCompose([note], HermesParser(reasoning_open=False), tokenizer=TOKENIZER)
    assert not told.parser.reasoning_open


@pytest.mark.parametrize("thinks", [True, False])
def test_parser_uses_the_tokenizer_of_turn_tokenizer(note, thinks):
    kwargs = None if thinks else {"enable_thinking": False}
    compose = ToolCompose([note], "hermes")
    env = chat_env((1,), compose, TurnTokenizer(TOKENIZER, template_kwargs=kwargs))
    env.reset(begin(env))
    assert compose.parser.reasoning_open is thinks


def test_draft_in_reasoning_opened_by_the_prompt_does_not_run(note, noted):
    for options in ({"tokenizer": TOKENIZER}, {}):  # without it, the end of the thought proves the rest
        env = chat_env((1,), ToolCompose([note], "hermes", **options))
        step(env, begin(env), f"I could {DRAFT} but no.\n</think>\n\n{CALL}")
        assert noted == ["meant"]
        noted.clear()


def test_parser_check_explains_the_remedy(tmp_path, noted):
    TOKENIZER.save_pretrained(tmp_path / "model")
    config = tmp_path / "plan.yaml"
    config.write_text("conversations: [a.json]\ntools: [stop]\nparser: hermes\n")
    found = CliRunner().invoke(app, ["check", str(config), "--tokenizer", str(tmp_path / "model")])
    assert found.exit_code == 0, found.output
    assert "opens a reasoning block" in " ".join(found.output.split())
