"""The command line replays a record, says what differs, and names each mistake in a configuration."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app
from torchrl_agentic.records import TrajectoryRecord, read_records
from torchrl_agentic.sandbox.bubblewrap import why_not

EXAMPLES = Path(__file__).parents[2] / "examples"
works = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
CALL = '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
YAML = "conversations: [{file}]\ntools: [{tools}]\n{more}"


def _rollout(folder: Path, config: str, *more: str) -> Result:
    (folder / "config.yaml").write_text(config)
    return CliRunner().invoke(
        app, ["rollout", str(folder / "config.yaml"), "--out", str(folder / "out.jsonl"), *more]
    )


def _chat(path: Path, *messages: tuple[str, str], name: str = "c") -> None:
    data = {"name": name, "messages": [{"role": role, "content": content} for role, content in messages]}
    with path.open("a") as file:
        file.write(json.dumps(data) + "\n")


GSM8K = YAML.format(file="gsm8k.json", tools="{python: {name: code_interpreter}}", more="")


@works
def test_the_recorded_result_is_computed_again(tmp_path: Path):
    shutil.copy(EXAMPLES / "gsm8k_code_interpreter.json", tmp_path / "gsm8k.json")
    result = _rollout(tmp_path, GSM8K)
    assert result.exit_code == 0, result.output
    (record,) = read_records(tmp_path / "out.jsonl")
    assert isinstance(record, TrajectoryRecord)
    assert [result.text for _, _, result in record.calls] == ["220000.0"]


@works
def test_different_record_is_reported_with_exit_code_1(tmp_path: Path):
    text = (EXAMPLES / "gsm8k_code_interpreter.json").read_text()
    (tmp_path / "gsm8k.json").write_text(text.replace('"content": "220000.0"', '"content": "230000.0"'))
    result = _rollout(tmp_path, GSM8K)
    assert result.exit_code == 1, result.output
    assert "230000.0" in result.output
    assert "220000.0" in result.output


@works
def test_the_demo_passes(tmp_path: Path):
    result = CliRunner().invoke(
        app, ["rollout", str(EXAMPLES / "demo.yaml"), "--out", str(tmp_path / "o.jsonl")]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (YAML.format(file="none.jsonl", tools="stop", more=""), ["none.jsonl"]),
        ("conversation: [x]", ["config.yaml", "conversations"]),
        ("conversations: 3", ["config.yaml", "list"]),
        (YAML.format(file="good.jsonl", tools="pyton", more=""), ["config.yaml", "pyton", "python"]),
        (YAML.format(file="good.jsonl", tools="{stop: {x: 1}}", more=""), ["config.yaml", "stop", "x"]),
        (
            YAML.format(file="good.jsonl", tools="stop", more="limits: {stop: {max_concurrent: 0}}"),
            ["config.yaml", "max_concurrent", "1 or more"],
        ),
        (
            YAML.format(file="good.jsonl", tools="stop", more="limits: {nope: {max_concurrent: 1}}"),
            ["config.yaml", "nope", "stop"],
        ),
        (YAML.format(file="good.jsonl", tools="stop", more="parser: hermse"), ["config.yaml", "hermes"]),
        (YAML.format(file="bad.jsonl", tools="stop", more=""), ["bad.jsonl", "line 2"]),
        (YAML.format(file="question.jsonl", tools="stop", more=""), ["question.jsonl", "assistant"]),
    ],
    ids=[
        "missing", "key", "type", "tool", "options", "limits", "limit of none", "parser", "line", "question",
    ],
)  # fmt: skip
def test_a_mistake_exits_with_2_and_names_file_and_expectation(tmp_path: Path, config: str, words: list[str]):
    _chat(tmp_path / "good.jsonl", ("user", "q"), ("assistant", "a"))
    _chat(tmp_path / "bad.jsonl", ("user", "q"), ("assistant", "a"))
    with (tmp_path / "bad.jsonl").open("a") as file:
        file.write("{oops\n")
    _chat(tmp_path / "question.jsonl", ("user", "q"))
    result = _rollout(tmp_path, config)
    assert result.exit_code == 2, result.output
    told = "".join(result.output.split())
    for word in words:
        assert "".join(word.split()) in told


def test_a_configuration_that_is_not_there_exits_with_2(tmp_path: Path):
    result = CliRunner().invoke(app, ["rollout", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert "no.yaml" in "".join(result.output.split())


SAY = 'def say() -> str:\n    """Say."""\n    return "a\\x1b[31mb\\x07\\x9b2Jc\\r"\n'


@pytest.mark.parametrize("name", ["say", "\\u001b[2J\\u009bx"], ids=["output", "tool name"])
def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, name: str):
    """Control sequences in tool output and in tool names are escaped."""
    (tmp_path / "t.py").write_text(SAY)
    call = CALL.replace('"say"', f'"{name}"')
    _chat(
        tmp_path / "c.jsonl", ("user", "q\x1b[1m"), ("assistant", call), ("tool", "x"), ("assistant", "done")
    )
    config = YAML.format(file="c.jsonl", tools='{function: "t.py:say"}', more="")
    result = _rollout(tmp_path, config)
    assert result.exit_code == 1, result.output
    assert not {"\x1b", "\x07", "\x9b"} & set(result.output)


def test_conversations_of_one_name_are_both_replayed(tmp_path: Path):
    """The first stops at once; the other continues for two turns."""
    stop = CALL.replace("say", "stop")
    _chat(tmp_path / "c.jsonl", ("user", "q"), ("assistant", stop))
    _chat(tmp_path / "c.jsonl", ("user", "q"), ("assistant", "one"), ("assistant", "two"))
    result = _rollout(tmp_path, YAML.format(file="c.jsonl", tools="stop", more=""))
    assert result.exit_code == 0, result.output
    records = [one for one in read_records(tmp_path / "out.jsonl") if isinstance(one, TrajectoryRecord)]
    ends = [(len(record.turns), record.termination_reason) for record in records]
    assert ends == [(1, "stop_tool"), (2, "no_calls")]


@pytest.mark.parametrize("name", ["out", "out.json", "out.zst"])
def test_a_record_of_another_kind_is_refused(tmp_path: Path, name: str):
    result = CliRunner().invoke(app, ["rollout", str(EXAMPLES / "demo.yaml"), "--out", str(tmp_path / name)])
    assert result.exit_code == 2
    assert ".jsonl or .jsonl.zst" in " ".join(result.output.split())


@works
def test_check_says_which_sandbox_works():
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 0
    assert "bubblewrap" in result.output


def test_an_earlier_record_stays_when_the_next_rollout_cannot_begin(tmp_path: Path):
    (tmp_path / "old.jsonl").write_text("kept")
    result = CliRunner().invoke(
        app,
        [
            "rollout",
            "examples/gsm8k_code_interpreter.json",
            "--out",
            str(tmp_path / "old.jsonl"),
            "--parser",
            "x",
        ],
    )
    assert result.exit_code == 2
    assert (tmp_path / "old.jsonl").read_text() == "kept"


def test_rollout_does_not_overwrite_its_input(tmp_path: Path):
    copy = tmp_path / "copy.json"
    copy.write_text(Path("examples/gsm8k_code_interpreter.json").read_text())
    result = CliRunner().invoke(app, ["rollout", str(copy), "--out", str(copy)])
    assert result.exit_code == 2
    assert "somewhere else" in " ".join(result.output.split())
    assert "messages" in copy.read_text()


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"torchrl-agentic {version('torchrl-agentic')}\n")


@pytest.mark.parametrize("more", [[], ["--model", "tiny"]])
def test_unknown_engine_error_lists_the_engines(tmp_path: Path, more: list[str]):
    (tmp_path / "q.jsonl").write_text("{}")
    result = CliRunner().invoke(app, ["rollout", str(tmp_path / "q.jsonl"), "--engine", "magic", *more])
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "Invalid value for --engine: no engine is named 'magic'; engines: transformers, vllm, op" in said
    assert "pydantic" not in result.output
