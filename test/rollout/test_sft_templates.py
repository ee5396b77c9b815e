"""`to_sft` with each chat template that trl ships: what the template writes, or an error with a remedy."""

import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

from torchrl_agentic import get_parser, tool
from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.rollout import to_sft
from torchrl_agentic.testing import chat_tokenizer

FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
STOPS = (
    "<|im_end|>", "<|eot_id|>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>", "<|eot|>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<|end|>", "</s>",
    "<end_of_utterance>",
)  # fmt: skip
CONTROL = re.compile(
    r"<\|[^<>|\s]+\|>|<\|[a-z_\"]+>|<[a-z_]+\|>|<｜[^｜]+｜>|</?(?:think|tool_call|tool_response)>|\[gMASK\]"
    r"|<sop>|</?atem:[a-z_]+>|</?[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]"
)


@tool
def get(city: str, n: int = 0) -> str:
    """Get."""
    return f"{city}{n}"


@functools.cache
def tokenizer_of(name):
    """Return a tokenizer with a template and the control tokens in it, and the stop tokens among them."""
    source = (FOLDER / f"{name}.jinja").read_text()
    inner = {"<|end|>"} if "<|call|>" in source else {"<|user|>"} if "<|end|>" in source else set()
    stops = [stop for stop in STOPS if stop in source and stop not in inner]
    control = [token for token in dict.fromkeys(CONTROL.findall(source)) if token not in stops]
    made = chat_tokenizer(source, eos=stops[0], control=(*stops[1:], *control, "<bos>"))
    made.bos_token = "<bos>"
    return made, made.convert_tokens_to_ids(stops)


def call(number, args, name="get"):
    function = {"name": name, "arguments": args}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def said(text, *calls, reasoning=None):
    message = {"role": "assistant", "content": text}
    message |= {"tool_calls": list(calls)} if calls else {}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def result(number, text):
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "get"}


USER = {"role": "user", "content": "Wie ist das Wetter in Rom? 東京"}
ROME, OSLO = call(0, {"city": "Rome"}), call(1, {"city": "Oslo"})
DONE = said("It is sunny.")
VALUES = {
    "city": 'a "quoted" \\ <b>\nline ü 東京',
    "n": 3,
    "x": 1.5,
    "yes": True,
    "none": None,
    "list": [1, "a", {"b": "c"}],
}


def scenes(markup):
    """Return conversations by name.

    Args:
        markup: Control tokens of the template, without those that end answers.
    """
    return {
        "answer": [USER, DONE],
        "unicode": [USER, said("Größe 漢字 🙂\n\n- naïve\n- `x = {}`")],
        "reasoning": [USER, said("It is sunny.", reasoning="I know\n\nit.")],
        "call": [USER, said("", ROME), result(0, "sun"), DONE],
        "call last": [USER, said("", ROME)],
        "two calls": [USER, said("", ROME, OSLO), result(0, "sun"), result(1, "snow"), DONE],
        "call and text": [USER, said("I look.", ROME), result(0, "sun"), DONE],
        "call and reasoning": [USER, said("", ROME, reasoning="I ask."), result(0, "sun"), DONE],
        "call without arguments": [USER, said("", call(0, {})), result(0, "sun"), DONE],
        "values": [USER, said("", call(0, VALUES)), result(0, "sun"), DONE],
        "two turns": [USER, said("One."), USER, said("Two.")],
        "calls in two turns": [
            USER, said("", ROME), result(0, "sun"), DONE, USER, said("", OSLO), result(1, "snow"), DONE,
        ],
        "reasoning in two turns": [USER, said("One.", reasoning="r1"), USER, said("Two.", reasoning="r2")],
        "markup in text": [USER, said(f"Write {markup} so.")],
        "markup in call": [USER, said("", call(0, {"city": f"x {markup}"})), result(0, "sun"), DONE],
        "markup in result": [USER, said("", ROME), result(0, f"sun {markup}"), DONE],
        "only reasoning": [USER, said("", reasoning="I ask.")],
    }  # fmt: skip


def conversation(name, messages):
    """Return messages as the record of a trajectory of a model behind an API."""
    turns = []
    context = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            context += [message] if message["role"] == "user" else []
            continue
        calls = message.get("tool_calls", [])
        results = messages[index + 1 : index + 1 + len(calls)]
        raw = [
            {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}}
            for one in calls
        ]
        parsed = [ParsedCall(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in calls]
        answered = [ToolResult.from_text(one["content"]) for one in results] or [ToolResult()] * len(calls)
        turns.append(
            Turn(
                "t",
                len(turns),
                Message("assistant", message["content"], raw, reasoning=message.get("reasoning_content", "")),
                DispatchResult(message["content"], tuple(parsed), tuple(answered)),
                tuple(Message("tool", one["content"], tool_call_id=one["tool_call_id"]) for one in results),
                tuple(Message("user", one["content"]) for one in context),
            )
        )
        context = []
    return TrajectoryRecord(name, tuple(turns), trajectory=name)


def runs(row, tokenizer):
    """Return the text of the row in parts, each with whether it is trained on."""
    parts = []
    for token, bit in zip(row["input_ids"], row["assistant_masks"], strict=True):
        if not parts or parts[-1][0] != bit:
            parts.append((bit, []))
        parts[-1][1].append(token)
    return [
        (bit, ids, tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)) for bit, ids in parts
    ]


def for_template(message):
    """Return a message with its reasoning under all names that templates use."""
    if "reasoning_content" not in message:
        return message
    return {**message, **dict.fromkeys(("reasoning", "thinking"), message["reasoning_content"])}


def renderer(tokenizer):
    """Return a function that renders messages; contents are lists of parts if the template wants these."""
    shown = [dict(spec) for spec in to_sft([], tools=[get]).tools]

    def render(chat, prompts):
        chat = [for_template(message) for message in chat]
        options = {"tools": shown, "add_generation_prompt": prompts, "tokenize": False}
        text = tokenizer.apply_chat_template(chat, **options)
        if USER["content"] in text:
            return text
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
        return tokenizer.apply_chat_template(parts, **options)

    return render


def check(tokenizer, stops, messages, row):
    """Check a row against renderings of the conversation and of its beginnings."""
    control, render = control_tokens_of(tokenizer), renderer(tokenizer)
    parts = runs(row, tokenizer)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert [bit for bit, _, _ in parts] == [0, 1] * len(answers)
    text, wholes = "", []
    for number, index in enumerate(answers):
        message, between = messages[index], parts[2 * number][2]
        _, ids, target = parts[2 * number + 1]
        text += between + target
        # One token ends the answer; before it is what the template writes behind the messages before.
        assert ids[-1] in stops
        assert not set(stops) & set(ids[:-1])
        spoken = target.removesuffix(tokenizer.convert_ids_to_tokens(ids[-1]))
        whole, asked = render(messages[: index + 1], False), render(messages[:index], True)
        wholes.append(whole.rstrip("\n"))
        assert wholes[-1].endswith((target, spoken))
        head = whole[: whole.rindex(spoken)]
        assert spoken.strip()
        assert between.strip() in asked
        if asked.startswith(head):  # nothing of the prompt is a target, but half of a token that differs
            rest = zip(asked[len(head) :], whole[len(head) :], strict=False)
            assert {a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], rest)} <= {"\n", "<"}
        for part in (message["content"], message.get("reasoning_content", "")):
            assert part.strip() in target
        # No control token stands for text of the answer.
        literal = sum(count(control.values(), value) for value in texts_of(message))
        assert sum(token in control for token in ids[:-1]) == count(control.values(), spoken) - literal
        wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        assert calls_in(spoken, tokenizer, len(wanted)) == wanted
    if all(wholes[-1].startswith(whole) for whole in wholes):  # as it does not with what it rewrites later
        assert wholes[-1] in (text, text.removesuffix(tokenizer.convert_ids_to_tokens(row["input_ids"][-1])))


def calls_in(text, tokenizer, n_calls):
    """Return the calls in a text by the parser of the template's format."""
    if not n_calls:
        return []
    if "<atem:" in text:  # no parser reads the format of Muse
        values = re.compile(
            r'name="(\w+)">(.*?)</atem:parameter>(?=\n(?:<atem:param|</atem:invoke>\n))', re.DOTALL
        )
        blocks = re.split(r'<atem:invoke name="(\w+)">', text)[1:]
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        return [(name, {key: loads(value) for key, value in values.findall(block)}) for name, block in pairs]
    schema = {
        "type": "object",
        "properties": {key: {"type": type_of(value)} for key, value in VALUES.items()},
    }
    found = get_parser("auto", tokenizer=tokenizer).parse(text, tools={"get": schema}).calls
    return [(one.tool, dict(one.args)) for one in found]


def loads(value):
    try:
        return json.loads(value)
    except ValueError:
        return value


def texts_of(value):
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def type_of(value):
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
    return names.get(type(value), "null")


def count(tokens, text):
    return sum(text.count(token) for token in tokens)


def refused(name):
    """Check the rows of a template; return the conversations that it cannot write, with the errors."""
    tokenizer, stops = tokenizer_of(name)
    options = {"tools": [get], "tokenizer_options": {"stop_token_ids": stops}}
    control = control_tokens_of(tokenizer)
    markup = " ".join(token for token_id, token in control.items() if token_id not in stops)
    given = scenes(markup)
    try:
        data = to_sft(
            [conversation(*one) for one in given.items()], tokenizer, on_unwritable="leave_out", **options
        )
    except ValueError as error:
        return dict.fromkeys(given, str(error))
    rows = {row.name: row.token_row for row in data}
    found = {}
    for scene, messages in given.items():
        if scene in rows:
            check(tokenizer, stops, messages, rows[scene])
            continue
        with pytest.raises(ValueError, match="the chat template cannot write") as error:
            to_sft([conversation(scene, messages)], tokenizer, **options)
        found[scene] = str(error.value)
    return found


REASONING = {"reasoning", "call and reasoning", "reasoning in two turns", "only reasoning"}
CALLS = {
    *("call", "call last", "two calls", "call and text", "call and reasoning", "call without arguments"),
    *("values", "calls in two turns", "markup in call", "markup in result"),
}
TAGGED = "glm4moe qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 nemotron_3_5_lightning nemotron_3_nano "
TAGGED += "nemotron_3_super nemotron_3_ultra "
GEMMA = "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5"
NO_REASONING = "does not write the reasoning; to train without reasoning, keep_reasoning=False"
REFUSED = (
    (
        "cohere cohere2 gemma gemma3 llava_next phi3 phi3_5 deepseek_r1_distill deepseekv3",
        set(scenes("")),
        "cannot be continued token by token.*Pass another chat_template=",
    ),
    ("idefics3 lfm2 llama3 qwen2_5_vl smolvlm", REASONING - CALLS, NO_REASONING),
    (
        "idefics3 lfm2 llama3 qwen2_5_vl smolvlm",
        CALLS,
        "does not write .*the call of 'get'.*; pass another template",
    ),
    ("lfm2_v2 qwen2_5 qwen3_instruct_2507 qwen3_vl llama3_1 llama3_2 gemma4_v2", REASONING, NO_REASONING),
    ("gemma4 gemma4_v3 gemma4_v4", REASONING - CALLS, NO_REASONING),
    ("gptoss", {"two calls"}, "does not write the call of 'get'.*; pass another template"),
    ("llama3_1 llama3_2", {"two calls"}, "only supports single tool-calls at once!.*; pass another template"),
    ("llama3_1 llama3_2 muse_glimmer", {"call and text"}, "does not write the text; pass another template"),
    # These write the text behind the results.
    (GEMMA.replace("gemma4_v2 ", ""), {"call and text"}, "once a message follows; pass another template"),
    # They look for reasoning in the text.
    (
        f"{TAGGED.replace('qwen3_8 ', '')} {GEMMA} qwen3",
        {"markup in text"},
        "interprets markup in the text of the answer; escape this markup",
    ),
    # An argument with the tag that ends arguments, or calls, cannot be read.
    (f"{TAGGED} {GEMMA}", {"markup in call"}, "read back as .*; pass another template"),
)
"""Templates, the conversations that they cannot write, and the reason with the remedy."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_are_what_the_template_writes_or_an_error_names_the_remedy(name):
    base = name.removesuffix("_training")
    wanted = {scene: reason for names, some, reason in REFUSED if base in names.split() for scene in some}
    found = refused(name)
    assert sorted(found) == sorted(wanted)
    for scene, reason in wanted.items():
        assert re.search(reason, found[scene], re.DOTALL)
