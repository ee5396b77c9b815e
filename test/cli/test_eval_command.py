"""`torchrl-agentic eval`: a YAML file becomes scores, a folder and an exit code; mistakes name their line."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.chat_server import ChatServer, call, completion, failure
from helpers.limit import limit
from helpers.processes import started
from typer.testing import CliRunner

from torchrl_agentic.cli.main import app
from torchrl_agentic.evaluation import EvalResult
from torchrl_agentic.records import read_records

EXAMPLE = Path(__file__).parents[2] / "examples" / "eval.yaml"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(*words):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


def said(result):
    return " ".join(result.output.split())


def write(text, rows=4):
    lines = [{"query": f"Question {number}", "answer": f"{number}"} for number in range(rows)]
    Path("q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("e.yaml").write_text(text)
    return "e.yaml"


def test_the_example_is_evaluated_resumed_and_compared():
    first = run(EXAMPLE, "--limit", 2, "--epochs", 2, "--out", "a")
    assert first.exit_code == 0, first.output
    assert "eval: 4 of 4 samples" in first.output
    assert "results: a" in first.output
    assert "prompt tokens" in first.output
    again = run(EXAMPLE, "--limit", 2, "--epochs", 2, "--out", "a")
    assert again.exit_code == 2
    assert "continue it with --resume, or choose another folder with --out" in said(again)
    more = run(EXAMPLE, "--limit", 3, "--epochs", 2, "--out", "a", "--resume", "--json", "--name", "eval")
    assert more.exit_code == 0, more.output
    found = json.loads(more.stdout)
    assert (found["n_samples"], found["is_whole"], len(found["samples"])) == (6, True, 6)
    assert len(list(read_records("a"))) == 6
    other = run(EXAMPLE, "--limit", 3, "--epochs", 2, "--out", "a", "--resume", "--temperature", 0.5)
    assert other.exit_code == 2
    assert "temperature was 1.0 and is 0.5" in said(other)
    second = run(EXAMPLE, "--limit", 3, "--epochs", 1, "--out", "b", "--temperature", 0)
    assert second.exit_code == 0, second.output
    compared = CliRunner().invoke(app, ["report", "a", "b"])
    assert "b compared with a, task by task" in said(compared)
    plain = CliRunner().invoke(app, ["report", "a", "b", "--json"])
    assert json.loads(plain.stdout)["evaluations"]["changes"]["answer"]["n_tasks"] == 3


def serve(script, *words, **options):
    """Evaluate `e.yaml` over a server that answers by a script; return the result and the server."""

    async def main():
        async with ChatServer(script, **options) as server:
            flags = ["--engine", "openai", "--model", "m", "--base-url", server.base_url, *words]
            return await asyncio.to_thread(run, "e.yaml", *flags), server

    return asyncio.run(main())


def echo(body, number):
    """Answer with the number of the question."""
    return completion(body["messages"][-1]["content"].split()[-1])


def test_a_service_is_evaluated_concurrently_with_its_tokens_and_cost():
    write(
        "questions: [q.jsonl]\nsystem_prompt: Be brief.\nmodel: {path: m, engine: openai, price: "
        "{prompt: 1000, completion: 2000}}\ntools: [python]\neval: {scorers: [answer, exact_match]}\n"
    )
    result, server = serve(echo, "--max-tokens", 99, crowd=4)
    assert result.exit_code == 0, result.output
    assert server.peak == 4
    assert {body["messages"][0]["content"] for body in server.bodies} == {"Be brief."}
    assert {body["max_tokens"] for body in server.bodies} == {99}
    assert [one["function"]["name"] for one in server.bodies[0]["tools"]] == ["python"]
    assert "48 prompt tokens, 20 completion tokens, cost 0.088" in result.output
    found = EvalResult.read("evals/e")
    assert found.scorers == ["answer", "exact_match"]
    assert found.score == 1.0
    assert (found.usage.requests, found.usage.cost) == (4, pytest.approx(0.088))
    assert all(sample.usage.prompt == 12 for sample in found.samples)


@pytest.mark.parametrize(
    ("option", "key"),
    [("", "reasoning"), ("reasoning_field: thoughts", "thoughts"), ("reasoning_field: null", None)],
)
def test_reasoning_goes_back_in_the_field_that_the_file_names(option: str, key: str | None):
    write(
        f"questions: [q.jsonl]\nmodel: {{path: m, engine: openai, {option}}}\n"
        "tools: [{function: double.py:double}]\n"
    )
    Path("double.py").write_text(
        "def double(number: int) -> int:\n"
        '    """Double a number.\n\n    Args:\n        number: The number.\n    """\n    return 2 * number\n'
    )

    def script(body, number):
        if body["messages"][-1]["role"] == "tool":
            return completion("4")
        return completion(None, [call("double", {"number": 2})], reasoning="hm")

    result, server = serve(script, "--limit", 1)
    assert result.exit_code == 0, result.output
    sent = server.bodies[-1]["messages"][-2]
    assert {name for name, value in sent.items() if value == "hm"} == ({key} if key else set())


def test_flags_replace_the_bounds_and_the_seed_of_the_file():
    write(
        "questions: [q.jsonl]\nmodel: {path: m, engine: openai, max_turns: 9, seed: 1, temperature: 0.5}\n"
        "tools: [python]\n"
    )

    def script(body, number):
        return completion(None, [call("python", {"code": "1"})], usage={"prompt_tokens": len(str(body))})

    words = ("--limit", 1, "--epochs", 2, "--temperature", 0, "--concurrency", 1)

    def bodies(*more):
        result, server = serve(script, *words, *more)
        assert result.exit_code == 0, result.output
        return server.bodies

    first = bodies("--max-turns", 2, "--seed", 7, "--out", "a")
    assert len(first) == 2 * 2
    assert {body["temperature"] for body in first} == {0}
    seeds = [body["seed"] for body in first]
    second = bodies("--max-turns", 3, "--seed", 8, "--out", "b")
    assert len(second) == 2 * 3
    assert not set(seeds) & {body["seed"] for body in second}
    third = bodies("--max-trajectory-tokens", 1000, "--out", "c")
    assert 2 <= len(third) < 2 * 9
    Path("e.yaml").write_text(Path("e.yaml").read_text() + "eval: {max_trajectory_tokens: 1000}\n")
    assert len(bodies("--out", "d")) == len(third)


@pytest.mark.parametrize(
    ("model", "flags"),
    [("path: tiny", ()), ("path: m, engine: openai, api_key_env: HOME", ("--max-total-tokens", 9))],
)
def test_a_limit_on_a_cost_that_nobody_knows_is_a_mistake(model, flags):
    result = run(write(f"questions: [q.jsonl]\nmodel: {{{model}}}\n"), "--max-cost", 1, *flags)
    assert result.exit_code == 2, result.output
    assert "max_cost needs" in said(result)
    assert "price" in said(result)
    assert not Path("evals").exists()


def test_samples_that_fail_or_are_missing_are_listed_and_lead_to_exit_code_one():
    write(
        "questions: [q.jsonl]\nmodel: {path: m, engine: openai, rows: 1}\n"
        "eval: {retries: 0, fail_above: 1.0}\n",
        rows=20,
    )

    def script(body, number):
        return (
            failure("400 Bad Request", "no such thing") if "Question 2" in str(body) else echo(body, number)
        )

    result, _ = serve(script)
    assert result.exit_code == 1
    assert "1 samples failed: 1 crash" in result.output
    assert "q-2, epoch 1: " in result.output
    assert "torchrl-agentic eval e.yaml --resume --out evals/e" in said(result)
    mended, server = serve(echo, "--resume", "--concurrency", 1)
    assert (mended.exit_code, len(server.bodies)) == (2, 0), "another URL is another evaluation"
    limited, server = serve(echo, "--out", "limited", "--max-total-tokens", 20, "--concurrency", 1)
    assert limited.exit_code == 1
    assert "the limit on tokens was reached" in said(limited)
    assert len(server.bodies) < 8


def test_a_wrong_key_is_a_clear_error_and_ends_at_once():
    write("questions: [q.jsonl]\nmodel: {path: m, engine: openai, rows: 1}\n", rows=50)
    result, server = serve([failure("401 Unauthorized", "bad key")])
    assert result.exit_code == 2
    assert "check api_key" in said(result)
    assert "Traceback" not in result.output
    assert len(server.bodies) <= 5


def test_a_model_behind_a_service_judges_and_a_function_of_a_file_scores():
    Path("mine.py").write_text(
        "def brief(trajectory):\n    return len(trajectory.answer) < 5\n\n\n"
        "class AtMost:\n    def __init__(self, size: int):\n        self.size = size\n\n"
        "    def __call__(self, trajectory):\n        return len(trajectory.answer) <= self.size\n"
    )

    def script(body, number):
        if body["model"] == "judge":
            return completion('{"reason": "It is right.", "grade": "C"}')
        return echo(body, number)

    async def main():
        async with ChatServer(script) as server:
            write(
                f"questions: [q.jsonl]\nmodel: {{path: m, engine: openai, base_url: '{server.base_url}'}}\n"
                "eval:\n  scorers:\n    right: {numeric_match: {abs_tol: 0.5}}\n    brief: mine.py:brief\n"
                "    short: {'mine.py:AtMost': {size: 0}}\n"
                f"    judged: {{judge: {{path: judge, base_url: '{server.base_url}', votes: 1}}}}\n"
            )
            return await asyncio.to_thread(run, "e.yaml", "--json")

    result = asyncio.run(main())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["usage"]["requests"] == 8, "those of the judge count"
    metrics = found["metrics"]
    assert {name: one["mean"]["value"] for name, one in metrics.items()} == {
        "right": 1.0,
        "brief": 1.0,
        "short": 0.0,
        "judged": 1.0,
    }


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("scorers: [numeric_mach]", "e.yaml:4: eval.scorers.0: no scorer is named 'numeric_mach'"),
        ("scorers: [{numeric_match: {tolerance: 1}}]", "e.yaml:4: "),
        ("scorers: [{numeric_match: {tolerance: 1}}]", "tolerance"),
        ("scorers: [3]", "a scorer is a name"),
        ("scorers: []", "scorers is empty"),
        ("scorers: [contains, contains]", "two scorers are named 'contains'"),
        ("scorers: ['gone.py:f']", "gone.py"),
        ("scorers: [judge]", "a judge needs the name of its model"),
        ("epoch: 3", "did you mean 'epochs'"),
        ("epochs: 0", "eval.epochs"),
        ("epochs: 2\n  pass_at: [3]", "pass@3 needs at least 3 samples"),
        ("fail_above: 2", "eval.fail_above"),
    ],
)
def test_mistakes_of_the_section_name_file_and_line(section, problem):
    write(f"questions: [q.jsonl]\nmodel: {{path: tiny}}\neval:\n  {section}\n")
    result = run("e.yaml")
    assert result.exit_code == 2, result.output
    assert problem in said(result)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("conversations: [q.jsonl]\n", "needs 'questions' and a 'model'"),
        ("questions: [gone.jsonl]\nmodel: {path: tiny}\n", "gone.jsonl"),
        ("questions: [q.jsonl]\nmodel: {path: tiny, base_url: 'http://x'}\n", "only with 'engine: openai'"),
        ("questions: [q.jsonl]\nmodel: {path: tiny, reasoning_field: x}\n", "only with 'engine: openai'"),
        ("questions: [q.jsonl]\nmodel: {path: m, engine: openai}\n", "OPENAI_API_KEY"),
        (
            "questions: [q.jsonl]\nmodel: {path: m, engine: openai, api_key_env: NO_KEY}\n",
            "'NO_KEY' is not set",
        ),
        ("questions: [q.jsonl]\nmodel: {path: m, engine: openai, price: {prompt: 1}}\n", "price needs"),
    ],
)
def test_mistakes_of_the_file_are_explained(text, problem):
    result = run(write(text))
    assert result.exit_code == 2, result.output
    assert problem in said(result)
    assert run("q.jsonl").exit_code == 2


def test_ctrl_c_prints_the_results_so_far_and_how_to_go_on():
    Path("slow.py").write_text(
        "import sys, time\n\ndef scorer(trajectory):\n    print('scored', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.2)\n    return 1\n"
    )
    write(
        "questions: [q.jsonl]\nmodel: {path: tiny, rows: 1, max_new_tokens: 8}\n"
        "eval: {scorers: 'slow.py:scorer'}\n",
        200,
    )
    words = [sys.executable, "-m", "torchrl_agentic.cli", "eval", "e.yaml"]
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        for _ in range(4):
            while "scored" not in child.stderr.readline():
                assert child.poll() is None
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=limit(60))
    assert child.returncode == 130, errors
    assert "it was interrupted" in out
    assert "torchrl-agentic eval e.yaml --resume --out evals/e" in errors
    found = EvalResult.read("evals/e")
    assert found.stopped == "interrupted"
    assert 1 <= len(found.samples) < 200
