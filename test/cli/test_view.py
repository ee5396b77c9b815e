"""`torchrl-agentic view` in the terminal and as text, and its error messages."""

import json
import sys
from pathlib import Path

import pytest
from helpers.html_pages import page_of
from helpers.processes import run_program
from helpers.viewer_dumps import VERL_LINE, three_steps, trajectory, write
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app


def _view(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["view", *arguments])


def _run(code: str) -> str:
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dump_is_printed_as_text_whole(tmp_path: Path):
    found = _view(str(three_steps(tmp_path)), "--text")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert sum(line.startswith("── turn 0 · reward 0.25") for line in lines) == 18
    assert "✗ python · timeout · queued 0.5 ms · ran 25.1 ms · call_0" in lines
    assert "  <think>First I should compute the product.</think>" in lines


def test_a_text_dump_of_verl_shows_its_turns_calls_and_results_everywhere(tmp_path: Path):
    (tmp_path / "1.jsonl").write_text(json.dumps(VERL_LINE) + "\n")
    found = _view(str(tmp_path), "--text")
    assert "2 turns · 1 call" in found.stdout
    lines = found.stdout.splitlines()
    assert "✓ code_interpreter · ok · call_0_0" in lines
    assert lines[lines.index("result") + 1] == "  42.0"
    thought = next(n for n, line in enumerate(lines) if line.endswith("characters, not closed"))
    assert "<tool_call>" not in "".join(lines[thought : thought + 4])
    report = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    told = json.loads(report.stdout)
    assert (told["total"]["turns"]["mean"], told["total"]["calls"]["mean"]) == (2, 1)
    assert [tool["tool"] for tool in told["tools"]] == ["code_interpreter"]
    assert _view(str(tmp_path), "--html", str(tmp_path / "page.html")).exit_code == 0
    (body,) = page_of(tmp_path).bodies
    kinds = [[kind for kind, _, _ in turn["said"]] for turn in body["turns"]]
    assert kinds == [["thought", "call"], ["thought", "text"]]
    assert [(call["tool"], call["result"]) for call in body["calls"]] == [("code_interpreter", "42.0")]


def test_text_is_filtered_and_sorted(tmp_path: Path):
    found = _view(
        str(three_steps(tmp_path)),
        "--text",
        "--query",
        "score<5 needle acc:0,1",
        "--sort",
        "score descending",
    )
    names = [line.split(" · ")[:2] for line in found.stdout.splitlines() if "· score " in line]
    steps = ("step 1", "step 2", "step 10")
    assert names == [[name, step] for name in "db" for step in steps]


def test_text_holds_no_control_characters(tmp_path: Path):
    write(tmp_path, trajectory("\x1b[2J", step=1, answer="\x1b]0;x\x07\x9b\u202e", result="\r"))
    found = _view(str(tmp_path), "--text")
    assert all(line.isprintable() for line in found.stdout.splitlines())
    assert "␛]0;x␇‹9B›‹202E›" in found.stdout


def test_the_mask_is_shown_as_a_star(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1, answer="<|image_pad|><|imgpad|> secret"))
    assert "  ** secret" in _view(str(tmp_path), "--text").stdout
    assert "<|imgpad|> *" in _view(str(tmp_path), "--text", "--mask-str", "sec[a-z]+").stdout
    assert "<|imgpad|> secret" in _view(str(tmp_path), "--text", "--mask-str", "").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["nowhere", "--text"], "nowhere"),
        (["nowhere", "--html", "page.html"], "nowhere"),
        ([".", "--mask-str", "("], "--mask-str (: missing )"),
        ([".", "--text", "--query", "scor<1"], "did you mean score?"),
        ([".", "--query", "scor<1"], "did you mean score?"),
        (["a.md", "--text"], "a.md is not a dump of trajectories: line 1: JSONDecodeError"),
        (["a.md", "--html", "page.html"], "a.md is not a dump of trajectories: line 1: JSONDecodeError"),
        (["a.md"], "a.md is not a dump of trajectories: line 1: JSONDecodeError"),
        ([".", "--sort", "up"], "--sort must be one of none, score ascending, score descending"),
    ],
)
def test_errors_go_to_stderr_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text("# No dump\n\nat all\n")
    found = _view(*arguments)
    assert found.exit_code == 2, found.output
    assert (found.stdout, words in found.stderr, found.stderr.count("\n")) == ("", True, 1)


def test_without_a_terminal_the_error_names_alternatives(tmp_path: Path):
    """Otherwise escape sequences fill a log, and no key press can end it."""
    write(tmp_path, trajectory("a", step=1))
    found = _view(str(tmp_path))
    assert (found.exit_code, found.stdout) == (2, "")
    words = " ".join(found.stderr.split())
    assert "needs a terminal: --text prints the dump, --html FILE writes a page" in words


@pytest.mark.slow
def test_verls_command_opens_the_same_viewer(tmp_path: Path):
    write(tmp_path, trajectory("a"))
    script = Path(__file__).parents[2] / "scripts" / "rollout_viewer.py"
    for more, code in (["--text"], 0), ([], 2):
        done, same = (
            run_program(
                [*call, str(tmp_path), *more], capture_output=True, text=True, timeout=60, check=False
            )
            for call in ([sys.executable, str(script)], [sys.executable, "-m", "torchrl_agentic.cli", "view"])
        )
        assert done.returncode == code
        assert (done.stdout, done.stderr) == (same.stdout, same.stderr)
        assert "score 0.5" in done.stdout or "the viewer needs a terminal" in " ".join(done.stderr.split())


def test_an_empty_folder_prints_nothing(tmp_path: Path):
    found = _view(str(tmp_path), "--text")
    assert (found.exit_code, found.stdout) == (0, "")


def test_closed_output_pipe_is_not_an_error(tmp_path: Path):
    write(tmp_path, *(trajectory(str(n), step=1, answer="word " * 1000) for n in range(100)))
    command = f"{sys.executable} -m torchrl_agentic.cli view {tmp_path} --text | head -1"
    done = run_program(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("0 · step 1")


def test_a_dump_of_more_steps_than_files_may_be_open_at_first_is_read(tmp_path: Path):
    write(tmp_path, *(trajectory(f"of-{step}", step=step) for step in range(100)))
    command = f"ulimit -Sn 64; {sys.executable} -m torchrl_agentic.cli view {tmp_path} --text"
    done = run_program(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.count("of-99 · step 99"), done.stderr) == (1, "")


def test_a_terminal_that_knows_no_unicode_gets_escapes(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1))
    code = f"from torchrl_agentic.cli.main import app; app(['view', {str(tmp_path)!r}, '--text'])"
    done = run_program(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"What is 6 \\xd7 7?" in done.stdout


def test_the_viewer_loads_no_torch():
    code = (
        "import sys, torchrl_agentic.cli.main, torchrl_agentic.cli.view, torchrl_agentic.viewer.app\n"
        "print(sorted({'torch', 'transformers', 'tensordict', 'torchrl', 'numpy'} & set(sys.modules)))"
    )
    assert _run(code).strip() == "[]"


def test_without_textual_the_extra_is_named(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1))
    code = (
        "import sys; sys.modules['textual'] = None\n"
        "from pathlib import Path; from torchrl_agentic.cli.view import view\n"
        f"print(view(Path({str(tmp_path)!r}), mask='', query='', sort='none', html=None, as_text=False))"
    )
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2"
    assert "pip install 'torchrl-agentic[viewer]'" in done.stderr.replace("\n", " ")
