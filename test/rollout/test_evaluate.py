"""Asking the tiny model: every question is answered once, and ends where the model ends it."""

import asyncio
import json

import pytest
import torch
from torchrl.envs import Compose
from typer.testing import CliRunner

from torchrl_agentic import EndTrajectory, Message, PythonTool, ToolCompose
from torchrl_agentic.cli.main import app
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import Engine, RecordedEngine, ScriptedEngine, TransformersEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.records import read_records
from torchrl_agentic.rollout import Task, rollout, tasks_of
from torchrl_agentic.rollout.evaluate import Sample, evaluate
from torchrl_agentic.testing import TINY, load_tiny, tiny_questions

SYSTEM = "You solve problems with a Python tool."


@pytest.fixture(scope="module")
def tiny():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_tiny()
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["tokens", "history"])
def test_all_are_answered_in_their_order_also_when_the_last_batch_is_not_full(tiny, mode):
    asked = [
        Sample(f"q{index}", (Message("system", SYSTEM), Message("user", one["query"])), one["answer"])
        for index, one in enumerate(tiny_questions(5, seed=3))
    ]
    turns = []
    answers = list(
        evaluate(
            asked,
            [PythonTool()],
            *tiny,
            rows=2,
            temperature=0,
            max_new_tokens=64,
            mode=mode,
            recorder=turns.append,
        )
    )
    assert [answer.sample for answer in answers] == asked
    assert sum(answer.reward for answer in answers) >= 4
    assert all(answer.trajectory.has_ended for answer in answers)
    assert len(turns) == sum(
        sum(message.role == "assistant" for message in answer.trajectory.messages) for answer in answers
    )
    assert all((answer.trajectory.ledger is not None) == (mode == "tokens") for answer in answers)


class Counting(Engine):
    """Counts the requests to another engine."""

    def __init__(self, engine):
        self.engine, self.keys = engine, []
        self.version, self.max_concurrent = engine.version, engine.max_concurrent

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.keys.append(key)
        return await self.engine.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

    async def update(self, weights):
        return await self.engine.update(weights)

    async def close(self):
        await self.engine.close()


def test_trajectories_that_have_ended_are_not_asked_again(tiny):
    model, tokenizer = tiny
    engine = Counting(TransformersEngine(model, tokenizer, temperature=0))
    asked = tiny_questions(12, seed=4)  # two of which take two calls in turn
    transforms = Compose(ToolCompose([PythonTool()]), EndTrajectory(max_turns=4, when_no_calls=True))
    found = rollout(transforms, engine, tokenizer, tasks_of(asked, SYSTEM), max_turns=4, max_new_tokens=64)
    event_loop.run(engine.close())
    assert [one.task.name for one in found] == [str(number) for number in range(12)]
    assert [one.task.answer for one in found] == [one["answer"] for one in asked]
    assert len(engine.keys) == sum(len(one.turns) for one in found)
    assert len(set(engine.keys)) == 12
    assert all(one.has_ended for one in found)
    assert not any(one.token_drift for one in found)
    assert not any(one.ledger.mask[-1] for one in found), "the boundary behind the last answer"


def test_a_crash_of_the_engine_or_the_tasks_is_raised(tiny):
    _, tokenizer = tiny

    def script(key, turn, ids):
        raise ZeroDivisionError("of the engine")

    def broken():
        yield {"query": "q"}
        raise LookupError("of the tasks")

    engine = ScriptedEngine(script, tokenizer)
    with pytest.raises(InfrastructureError, match="of the engine"):
        rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks_of(["q"]))
    with pytest.raises(LookupError, match="of the tasks"):
        rollout(ToolCompose([PythonTool()]), ScriptedEngine([["a"]], tokenizer), tokenizer, broken())


def test_a_rollout_works_inside_a_running_event_loop(tiny):
    _, tokenizer = tiny
    engine = ScriptedEngine([["one"], ["two"]], tokenizer)

    async def main():
        return rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks_of(["q", "r"]))

    assert [one.answer for one in asyncio.run(main())] == ["one", "two"]


def test_results_come_in_the_order_of_the_tasks_whatever_ends_first(tiny):
    _, tokenizer = tiny
    ended, last = [], asyncio.Event()

    async def reward(trajectory):
        if trajectory.task.name == "0":
            await last.wait()
        if trajectory.task.name == "2":
            last.set()
        ended.append(trajectory.task.name)
        return 0.0

    engine = ScriptedEngine(lambda key, turn, ids: key.partition("/")[0], tokenizer)
    tasks = (task for task in tasks_of(["q", "r", "s"]))
    found = rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks, reward=reward)
    assert ended[-1] == "0"
    assert [one.answer for one in found] == ["0", "1", "2"]


def test_a_task_bounds_its_own_turns(tiny):
    _, tokenizer = tiny
    say = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    engine = ScriptedEngine(lambda key, turn, ids: say, tokenizer)
    message = [{"role": "user", "content": "q"}]
    tasks = [Task("a", message, max_turns=1), Task("b", message), Task("c", message, max_turns=9)]
    found = rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks, max_turns=3)
    assert [(len(one.turns), one.reason) for one in found] == [(1, "max_turns")] + 2 * [(3, "max_turns")]
    with pytest.raises(ValueError, match="max_turns"):
        rollout(ToolCompose([]), engine, tokenizer, [Task("a", message, max_turns=0)])


def test_an_engine_of_messages_is_evaluated_without_tokens(tiny):
    _, tokenizer = tiny
    samples = [Sample("a", (Message("user", "q"),), "49"), Sample("b", (Message("user", "r"),))]
    engine = RecordedEngine({"a": [Message("assistant", "It is 49.")], "b": [Message("assistant", "no")]})
    found = list(evaluate(samples, [PythonTool()], engine, tokenizer))
    assert [one.reward for one in found] == [1.0, None]
    assert [one.trajectory.ledger for one in found] == [None, None]


def test_models_that_cannot_be_evaluated_are_rejected(tiny):
    sample = [Sample("a", (Message("user", "q"),))]
    with pytest.raises(TypeError, match="a transformers model, a vLLM engine or an Engine"):
        list(evaluate(sample, [], "model", tiny[1]))
    with pytest.raises(ValueError, match="structural tags need vLLM"):
        list(evaluate(sample, [], *tiny, tool_choice="auto"))
    with pytest.raises(ValueError, match="'tokens' or 'history'"):
        list(evaluate(sample, [], *tiny, mode="text"))


def run(*arguments):
    return CliRunner().invoke(app, ["rollout", *map(str, arguments)])


def test_the_command_line_asks_a_model_folder(tmp_path, tiny):
    questions = tmp_path / "questions.jsonl"
    lines = [{"query": one["query"], "answer": one["answer"]} for one in tiny_questions(3, seed=3)]
    lines.append({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "name": "mine"})
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    result = run(questions, "--model", TINY, "--out", out, "--show", 1)
    assert result.exit_code == 0, result.output
    assert "of 3 answers are correct" in result.output
    assert "tokens sampled" in result.output
    assert "4 conversations" in result.output
    records = {record.trajectory: record for record in read_records(out)}
    mine = records.pop("mine")
    assert (mine.gts, mine.score) == (None, None)
    assert {record.gts for record in records.values()} == {line["answer"] for line in lines[:3]}
    said = f"{sum(record.score for record in records.values()):.0f} of 3 answers are correct"
    assert said in result.output
    for record in (*records.values(), mine):
        assert record.termination_reason == "no_calls"
        assert "".join(record.tokens.texts).startswith("<|im_start|>")


def test_the_settings_of_verls_trainer_act_on_the_command_line(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from torchrl_agentic import tool\n\n@tool\ndef python(code: str) -> str:\n"
        "    'Run it.'\n    return 'HEAD' + 500 * 'x'\n"
    )
    rows = [{"query": one["query"]} for one in tiny_questions(1, seed=3)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    (tmp_path / "c.yaml").write_text(
        "questions: [q.json]\nmodel: {path: tiny, temperature: 0, max_new_tokens: 64}\n"
        "actor_rollout_ref: {rollout: {name: vllm, multi_turn: {function_tool_path: tools.py,"
        " max_assistant_turns: 2, max_tool_response_length: 60, tool_response_truncate_side: left}}}\n"
    )
    result = run(tmp_path / "c.yaml", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    (record,) = read_records(tmp_path / "out.jsonl")
    assert "HEADxxxx" in "".join(record.tokens.texts)
    assert "x[… 4" in "".join(record.tokens.texts), "cut to 60 characters, at the end"
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace("turns: 2", "turns: 1"))
    assert run(tmp_path / "c.yaml", "--out", tmp_path / "out.jsonl").exit_code == 0
    (record,) = read_records(tmp_path / "out.jsonl")
    assert (len(record.turns), record.termination_reason) == (1, "max_turns")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("questions: [q.jsonl]", "give both"),
        ("questions: [q.jsonl]\nconversations: [c.jsonl]\nmodel: {path: tiny}", "not both"),
        ("questions: [q.jsonl]\nmodel: {path: tiny, rows: 0}", "model.rows"),
        ("questions: [q.jsonl]\nmodel: {path: tiny, engine: magic}", "transformers"),
        ("questions: [missing.jsonl]\nmodel: {path: tiny}", "missing.jsonl"),
        ("questions: [bad.jsonl]\nmodel: {path: tiny}", "bad.jsonl, line 1"),
        ("questions: [q.jsonl]\nmodel: {path: /nowhere/at/all}", "/nowhere/at/all"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, text, problem):
    (tmp_path / "q.jsonl").write_text('{"query": "What is 1 + 1?"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "c.yaml").write_text(text)
    result = run(tmp_path / "c.yaml", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert problem in result.output.replace("\n", "")
