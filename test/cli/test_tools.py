"""`check tools` shows the schemas that a model gets, or the errors of the file."""

import json
import sys
from pathlib import Path

import pytest
from helpers.processes import run_program
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app

FUNCTIONS = '''\
from torchrl_agentic import Effects, Toolset, tool


@tool(effects=Effects(reads=["shelf"], writes=["desk"]))
def fetch(book: str) -> str:
    """Fetch a book.

    Args:
        book: Which one.
    """
    return book


class Library(Toolset):
    async def setup(self):
        @tool
        def lend(book: str) -> str:
            """Lend a book."""
            return book

        return [lend]

    async def teardown(self):
        print("left the library")
'''
TOOLS = "function_tool_path: functions.py\ntools:\n- stop\n- class_name: functions.py:Library\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def _check(folder: Path, text: str, *options: str) -> Result:
    (folder / "tools.yaml").write_text(text)
    return CliRunner(env={"COLUMNS": "300"}).invoke(
        app, ["check", "tools", str(folder / "tools.yaml"), *options]
    )


def test_each_tool_is_shown_with_its_source_its_effects_and_its_schema(folder: Path):
    found = _check(folder, TOOLS)
    assert found.exit_code == 0, found.output
    (row,) = [line for line in found.stdout.splitlines() if f"{folder / 'functions.py'}:4" in line]
    for part in ("fetch", "reads shelf; writes desk", "Fetch a book."):
        assert part in row
    assert f"{folder / 'tools.yaml'}:1" in found.stdout
    assert '"description": "Which one."' in found.stdout
    assert "lend" in found.stdout
    assert "left the library" in found.stdout


def test_all_of_it_comes_as_json_too(folder: Path):
    found = _check(folder, TOOLS.replace("- class_name: functions.py:Library\n", ""), "--json")
    told = {tool["name"]: tool for tool in json.loads(found.stdout)["tools"]}
    assert list(told) == ["stop", "fetch"]
    assert told["fetch"]["effects"] == {"reads": ["shelf"], "writes": ["desk"], "exclusive": False}
    assert told["fetch"]["source"] == f"{folder / 'functions.py'}:4"
    assert told["fetch"]["spec"]["function"]["parameters"]["required"] == ["book"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools:\n- pyton\n", ["tools.yaml:2", "pyton", "python"]),
        (TOOLS + "- class_name: functions.py:Library\n", ["2 tools are named 'lend'", "tools.yaml:5"]),
        ("tools:\n- class_name: functions.py:Libary\n", ["tools.yaml:2", "did you mean 'Library'?"]),
    ],
)
def test_a_mistake_exits_with_1_and_names_its_line(folder: Path, text: str, words: list[str]):
    found = _check(folder, text)
    assert found.exit_code == 1, found.output
    for word in words:
        assert word in found.stderr
    assert found.stdout.replace("left the library\n", "") == ""


def test_settings_for_other_transforms_are_printed_on_stderr(folder: Path):
    found = _check(folder, "tools: [stop]\nmulti_turn: {max_user_turns: 3}\n", "--json")
    assert "add TurnTokenizer(max_tool_response_chars=256, " in found.stderr
    assert "UserSimulator(max_turns=3)" in found.stderr
    assert json.loads(found.stdout)["tools"][0]["name"] == "stop"


def test_a_class_in_the_working_folder_is_found_by_its_dotted_name(folder: Path):
    (folder / "nested").mkdir()
    (folder / "nested" / "tools.yaml").write_text("tools: [{class_name: functions.Library}]\n")
    command = [Path(sys.executable).with_name("torchrl-agentic"), "check", "tools", "nested/tools.yaml"]
    found = run_program(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert "lend" in found.stdout


def test_the_file_of_a_rollout_will_do(folder: Path):
    found = _check(folder, "conversations: [a.jsonl]\n" + TOOLS, "--json")
    assert '"fetch"' in found.stdout, found.output


def test_control_characters_do_not_reach_the_terminal(folder: Path):
    (folder / "functions.py").write_text(FUNCTIONS.replace("Fetch a book", "Fetch\\x1b[31m a book"))
    for options in ((), ("--json",)):
        found = _check(folder, TOOLS, *options)
        assert found.exit_code == 0
        assert "\x1b" not in found.output
