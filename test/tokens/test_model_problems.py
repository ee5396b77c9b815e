"""One line for each likely fault of a model, and none for a sound one."""

import logging

import pytest
from helpers.trl_templates import stop_ids_of, tokenizer_of
from transformers import GenerationConfig
from typer.testing import CliRunner

from torchrl_agentic import ToolCompose
from torchrl_agentic.cli.main import app
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing import chat_tokenizer
from torchrl_agentic.tokens.model_problems import model_problems

PARSERS = {"glm4moe": "glm45", "gptoss": "harmony", "llama3_1": "llama3_json", "gemma4_v5": "gemma4"}
ENDS = {
    "glm4moe": "<|observation|>",
    "gptoss": "<|call|>",
    "llama3_1": "<|eom_id|>",
    "gemma4_v5": "<|tool_response>",
}
MOVING = "{{ messages[-1].content }}{% for m in messages[:-1] %}<|start|>{{ m.content }}<|end|>{% endfor %}"
"""A template that writes the last message first."""


def problems(name, parser=None, **options):
    return model_problems(
        tokenizer_of(name), parser=None if parser is None else get_parser(parser), **options
    )


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_whose_calls_end_with_no_end_id_is_a_line_that_names_the_id(name):
    (line,) = problems(name, PARSERS[name])
    missing = tokenizer_of(name).convert_tokens_to_ids(ENDS[name])
    assert line.startswith(f"end ids: the format '{PARSERS[name]}' ends answers with ")
    assert f"{ENDS[name]!r} (id {missing})" in line


@pytest.mark.parametrize("name", PARSERS)
def test_known_end_ids_are_no_line(name):
    assert problems(name, PARSERS[name], stop_token_ids=stop_ids_of(name)) == []


def test_sound_models_have_no_line():
    config = {"eos_token_id": [tokenizer_of("qwen2_5").eos_token_id]}
    assert problems("qwen2_5", "hermes", generation_config=config, temperature=1.0) == []
    assert problems("qwen3_6", "qwen3_coder", temperature=1.0) == []


@pytest.mark.parametrize("as_object", [False, True])
def test_more_end_ids_in_the_generation_config_are_a_line(as_object):
    tokenizer = tokenizer_of("qwen2_5")
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    config = {"eos_token_id": [tokenizer.eos_token_id, other]}
    (line,) = problems("qwen2_5", generation_config=GenerationConfig(**config) if as_object else config)
    assert f"the model also ends answers with '<|im_start|>' (id {other})" in line
    assert problems("qwen2_5", generation_config=config, stop_token_ids=[other]) == []


def test_the_pad_token_in_the_generation_config_is_no_line():
    tokenizer = tokenizer_of("qwen2_5")
    config = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id]}
    assert problems("qwen2_5", generation_config=config) == []


def test_a_template_that_leaves_calls_out_is_a_line():
    (line,) = problems("lfm2", "lfm2")
    assert line.startswith("chat template: it leaves out tool calls")


def test_a_template_that_cannot_be_continued_is_a_line_with_the_reason():
    tokenizer = chat_tokenizer(MOVING, eos="<|end|>", control=("<|start|>",), added=())
    first, *_ = model_problems(tokenizer)
    assert first.startswith("chat template: this chat template cannot be continued token by token")
    assert "\n" not in first


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_temperature_other_than_that_of_training_is_a_line(temperature):
    (line,) = problems("qwen2_5", temperature=temperature)
    assert line.startswith(f"temperature: the engine samples at {temperature:g}")


@pytest.mark.parametrize("has_config", [True, False])
def test_the_command_prints_a_line_for_each_fault(tmp_path, has_config):
    tokenizer = tokenizer_of("gemma4_v5")
    tokenizer.save_pretrained(tmp_path)
    ends = [tokenizer.eos_token_id, *stop_ids_of("gemma4_v5")]
    if has_config:
        GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    found = CliRunner().invoke(app, ["check", "--tokenizer", str(tmp_path), "--parser", "gemma4"])
    assert found.exit_code == 0, found.output
    assert f"'<|tool_response>' (id {ends[1]})" in found.output
    assert ("by its generation_config" in found.output) == has_config


def collector(name, parser, **options):
    tokenizer = tokenizer_of(name)
    said = [*tokenizer.encode("Done."), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda key, turn, ids: said, tokenizer=tokenizer)
    return AgentCollector(
        ToolCompose([], parser=parser), engine=engine, tokenizer=tokenizer, tasks=[{"query": "q"}], **options
    )


def test_the_start_of_a_collector_logs_each_line_once(caplog):
    with caplog.at_level(logging.WARNING), collector("gemma4_v5", "gemma4") as found:
        list(found)
    assert sum("'<|tool_response>'" in record.getMessage() for record in caplog.records) == 1


def test_the_start_of_a_collector_of_a_sound_model_logs_no_line(caplog):
    with caplog.at_level(logging.WARNING), collector("qwen2_5", "hermes") as found:
        list(found)
    assert not [record for record in caplog.records if "end ids" in record.getMessage()]
