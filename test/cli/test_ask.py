"""`torchrl-agentic rollout` with questions: the tiny model answers them, and the answers are scored."""

import json

import pytest
from typer.testing import CliRunner

from torchrl_agentic.cli.main import app
from torchrl_agentic.records import read_records
from torchrl_agentic.testing import TINY, tiny_questions


def run(*arguments):
    return CliRunner().invoke(app, ["rollout", *map(str, arguments)])


def test_the_command_line_asks_a_model_folder(tmp_path):
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
        ("questions: [q.jsonl]", "questions need a model"),
        ("model: {path: tiny}", "a model needs questions: write 'questions:"),
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
    (tmp_path / "bad.jsonl").write_text('{"text": "?"}\n')
    (tmp_path / "c.yaml").write_text(text)
    result = run(tmp_path / "c.yaml", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert problem in result.output.replace("\n", "")
