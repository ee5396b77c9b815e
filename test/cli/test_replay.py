"""`rollout --replay` says what tools answer otherwise than a dump has it, and why something is left out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app
from torchrl_agentic.records import TrajectoryRecord, read_records
from torchrl_agentic.sandbox.bubblewrap import why_not

EXAMPLES = Path(__file__).parents[2] / "examples"
works = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")


def call(name: str, **args: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>"


def _run(*words: object) -> Result:
    return CliRunner().invoke(app, ["rollout", *map(str, words)])


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A folder with a recorded rollout and its tools."""
    (tmp_path / "tools.py").write_text(
        'def say(word: str) -> str:\n    """Say."""\n    return word + " at 10:31"\n'
    )
    (tmp_path / "tools.yaml").write_text("tools: [{function: 'tools.py:say'}, stop]\n")
    chats = [
        {"name": name, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]}
        for name, said in (("a", call("say", word="hello")), ("b", call("say", wrong=1)), ("c", call("stop")))
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "chats.yaml").write_text(
        "conversations: [chats.jsonl]\n" + (tmp_path / "tools.yaml").read_text()
    )
    result = _run(tmp_path / "chats.yaml", "--out", tmp_path / "dump/0.jsonl")
    assert result.exit_code == 0, result.output
    return tmp_path / "dump"


@works
def test_demo_gives_the_recorded_results():
    """`make demo-records` writes the record. It has every kind of error, with its message."""
    result = _run("--replay", EXAMPLES / "demo_records.jsonl", EXAMPLES / "demo.yaml")
    assert result.exit_code == 0, result.output
    assert "Results of 47 turns equal" in result.output


def test_the_record_of_the_demo_holds_all_kinds_of_errors():
    records = [
        one for one in read_records(EXAMPLES / "demo_records.jsonl") if isinstance(one, TrajectoryRecord)
    ]
    statuses = {result.status for record in records for _, _, result in record.calls}
    assert {"ok", "error", "malformed", "unknown_tool", "invalid_args", "timeout"} <= statuses


def test_a_dump_that_is_answered_alike_exits_with_0(dump: Path):
    result = _run("--replay", dump, dump.parent / "tools.yaml")
    assert result.exit_code == 0, result.output
    assert "Results of 3 turns equal" in result.output


def test_difference_is_printed_with_its_place_and_exit_code_1(dump: Path):
    tools = dump.parent / "tools.py"
    tools.write_text(tools.read_text().replace("10:31", "line\\n10:45\x1b"))
    result = _run("--replay", dump, dump.parent / "tools.yaml")
    assert result.exit_code == 1, result.output
    for words in ("a, turn 0, call 0 say: another text", "hello at 10:31", "10:45", "1 in text alone"):
        assert words in result.output
    assert "\x1b" not in result.output


def test_a_tool_that_is_gone_is_a_difference_in_status(dump: Path):
    (dump.parent / "tools.yaml").write_text("tools: [stop]\n")
    result = _run("--replay", dump, dump.parent / "tools.yaml", "--show", 0)
    assert result.exit_code == 1, result.output
    told = " ".join(result.output.split())
    assert "1 in status (invalid_args → unknown_tool), 1 in status (ok → unknown_tool)" in told
    assert "… 2 more" in told


def test_ignored_text_is_not_a_difference(dump: Path):
    tools = dump.parent / "tools.py"
    tools.write_text(tools.read_text().replace("10:31", "10:45"))
    result = _run(
        "--replay", dump, dump.parent / "tools.yaml", "--ignore", r"\d+:\d+", "--ignore", "(?i)NOTHING"
    )
    assert result.exit_code == 0, result.output


def test_unreplayable_trajectories_are_reported_and_the_rest_replayed(dump: Path):
    path = dump / "0.jsonl"
    line = next(line for line in path.read_text().splitlines() if "hello" in line)
    secret = line.replace("hello", "[redacted]")
    with path.open("a") as file:
        file.write(secret + '\n{"input": "q", "output": "a", "uid": "verl-1"}\n{"schema_ver')
    result = _run("--replay", dump, dump.parent / "tools.yaml")
    told = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert "Results of 3 turns equal" in told
    assert "1 left out: it holds redacted secrets" in told
    assert "1 left out: it holds only texts, no turns and calls: verl-1" in told
    assert "0.jsonl, line 6" in told


def test_replay_can_be_recorded(dump: Path):
    out = dump.parent / "now.jsonl"
    assert _run("--replay", dump, dump.parent / "tools.yaml").exit_code == 0
    assert not out.exists()
    out.touch()
    out.chmod(0o640)
    assert _run("--replay", dump, dump.parent / "tools.yaml", "--out", out).exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o640  # the file that it replaces had these
    assert {record.trajectory for record in read_records(out)} == {"a", "b", "c"}


def test_errors_exit_with_2_and_name_the_remedy(dump: Path):
    config = dump.parent / "tools.yaml"
    (dump.parent / "empty.jsonl").write_text("")
    for words, told in (
        (["--replay", dump], "name them"),
        (["--replay", dump, dump.parent / "chats.jsonl"], "name them"),
        (["--replay", dump.parent / "none", config], "none"),
        (["--replay", dump, dump.parent / "none.yaml"], "none.yaml"),
        (["--replay", dump, config, "--ignore", "("], "regular expression"),
        (["--replay", dump, config, "--out", dump / "0.jsonl"], "somewhere else"),
        (["--replay", dump, config, "--out", dump.parent / "x.txt"], ".jsonl"),
        (["--replay", dump, config, "--model", "tiny"], "--model"),
        (["--replay", dump.parent / "empty.jsonl", config], "nothing to replay"),
        (["--ignore", "x", config], "--replay"),
        ([], "configuration"),
    ):
        result = _run(*words)
        assert result.exit_code == 2, (words, result.output)
        assert told.replace(" ", "") in "".join(result.output.replace("│", "").split()), (
            words,
            result.output,
        )
