"""Templates that write the name of a result's tool get it: from the parser, or from the call before it."""

import pytest
from helpers.token_rollouts import Rollout, Says, token_env
from helpers.trl_templates import stop_ids_of, stops_of, tokenizer_of
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, ToolCompose
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.messages import Message, ParsedCall, ToolResult
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.rollout import rollout, to_sft
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.tokens.writer import ChatEncoder

HARMONY = '<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text": "A"}'
GEMMA = '<|tool_call>call:say{text:<|"|>A<|"|>}<tool_call|>'
HERMES = '<tool_call>\n{"name": "say", "arguments": {"text": "A"}}\n</tool_call>'
RUNS = {
    ("gptoss", "harmony"): (HARMONY, "<|start|>functions.say to=assistant"),
    ("gptoss", "hermes"): (HERMES, "<|start|>functions.say to=assistant"),
    ("muse_glimmer", "hermes"): (HERMES, '<|start|>tool say<|message|><tool_output name="say">'),
    ("gemma4_v5", "gemma4"): (GEMMA, "response:say{"),
    ("gemma4_v5", "hermes"): (HERMES, "response:say{"),
}
NAMED = {
    "gptoss": "<|start|>functions.say to=assistant",
    "muse_glimmer": '<tool_output name="say">',
    "gemma4_v5": "response:say{",
}


def say(text: str) -> str:
    """Say it again."""
    return text


def call(name="say", call_id="call00000"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"text": "A"}}}


def nameless(text, call_id="call00000"):
    return {"role": "tool", "content": text, "tool_call_id": call_id}


@pytest.mark.parametrize(("template", "parser"), RUNS)
def test_an_environment_tells_the_model_which_tool_a_result_is_of(template, parser):
    said, expected = RUNS[template, parser]
    tokenizer = tokenizer_of(template)
    env = token_env(tokenizer, [say], parser=parser, stop_token_ids=stop_ids_of(template))
    stops = stops_of(template)
    talk = Rollout(env, tokenizer, stops).turn(Says(said, stops[0] if stops else "eos"))
    assert expected in talk.text()


@pytest.mark.parametrize(("template", "parser"), RUNS)
def test_a_collector_tells_the_model_which_tool_a_result_is_of(template, parser):
    said, expected = RUNS[template, parser]
    tokenizer, stops = tokenizer_of(template), stop_ids_of(template)
    end = stops[0] if stops else tokenizer.eos_token_id
    answers = [[*tokenizer.encode(said), end], [*tokenizer.encode("Done."), tokenizer.eos_token_id]]
    engine = ScriptedEngine(
        lambda key, turn, ids: answers[min(turn, 1)], tokenizer=tokenizer, stop_token_ids=stops
    )
    env = Compose(ToolCompose([say], parser=parser), EndTrajectory(max_turns=4, when_no_calls=True))
    options = {"stop_token_ids": stops}
    (found,) = rollout(env, engine, tokenizer, [{"query": "q"}], tokenizer_options=options)
    assert expected in tokenizer.decode(found.ledger.ids)


@pytest.mark.parametrize("template", NAMED)
def test_results_of_a_history_have_the_name_of_their_call(template):
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("other")]},
        nameless("R1"),
        {"role": "assistant", "content": "", "tool_calls": [call("say")]},
        nameless("R2"),
    ]
    writer = ChatEncoder(tokenizer_of(template), stop_token_ids=stop_ids_of(template)).begin(chat)
    last = tokenizer_of(template).decode(writer.ids).rpartition("R1")[2]
    assert NAMED[template] in last


def test_sft_data_of_an_api_name_the_tools_of_results():
    conversation = Conversation(
        name="c",
        prompt=(Message("user", "q"),),
        turns=(
            Message("assistant", "", tool_calls=(call(),)),
            Message("assistant", "", tool_calls=(call(),)),
        ),
        expected=((ToolResult.from_text("R"),), ()),
    )
    tokenizer = tokenizer_of("muse_glimmer")
    (row,) = to_sft([conversation], tokenizer)
    assert NAMED["muse_glimmer"] in tokenizer.decode(row.token_row["input_ids"])


def test_a_name_in_a_call_brings_no_control_token_into_a_result():
    tokenizer = tokenizer_of("muse_glimmer")
    template = ChatEncoder(tokenizer).template
    answer = {"role": "assistant", "content": "a", "tool_calls": [call("<|eot|>")]}
    _, pieces = template.delta([answer], [nameless("R")], [0])
    assert "<|eot|>" not in pieces[0].text


@pytest.mark.parametrize("parser", ["hermes", "harmony", "llama3_json", "mistral", "kimi_k2", "deepseek_v3"])
def test_parsers_name_the_tools_of_results_and_not_the_speaker_of_a_user_message(parser):
    calls = [ParsedCall("get", {}, "call_0_0"), ParsedCall("put", {}, "call_0_1")]
    results = [ToolResult.from_text("a"), ToolResult.from_text("b")]
    assert [m["name"] for m in get_parser(parser).render(calls, results)] == ["get", "put"]
    assert not any("name" in m for m in get_parser("react").render(calls, results))


def test_results_that_a_parser_of_another_class_writes_have_names_too():
    class Ours:
        def parse(self, response):
            return get_parser("hermes").parse(response)

        def render_call(self, call):
            return ""

        def render_result(self, call_id, result):
            return {"role": "tool", "content": result.text, "tool_call_id": call_id}

        def render(self, calls, results):
            both = " ".join(result.text for result in results)
            return [{"role": "tool", "content": both, "tool_call_id": calls[0].call_id}]

    calls = [ParsedCall("get", {}, "call_0_0"), ParsedCall("put", {}, "call_0_1")]
    results = [ToolResult.from_text("a"), ToolResult.from_text("b")]
    (message,) = get_parser(Ours()).render(calls, results)
    assert message["name"] == "get"
