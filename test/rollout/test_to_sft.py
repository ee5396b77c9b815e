"""`to_sft`: finished conversations as data for supervised fine-tuning."""

import copy
import itertools
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from helpers.model_families import FAMILIES, QWEN_TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import Compose
from torchrl.objectives.llm import SFTLoss
from typer.testing import CliRunner

from torchrl_agentic import Message, PythonTool, RecordTransform, ToolCompose, get_parser
from torchrl_agentic.cli.main import app
from torchrl_agentic.collectors import Score
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.messages import CallError
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.records import Recorder, read_records
from torchrl_agentic.rollout import Conversation, answer_reward, rollout, to_sft, training_policy
from torchrl_agentic.testing import chat_tokenizer, load_tiny, tiny_questions
from torchrl_agentic.tokens.ledger import TokenLedger

MODEL, TOKENIZER = load_tiny()
TOOLS = (PythonTool(),)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trajectories of the tiny model, and the folder with their records."""
    folder = tmp_path_factory.mktemp("dump")
    with Recorder(folder) as recorder:
        compose = ToolCompose([PythonTool()], recorder=recorder)
        found = rollout(
            Compose(compose, RecordTransform()),
            TransformersEngine(copy.deepcopy(MODEL), TOKENIZER, temperature=0.0),
            TOKENIZER,
            tiny_questions(6),
            max_new_tokens=64,
            reward=lambda one: answer_reward(one.answer, str(one.task.answer)),
        )
    assert {one.reason for one in found} == {"no_calls"}
    assert sum(one.n_calls for one in found) >= 6
    return found, folder


def without_ledgers(trajectories):
    return [replace(one, ledger=None) for one in trajectories]


def structured(trajectory):
    """Return a trajectory as a model behind an API gives it: calls apart from the text, no tokens."""
    turns = []
    for turn in trajectory.turns:
        calls = tuple(
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.args)},
            }
            for call in turn.outcome.calls
        )
        text = turn.outcome.cleaned_text.strip()
        turns.append(replace(turn, message=Message("assistant", text or None, calls)))
    return replace(trajectory, turns=tuple(turns), ledger=None)


def columns(ledger):
    """Return the columns that a ledger stands for, up to its last sampled token."""
    stop = max(place for place, bit in enumerate(ledger.mask) if bit) + 1
    ids, mask = list(ledger.ids)[:stop], [int(bit) for bit in ledger.mask][:stop]
    labels = [token if bit else -100 for token, bit in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "assistant_masks": mask, "labels": labels}


# Tokens


def test_the_tokens_and_masks_of_a_ledger_are_kept_bit_for_bit(run):
    trajectories, _ = run
    data = to_sft(trajectories, TOKENIZER, tools=TOOLS)
    assert data.token_rows() == [columns(one.ledger) for one in trajectories]
    assert dict(data.left_out) == {}


@pytest.mark.parametrize("form", ["text", "structured"])
def test_conversations_without_tokens_are_encoded_as_the_rollout_wrote_them(run, form):
    trajectories, _ = run
    given = without_ledgers(trajectories) if form == "text" else list(map(structured, trajectories))
    data = to_sft(given, TOKENIZER, tools=TOOLS)
    assert data.token_rows() == [columns(one.ledger) for one in trajectories]


def test_records_have_the_tokens_of_their_trajectories(run):
    trajectories, folder = run
    by_name = {row.name: row.token_row for row in to_sft(folder, TOKENIZER, tools=TOOLS)}
    assert len(by_name) == len(trajectories)
    assert by_name == {one.name: columns(one.ledger) for one in trajectories}
    plain = [replace(record, tokens=None) for record in read_records(folder)]
    assert {row.name: row.token_row for row in to_sft(plain, TOKENIZER, tools=TOOLS)} == by_name


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_the_batch_is_the_rows_and_a_loss_falls_over_it(run):
    trajectories, _ = run
    data = to_sft(without_ledgers(trajectories[:2]), TOKENIZER, tools=TOOLS)
    batch = data.batch()
    for row, wanted in zip(batch.unbind(0), data.token_rows(), strict=True):
        assert row["tokens", "full"].tolist() == wanted["input_ids"]
        assert row["masks", "all_assistant_mask"].long().tolist() == wanted["assistant_masks"]
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)  # it knows the answers too well to learn them
    loss = SFTLoss(training_policy(model, TOKENIZER), tokenizer=TOKENIZER)
    loss.set_keys(history="tokens")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        value = loss(batch).loss_sft
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_trl_trains_on_the_tokens_and_masks_and_on_the_messages(run, tmp_path):
    from trl import SFTConfig, SFTTrainer

    trajectories, _ = run
    data = to_sft(trajectories[:2], TOKENIZER, tools=TOOLS)
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
    options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1}
    counts = {}
    for name, rows in (("tokens", data.token_rows()), ("messages", data.message_rows())):
        trainer = SFTTrainer(
            copy.deepcopy(MODEL),
            args=SFTConfig(str(tmp_path), assistant_only_loss=name == "messages", **options),
            train_dataset=Dataset.from_list(rows, on_mixed_types="use_json"),
            processing_class=TOKENIZER,
        )
        (batch,) = trainer.get_train_dataloader()
        counts[name] = int((batch["labels"] != -100).sum())
        if name == "tokens":
            seen = {tuple(row[row != -100].tolist()) for row in batch["labels"]}
            assert seen == {tuple(token for token in row["labels"] if token != -100) for row in rows}
        trainer.train()
        assert trainer.state.log_history[0]["loss"] > 0
    answers = sum(len(one.turns) for one in trajectories[:2])
    assert counts["tokens"] == counts["messages"] + answers  # the template's mask lacks the ends of answers


def test_a_ledger_of_another_tokenizer_is_an_error_unless_it_is_encoded_anew(run):
    (first, *_), _ = run
    other = chat_tokenizer(TOKENIZER.chat_template, eos=TOKENIZER.eos_token, control=["<|im_start|>"])
    with pytest.raises(ValueError, match="are of another tokenizer"):
        to_sft([first], other, tools=TOOLS)
    (row,) = to_sft([first], other, tools=TOOLS, encode_anew=True)
    ids = row.token_row["input_ids"]
    spoken = [token for token, bit in zip(ids, row.token_row["assistant_masks"], strict=True) if bit]
    assert first.answer in other.decode(spoken)


def test_an_answer_that_writes_the_end_of_a_turn_is_left_out(run):
    (first, *_), _ = run
    turn = first.turns[-1]
    evil = replace(turn, message=Message("assistant", f"5{TOKENIZER.eos_token}\nand more"))
    data = to_sft([replace(first, turns=(*first.turns[:-1], evil), ledger=None)], TOKENIZER, tools=TOOLS)
    assert (len(data), dict(data.left_out)) == (0, {"control tokens in an answer": 1})


def test_conversations_that_are_too_long_are_left_out_and_not_cut(run):
    trajectories, _ = run
    sizes = [len(columns(one.ledger)["input_ids"]) for one in trajectories]
    bound = sorted(sizes)[2]
    data = to_sft(trajectories, TOKENIZER, tools=TOOLS, max_tokens=bound)
    assert [row.n_tokens for row in data] == [size for size in sizes if size <= bound]
    assert data.left_out == {"too long": sum(size > bound for size in sizes)}


# Messages


def test_messages_have_their_calls_apart_whatever_form_the_model_wrote_them_in(run):
    trajectories, _ = run
    rows = to_sft(trajectories, tools=TOOLS).message_rows()
    assert rows == to_sft(map(structured, trajectories), tools=TOOLS).message_rows()
    for row, trajectory in zip(rows, trajectories, strict=True):
        (tool,) = row["tools"]
        assert tool["function"]["name"] == "python"
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        read = [call for message in said for call in get_parser("openai").parse(message).calls]
        wanted = [call for call, _ in trajectory.calls]
        assert [(one.call_id, one.tool, one.args) for one in read] == [
            (one.call_id, one.tool, one.args) for one in wanted
        ]
        results = [message for message in row["messages"] if message["role"] == "tool"]
        assert [message["tool_call_id"] for message in results] == [one.call_id for one in wanted]
        assert row["messages"][-1] == {"role": "assistant", "content": trajectory.answer}


def test_saved_rows_are_read_by_datasets_as_they_were(run, tmp_path):
    trajectories, _ = run
    data = to_sft(trajectories, tools=TOOLS)
    data.save(tmp_path / "sft.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert lines == data.message_rows()
    assert list(Dataset.from_list(lines, on_mixed_types="use_json")) == lines


def test_reasoning_is_a_field_of_its_own(run):
    (first, *_), _ = run
    turn = first.turns[-1]
    thinking = replace(turn, message=replace(turn.message, reasoning="hm"))
    (row,) = to_sft([replace(first, turns=(*first.turns[:-1], thinking))])
    assert row.messages[-1] == {"role": "assistant", "content": first.answer, "reasoning_content": "hm"}


def test_a_recorded_conversation_of_messages_can_be_used_too():
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "2 + 3"}'}}
    messages = [
        Message("user", "2 + 3?"),
        Message("assistant", None, (call,)),
        Message("tool", "5", tool_call_id="c1"),
        Message("assistant", "5"),
    ]
    (row,) = to_sft([Conversation.of("a", messages)], TOKENIZER, tools=TOOLS)
    assert [message["role"] for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"code": "2 + 3"}
    ids, mask = row.token_row["input_ids"], row.token_row["assistant_masks"]
    spoken = TOKENIZER.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    assert spoken.count(TOKENIZER.eos_token) == 2
    assert '{"code": "2 + 3"}' in spoken
    assert "tool_response" not in spoken


# Answers of other models


def family(name, **changes):
    """Return the tokenizer of a model family, and the options of `to_sft` for it."""
    made = replace(FAMILIES[name], **changes)
    tokenizer = made.tokenizer()
    stops = tokenizer.convert_tokens_to_ids(list(made.stops))
    return tokenizer, {"tools": TOOLS, "tokenizer_options": {"stop_token_ids": stops}}


def spoken(row, tokenizer):
    """Return the texts that the row trains on."""
    ids, mask = row.token_row["input_ids"], row.token_row["assistant_masks"]
    groups = itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for bit, group in groups if bit]


def call_of(code, call_id="call00000"):
    arguments = json.dumps({"code": code})
    return {"id": call_id, "type": "function", "function": {"name": "python", "arguments": arguments}}


QUESTION, RESULT = Message("user", "2 + 3?"), Message("tool", "5", tool_call_id="call00000")
CALLED = (QUESTION, Message("assistant", None, (call_of("2 + 3"),)), RESULT, Message("assistant", "5"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qwen3", "<think>\n\n</think>\n\n5<|im_end|>"),
        ("qwen3_6", "\n</think>\n\n5<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>5<|return|>"),
        ("glm4moe", "\n<think></think>\n5<|user|>"),
    ],
)
def test_a_plain_answer_has_the_head_and_the_end_that_the_template_writes(name, wanted):
    tokenizer, options = family(name)
    (row,) = to_sft([Conversation.of("a", [QUESTION, Message("assistant", "5")])], tokenizer, **options)
    assert spoken(row, tokenizer) == [wanted]


def test_calls_and_answers_end_with_the_stop_token_that_the_template_writes_there():
    tokenizer, options = family("glm4moe")
    (row,) = to_sft([Conversation.of("a", CALLED)], tokenizer, **options)
    called, answered = spoken(row, tokenizer)
    assert called.endswith("</tool_call><|observation|>")
    assert answered.endswith("\n5<|user|>")
    options["tokenizer_options"]["stop_token_ids"].pop(0)
    with pytest.raises(
        ValueError, match=r"with '<\|observation\|>', which is not among the stop tokens.*add"
    ):
        to_sft([Conversation.of("a", CALLED)], tokenizer, **options)


def test_a_stop_token_in_the_middle_of_an_answer_is_an_error():
    tokenizer, options = family("gptoss", stops=("<|call|>", "<|end|>"))
    thought = Message("assistant", "5", reasoning="hm")
    with pytest.raises(
        ValueError, match=r"'<\|end\|>' in the middle of the answer; leave it out of stop_token"
    ):
        to_sft([Conversation.of("a", [QUESTION, thought])], tokenizer, **options)


def test_calls_that_the_template_omits_are_an_error_or_left_out():
    tokenizer, options = family("lfm2")
    given = [Conversation.of("a", CALLED), Conversation.of("b", [QUESTION, Message("assistant", "5")])]
    with pytest.raises(
        ValueError, match=r"cannot write 'a': it does not write the call of 'python'.*or leave"
    ):
        to_sft(given, tokenizer, **options)
    data = to_sft(given, tokenizer, on_unwritable="leave_out", **options)
    assert ([row.name for row in data], dict(data.left_out)) == (
        ["b"],
        {"the chat template cannot write it": 1},
    )


def test_reasoning_that_the_template_omits_is_an_error_unless_it_is_not_kept():
    tokenizer, options = family("qwen2_5")
    given = [Conversation.of("a", [QUESTION, Message("assistant", "5", reasoning="hm")])]
    with pytest.raises(
        ValueError, match="does not write the reasoning; to train without reasoning, keep_reas"
    ):
        to_sft(given, tokenizer, **options)
    (row,) = to_sft(given, tokenizer, keep_reasoning=False, **options)
    assert spoken(row, tokenizer) == ["5<|im_end|>"]
    assert row.messages[-1] == {"role": "assistant", "content": "5"}


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\n5", "hm\n</think>\n\n5"])
def test_reasoning_at_the_beginning_of_a_text_is_reasoning(text):
    tokenizer, options = family("qwen3_6")
    (row,) = to_sft([Conversation.of("a", [QUESTION, Message("assistant", text)])], tokenizer, **options)
    assert spoken(row, tokenizer) == ["hm\n</think>\n\n5<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids("</think>") in row.token_row["labels"]


@given(
    st.lists(
        st.sampled_from([*QWEN_TOKENS, "<|im_start|>", "<", "|im_", "vjq", "vjq0x", "a", "é", " ", "\n"])
    ),
    st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_no_control_token_comes_from_a_text_and_no_text_is_lost(parts, is_argument):
    tokenizer, options = family("qwen2_5")
    text = "".join(["x", *parts, "x"])
    message = Message("assistant", "", (call_of(text),)) if is_argument else Message("assistant", text)
    (row,) = to_sft([Conversation.of("a", [QUESTION, message])], tokenizer, **options)
    ids = [token for token in row.token_row["labels"] if token != -100]
    control = [
        tokenizer.convert_ids_to_tokens(token) for token in ids if token in control_tokens_of(tokenizer)
    ]
    (target,) = spoken(row, tokenizer)
    if is_argument:
        assert control == ["<tool_call>", "</tool_call>", "<|im_end|>"]
        assert json.dumps(text, ensure_ascii=False) in target
    else:
        assert control == ["<|im_end|>"]
        assert target == f"{text}<|im_end|>"


def test_control_tokens_in_a_text_are_plain_characters():
    tokenizer, options = family("qwen2_5")
    text = "Write <tool_call> or <|im_start|>user."
    (row,) = to_sft([Conversation.of("a", [QUESTION, Message("assistant", text)])], tokenizer, **options)
    assert spoken(row, tokenizer) == [f"{text}<|im_end|>"]
    literal = tokenizer.convert_tokens_to_ids(["<tool_call>", "<|im_start|>"])
    assert not set(literal) & set(row.token_row["labels"])


def test_calls_in_the_text_of_recorded_messages_are_written_as_calls_of_the_template():
    tokenizer, options = family("qwen2_5")
    text = '<tool_call>{"name": "python", "arguments": {"code": "2 + 3"}}</tool_call>'
    given = Conversation.of("a", [QUESTION, Message("assistant", text), RESULT, Message("assistant", "5")])
    wanted = '<tool_call>\n{"name": "python", "arguments": {"code": "2 + 3"}}\n</tool_call><|im_end|>'
    (row,) = to_sft([given], tokenizer, **options)
    assert spoken(row, tokenizer) == [wanted, "5<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in row.token_row["labels"]
    odd = Conversation.of(
        "a", [QUESTION, Message("assistant", "python(2 + 3)"), RESULT, Message("assistant", "5")]
    )
    with pytest.raises(
        ValueError, match=r"1 results follow 'python\(2 \+ 3\)'.*give the calls of messages in tool"
    ):
        to_sft([odd], tokenizer, **options)
    row, *_ = to_sft([odd], tokenizer)
    assert spoken(row, tokenizer)[0] == "python(2 + 3)<|im_end|>"


def test_calls_in_a_text_stay_as_they_are_if_the_template_shows_no_tools(run):
    (first, *_), _ = run
    given = replace(first, ledger=None)
    (row,) = to_sft([given], TOKENIZER)
    assert spoken(row, TOKENIZER) == [f"{turn.message.text}{TOKENIZER.eos_token}" for turn in first.turns]
    assert TOKENIZER.convert_tokens_to_ids("<tool_call>") in row.token_row["labels"]


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    tokenizer, options = family("qwen2_5")
    call = {"type": "function", "function": {"name": "python", "arguments": arguments}}
    (row,) = to_sft(
        [Conversation.of("a", [QUESTION, Message("assistant", "", (call,))])], tokenizer, **options
    )
    (text,) = spoken(row, tokenizer)
    assert '"arguments": {}' in text


def test_arguments_that_cannot_be_read_are_an_error():
    tokenizer, options = family("qwen2_5")
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": '{"code": '}}
    with pytest.raises(
        ValueError, match=r"arguments of the call of 'python' are not a JSON object.*write them"
    ):
        to_sft([Conversation.of("a", [QUESTION, Message("assistant", "", (call,))])], tokenizer, **options)


def test_an_empty_answer_is_left_out():
    given = [Conversation.of("a", [QUESTION, Message("assistant", text)]) for text in ("", " \n", "5")]
    data = to_sft(given, TOKENIZER, tools=TOOLS)
    assert (len(data), dict(data.left_out)) == (1, {"empty answer": 2})
    only = Conversation.of("a", [QUESTION, Message("assistant", "", reasoning="hm")])
    assert dict(to_sft([only], keep_reasoning=False).left_out) == {"empty answer": 1}


def test_the_row_of_a_conversation_that_ends_with_a_result_ends_with_the_call():
    tokenizer, options = family("qwen2_5")
    (row,) = to_sft([Conversation.of("a", CALLED[:3])], tokenizer, **options)
    assert [message["role"] for message in row.messages] == ["user", "assistant"]
    (text,) = spoken(row, tokenizer)
    assert text.endswith("</tool_call><|im_end|>")


def test_a_template_without_tool_messages_takes_results_in_another_role():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer(source, eos="<|im_end|>", control=["<|im_start|>"])
    with pytest.raises(ValueError, match=r"no tools.*another tool_role="):
        to_sft([Conversation.of("a", CALLED)], tokenizer, tools=TOOLS)
    (row,) = to_sft(
        [Conversation.of("a", CALLED)], tokenizer, tools=TOOLS, tokenizer_options={"tool_role": "user"}
    )
    assert "<|im_start|>user\n5<|im_end|>" in tokenizer.decode(row.token_row["input_ids"])


def test_reasoning_that_was_cut_off_is_not_closed():
    tokenizer, options = family("qwen3_6")
    cut = Message("assistant", "", reasoning="I thi", is_complete=False)
    given = [Conversation.of("a", [QUESTION, cut])]
    (row,) = to_sft(given, tokenizer, complete_only=False, **options)
    assert spoken(row, tokenizer) == ["I thi"]


# What is left out


def test_conversations_that_did_not_end_by_themselves_are_left_out_or_marked(run):
    (first, *_), _ = run
    turn = first.turns[0]
    (call,) = turn.outcome.calls
    bad = replace(call, error=CallError("not_json", "no JSON"))
    unread = replace(turn, outcome=replace(turn.outcome, calls=(bad,)))
    cut = replace(first.turns[-1], message=replace(first.turns[-1].message, is_complete=False))
    given = [
        replace(first, reason="max_turns", terminated=False, truncated=True),
        replace(first, reason="failed"),
        replace(first, reason="refused"),
        replace(first, turns=(*first.turns[:-1], cut)),
        replace(first, turns=(unread, *first.turns[1:])),
        replace(first, turns=()),
        first,
    ]
    data = to_sft(given)
    assert len(data) == 1
    assert dict(data.left_out) == {
        "max_turns": 1,
        "failed": 1,
        "refused": 1,
        "cut off": 1,
        "unreadable call": 1,
        "no answer": 1,
    }
    marked = to_sft(given, complete_only=False)
    assert [row.reason for row in marked[:3]] == ["max_turns", "failed", "refused"]
    assert (len(marked), dict(marked.left_out)) == (6, {"no answer": 1})


def test_a_message_that_was_cut_off_has_no_end_of_turn(run):
    (first, *_), _ = run
    cut = replace(first.turns[-1], message=replace(first.turns[-1].message, is_complete=False))
    given = replace(first, turns=(*first.turns[:-1], cut), ledger=None)
    (row,) = to_sft([given], TOKENIZER, tools=TOOLS, complete_only=False)
    assert row.token_row["input_ids"] == columns(first.ledger)["input_ids"][:-1]


def test_filters_keep_the_best_of_each_task(run):
    trajectories, _ = run
    scores = [0.2, 0.9, 0.9, 0.5, 1.0, float("nan")]
    tasks = [replace(trajectories[0].task, name=name) for name in "aabbbb"]
    given = [
        replace(one, score=Score(score), task=task)
        for one, score, task in zip(trajectories, scores, tasks, strict=True)
    ]
    names = [one.name for one in given]
    assert [row.name for row in to_sft(given, best_per_task=1)] == [names[1], names[4]]
    assert [row.name for row in to_sft(given, best_per_task=2)] == [names[0], names[1], names[2], names[4]]
    kept = to_sft(given, min_score=0.5)
    assert [row.name for row in kept] == names[1:5]
    assert kept.left_out == {"low score": 2}
    assert [row.name for row in to_sft(given, where=lambda one: one.score.value == 1.0)] == [names[4]]


def test_the_reward_is_the_score_of_a_trajectory_without_one(run):
    trajectories, _ = run
    (row,) = to_sft([replace(trajectories[0], score=None, reward=0.25)])
    assert row.score == 0.25


# Bad input


def test_wrong_arguments_are_errors(run, tmp_path):
    (first, *_), _ = run
    with pytest.raises(TypeError, match="expected a Trajectory"):
        to_sft([{"messages": []}])
    with pytest.raises(FileNotFoundError):
        to_sft(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="best_per_task must be 1"):
        to_sft([first], best_per_task=0)
    with pytest.raises(ValueError, match="on_unwritable is raise or leave_out; got 'skip'"):
        to_sft([first], on_unwritable="skip")
    with pytest.raises(ValueError, match="give tokenizer="):
        to_sft([first], max_tokens=5)
    with pytest.raises(ValueError, match="have no tokens"):
        to_sft([first]).token_rows()
    with pytest.raises(ValueError, match="have no tokens"):
        to_sft([first]).batch()
    with pytest.raises(ValueError, match="there are no rows"):
        to_sft([], TOKENIZER).batch()


def test_a_line_that_cannot_be_read_is_counted(run, tmp_path):
    _, folder = run
    (file,) = folder.glob("*.jsonl")
    (tmp_path / "0.jsonl").write_text(file.read_text() + "{nonsense\n")
    data = to_sft(tmp_path)
    assert (len(data), dict(data.left_out)) == (6, {"unreadable line": 1})


def test_an_empty_ledger_is_no_answer(run):
    (first, *_), _ = run
    (row,) = to_sft([replace(first, ledger=TokenLedger())], TOKENIZER, tools=TOOLS)
    assert row.n_tokens == 0


# The command


def test_the_command_writes_the_rows_and_counts_what_it_left_out(run, tmp_path):
    trajectories, folder = run
    out = tmp_path / "sft.jsonl"
    found = CliRunner().invoke(app, ["export", str(folder), "--out", str(out), "--min-score", "0.5"])
    assert found.exit_code == 0, found.output
    kept = [one for one in trajectories if one.reward >= 0.5]
    assert len(out.read_text().splitlines()) == len(kept)
    assert f"{len(kept)} conversations" in found.output
    missing = CliRunner().invoke(app, ["export", str(tmp_path / "none"), "--out", str(out)])
    assert missing.exit_code == 2
    assert "none" in missing.output
