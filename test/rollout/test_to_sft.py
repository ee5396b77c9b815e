"""`to_sft`: finished conversations as data for supervised fine-tuning."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from torchrl.envs import Compose
from torchrl.objectives.llm import SFTLoss
from typer.testing import CliRunner

from torchrl_agentic import Message, PythonTool, RecordTransform, ToolCompose, get_parser
from torchrl_agentic.cli.main import app
from torchrl_agentic.collectors import Score
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.messages import CallError
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


@pytest.fixture
def one_thread():
    """Let torch compute on one thread: those of a small model on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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
