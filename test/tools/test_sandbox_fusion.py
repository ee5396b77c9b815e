"""The tool and client of Sandbox Fusion, against our server over HTTP, and servers that misbehave."""

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fakes.scripted import Reply, scripted_server
from helpers.limit import limit
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import (
    EndTrajectory,
    ImagePart,
    Message,
    PythonTool,
    SandboxFusionTool,
    Status,
    ToolCompose,
    ToolContext,
)
from torchrl_agentic.config import load_tools
from torchrl_agentic.dispatch import Dispatcher, init_execution_pool
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.serve.access import Access
from torchrl_agentic.serve.sandbox_app import sandbox_app
from torchrl_agentic.testing import ScriptedPolicy, ToolContract
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools.sandbox_fusion import Outcome, SandboxFusionClient
from torchrl_agentic.tools.schema_simplify import simplify_schema
from torchrl_agentic.tools.service import Patience
from torchrl_agentic.tools.verl import (
    BaseTool,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    _process_single_case,
)
from torchrl_agentic.tools.verl.lifecycle import LifecycleTool
from torchrl_agentic.transforms import history as border

QUICK = Patience(deadline_s=5, tries=3, first_s=0.01, longest_s=0.02)
pytestmark = pytest.mark.usefixtures("own_limits")


@pytest.fixture
def own_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    """A real server if SANDBOX_FUSION_URL is set, else ours."""
    if url := os.environ.get("SANDBOX_FUSION_URL"):
        yield url
        return
    with serving(sandbox_app(max_queue=1000)) as url:
        yield url


async def _call(tool: Any, code: str):
    dispatcher = Dispatcher([tool])
    try:
        async with dispatcher.session("t") as session:
            return (await session.run([ParsedCall(tool.name, {"code": code}, "c1")]))[0]
    finally:
        await dispatcher.close()


class TestSandboxFusionTool(ToolContract):
    good: ClassVar = {"code": "print(1)"}
    bad: ClassVar = ({}, {"code": 3})
    endless: ClassVar = ({"code": "print('begun')\nwhile True: pass"},)

    @pytest.fixture(autouse=True)
    def _server(self, server: str, own_limits: None) -> None:
        self.url = server

    def make(self) -> SandboxFusionTool:
        return SandboxFusionTool(self.url)


NOTE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute.", "enum": None}},
            "required": ["code"],
        },
    },
}


def test_the_schema_is_that_of_the_design_note_but_for_its_null():
    function = {
        **NOTE_SCHEMA["function"],
        "parameters": simplify_schema(NOTE_SCHEMA["function"]["parameters"]),
    }
    assert SandboxFusionTool("http://x").spec() == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("code", "status", "parts"),
    [
        ("print(6 * 7)", Status.OK, ["42"]),
        ("x = 1", Status.OK, ["[no output]"]),
        ("import sys; print('a'); print('b', file=sys.stderr)", Status.OK, ["a", "[stderr]\nb"]),
        ("print('a'); 1 / 0", Status.ERROR, ["a", 'main.py"', "ZeroDivisionError", "[exit 1]"]),
        ("print('before', flush=True)\nraise SystemExit(7)", Status.ERROR, ["before", "[exit 7]"]),
        ("def f(:", Status.ERROR, ["SyntaxError", "[exit 1]"]),
        ("import os; print('x', flush=True); os.kill(os.getpid(), 9)", Status.ERROR, ["x", "by SIGKILL]"]),
        ("print(__name__, __file__)", Status.OK, ["__main__", "main.py"]),
        ("print('ünï')", Status.OK, ["ünï"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cap_output", [True, False])
async def test_every_outcome_of_a_program_is_reported(
    server: str, code: str, status: Status, parts: list[str], cap_output
):
    result = await _call(SandboxFusionTool(server, cap_output=cap_output), code)
    assert result.status is status, result.text
    for part in parts:
        assert part in result.text
    assert "capped" not in result.text
    assert result.timing is not None


async def test_endless_program_is_stopped_and_its_output_kept(server: str):
    tool = SandboxFusionTool(server, default_timeout=1.0)
    result = await _call(tool, "print('partial', flush=True)\nwhile True: pass")
    assert result.status is Status.TIMEOUT
    assert "partial" in result.text
    assert "[stopped after 1 s]" in result.text


@pytest.mark.parametrize("size", [180 << 10, 1 << 20, 20 << 20])
async def test_long_output_does_not_block(server: str, size: int):
    tool = SandboxFusionTool(server, default_timeout=20)
    code = f"print('first')\nprint('x' * {size})\nprint('last')\n"
    code += "import sys\nprint('e' * 300000, file=sys.stderr)"
    result = await _call(tool, code)
    assert result.status is Status.OK, result.text[:500]
    assert "first" in result.text
    client = SandboxFusionClient(server)
    run = await client.run_code(code, run_timeout=20)
    await client.close()
    assert run.stdout.startswith("first\nxxx")
    assert run.stdout.endswith("last\n")
    assert "bytes left out" in run.stdout
    assert len(run.stdout) < 100_000


async def test_output_of_a_process_that_stays_does_not_hold_a_program_up(server: str):
    code = "import os, time\nif not os.fork():\n    time.sleep(5)\n    os._exit(0)\nprint('done')"
    result = await _call(SandboxFusionTool(server, default_timeout=4), code)
    assert "done" in result.text


async def test_the_model_chooses_neither_language_nor_time(server: str):
    dispatcher = Dispatcher([SandboxFusionTool(server, default_timeout=5)])
    args = {"code": "print('python')", "language": "bash", "timeout": 9999, "executes": "True"}
    async with dispatcher.session("t") as session:
        (result,) = await session.run([ParsedCall("code_interpreter", args, "c1")])
    await dispatcher.close()
    assert result.text == "python"


async def test_other_languages(server: str):
    result = await _call(SandboxFusionTool(server, default_language="bash"), "echo $((6 * 7))")
    assert result.text == "42"


async def test_compile_error_is_reported(server: str):
    tool = SandboxFusionTool(server, default_language="cpp")
    result = await _call(tool, "int main() { retrun 0; }")
    if result.status is Status.INFRA:  # a server without a compiler says so
        assert "cpp" in result.text
    else:
        assert result.status is Status.ERROR
        assert "[compilation failed]" in result.text
        assert "retrun" in result.text


async def test_cells_show_their_last_value_and_figures(server: str):
    tool = SandboxFusionTool(server, jupyter=True)
    assert (await _call(tool, "6 * 7")).text == "42"
    result = await _call(tool, "print('said')\n1 / 0")
    assert result.status is Status.ERROR
    assert "said" in result.text
    assert "ZeroDivisionError" in result.text


async def test_files_go_in_and_come_back(server: str):
    tool = SandboxFusionTool(server, files={"in.txt": b"hello"}, fetch_files=["out.txt"])
    result = await _call(tool, "open('out.txt', 'w').write(open('in.txt').read().upper())")
    assert result.status is Status.OK, result.text
    assert "[file out.txt]" in result.text
    async with SandboxFusionClient(server) as client:
        run = await client.run_code("open('a', 'wb').write(bytes(range(256)))", fetch_files=["a"])
    assert run.files == {"a": bytes(range(256))}


async def test_images_come_back_as_images():
    png = "iVBORw0KGgo="
    shown = {"status": "Success", "driver": {"status": "Finished", "return_code": 0}, "cells": [
        {"stdout": "", "display": [{"image/png": png, "text/plain": "<Figure>"}], "error": []}]}  # fmt: skip
    async with scripted_server([Reply(body=shown)]) as scripted:
        result = await _call(SandboxFusionTool(scripted.url, jupyter=True), "plot()")
    assert any(isinstance(part, ImagePart) for part in result.parts)
    assert "<Figure>" not in [str(part) for part in result.parts]


async def test_rewards_use_the_client_of_the_tool_and_with_it_its_limit(server: str):
    tool = SandboxFusionTool(server)
    await tool.setup()
    run = await tool.client.run_code("print(input())", stdin="149")
    assert (run.outcome, run.stdout, run.exit_code) == (Outcome.SUCCESS, "149\n", 0)
    assert tool.client.service.limiter is not None
    assert tool.client.service.limiter.stats().granted == 1
    await tool.teardown()


FINE = {
    "status": "Success",
    "run_result": {"status": "Finished", "return_code": 0, "stdout": "ok", "stderr": ""},
}


@pytest.mark.parametrize(
    ("replies", "text"),
    [
        ([Reply(500, {"detail": "boom"})], "500"),
        ([Reply(422, {"detail": "bad"})], "refused"),
        ([Reply(200, b"<html>")], "invalid JSON"),
        ([Reply(body={"hello": 1})], "expected a result"),
        ([Reply(body=[1, 2])], "expected a result"),
        ([Reply(body={"status": "Success"})], "expected a result"),
        ([Reply(body={"status": "Success", "run_result": None})], "expected a result"),
        ([Reply(body={**FINE, "files": {"a": "*"}})], "invalid base64"),
        ([Reply(body={**FINE, "files": {"a": "é"}})], "invalid base64"),
        ([Reply(403, {"message": "Forbidden"})], "403"),
        ([Reply(body={"status": "SandboxError", "message": "no pod"})], "no pod"),
        ([Reply(how="cut")], "cannot be reached"),
        ([Reply(body=FINE, how="half")], "cannot be reached"),
        ([Reply(503, b"busy")], "busy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_errors_of_the_service_give_infra(replies, text):
    async with scripted_server(replies) as scripted:
        result = await _call(SandboxFusionTool(scripted.url, patience=QUICK), "print(1)")
    assert result.status is Status.INFRA, result.text
    assert text in result.text
    assert "no output" not in result.text


class FirstSandboxTool(BaseTool):
    """The sandbox tool of verl's first design note: a blocking function on a pool, text as the reward."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.sandbox_fusion_url = config["sandbox_fusion_url"]
        self.execution_pool = init_execution_pool(config["num_workers"])
        self._instance_dict: dict[str, dict] = {}

    async def create(self, instance_id: str | None = None, **kwargs):
        self._instance_dict[instance_id] = {"reward": []}
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[str, float, dict]:
        code = parameters["code"]
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, 10, "python")
        self._instance_dict[instance_id]["reward"].append(result.strip())
        return result, result, {}

    def execute_code(self, instance_id, code, timeout=30, language="python"):
        _, metadata = _process_single_case(0, None, None, self.sandbox_fusion_url, code, timeout, language)
        if metadata["run_status"] == "Finished":
            return metadata["stdout"] if metadata["stdout"] is not None else ""
        return "no stdout here"

    async def calc_reward(self, instance_id: str, **kwargs):
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs):
        del self._instance_dict[instance_id]


async def test_the_class_of_verls_design_note_runs_as_it_is_written():
    schema = OpenAIFunctionToolSchema(
        type="function", function=OpenAIFunctionSchema(name="code_interpreter", description="Runs code.")
    )
    late = {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "4"}}
    async with scripted_server([Reply(body=FINE), Reply(body=late), Reply(403)]) as scripted:
        config = {"sandbox_fusion_url": scripted.url, "num_workers": 10}
        dispatcher = Dispatcher([LifecycleTool(FirstSandboxTool(config, schema))])
        async with dispatcher.session("t") as session:
            calls = [ParsedCall("code_interpreter", {"code": "print(1)"}, f"c{n}") for n in range(3)]
            results = await session.run(calls)
    assert [(result.text, result.reward) for result in results] == [
        ("ok", None),
        ("no stdout here", None),
        ("no stdout here", None),
    ]


@pytest.mark.parametrize(
    ("reply", "expected", "result", "status"),
    [
        (FINE, None, True, "success"),
        (FINE, "ok\n", True, "success"),
        (FINE, "no", False, "wrong_answer"),
        (
            {"status": "Failed", "run_result": {"status": "Finished", "return_code": 1}},
            None,
            -2,
            "runtime_error",
        ),
        ({"status": "Failed", "compile_result": {"status": "Error"}}, None, -4, "compile_error"),
        ({"hello": 1}, None, -1, "api_error"),
    ],
)
async def test_a_single_case_has_the_result_and_the_status_that_verl_gives_it(
    reply, expected, result, status
):
    async with scripted_server([Reply(body=reply)]) as scripted:
        found, told = await asyncio.to_thread(
            _process_single_case, 3, "in", expected, scripted.url, "print()", 10, 512, "python"
        )
    assert (found, told["status"], told["case_index"]) == (result, status, 3)


async def test_a_sandbox_error_is_tried_again():
    replies = [Reply(body={"status": "SandboxError", "message": "stdin race"}), Reply(body=FINE)]
    async with scripted_server(replies) as scripted:
        result = await _call(SandboxFusionTool(scripted.url, patience=QUICK), "print(1)")
    assert result.text == "ok"
    assert result.meta is not None
    assert result.meta["tries"] == 2


async def test_null_instead_of_text_is_empty():
    run = {"status": "Finished", "return_code": 0, "stdout": None, "stderr": None, "execution_time": None}
    async with scripted_server(
        [Reply(body={"status": "Success", "compile_result": None, "run_result": run})]
    ) as s:
        assert (await _call(SandboxFusionTool(s.url), "x")).text == "[no output]"


async def test_binary_output_is_flagged():
    run = {"status": "Finished", "return_code": 0, "stdout": "[DecodeError] 'utf-8' codec", "stderr": ""}
    async with scripted_server([Reply(body={"status": "Success", "run_result": run})]) as s:
        result = await _call(SandboxFusionTool(s.url), "x")
    assert result.meta is not None
    assert result.meta["undecodable"]


async def test_request_matches_the_protocol_of_the_service():
    async with scripted_server([Reply(body=FINE)]) as scripted:
        tool = SandboxFusionTool(
            f"{scripted.url}/run_code",
            default_timeout=7,
            memory_limit_mb=-1,
            cap_output=False,
            files={"f": b"x"},
        )
        await _call(tool, "print(1)")
    assert scripted.requests == [
        ("/run_code", {
            "code": "print(1)", "language": "python", "compile_timeout": 7, "run_timeout": 7,
            "memory_limit_MB": -1, "stdin": None, "files": {"f": "eA=="}, "fetch_files": [],
        })
    ]  # fmt: skip


def test_the_endpoint_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SANDBOX_FUSION_ENDPOINT", "http://there:8080/")
    assert SandboxFusionTool().url == "http://there:8080"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"sandbox_fusion_url": ""}, "serve sandbox"),
        ({"sandbox_fusion_url": "there:8080"}, "http://"),
        ({"default_language": "klingon"}, "klingon"),
        ({"default_timeout": 0}, "default_timeout"),
        ({"memory_limit_mb": 0}, "memory_limit_mb"),
        ({"num_workers": 0}, "num_workers"),
        ({"rate_limit": 0}, "rate_limit"),
    ],
)
def test_invalid_configuration_is_rejected(bad: dict, says: str):
    with pytest.raises(ValueError, match=says):
        SandboxFusionTool(**{"sandbox_fusion_url": "http://x", **bad})


async def test_limiter_can_be_per_process():
    async with scripted_server([Reply(body=FINE)]) as scripted:
        tool = SandboxFusionTool(scripted.url, enable_global_rate_limit=False)
        assert (await _call(tool, "x")).text == "ok"


PROBLEM = "In a class of 152 students, how many study neither?"
TURNS = [
    'First. <tool_call>{"name": "code_interpreter", "arguments": {"code": "print(152 - 149)"}}</tool_call>',
    'Next. <tool_call>{"name": "code_interpreter", "arguments": {"code": "print(152 - 3)"}}</tool_call>',
    "#### 149",
]


def _env(tool: SandboxFusionTool, rows: int) -> TransformedEnv:
    compose = ToolCompose([tool], parser="hermes")
    return TransformedEnv(
        ChatEnv(batch_size=(rows,)), Compose(compose, EndTrajectory(max_turns=5, when_no_calls=True))
    )


@pytest.mark.parametrize("rows", [1, 100])
def test_concurrent_problems_are_solved_in_three_turns(server: str, rows: int):
    """The reference case of the design note; of 100 at once, each gets the results of its own calls."""
    script = [
        [turn.replace("149", str(149 + row)).replace("- 3", f"- {3 - row}") for turn in TURNS]
        for row in range(rows)
    ]
    env = _env(SandboxFusionTool(server, num_workers=20, rate_limit=20), rows)
    td = env.reset(TensorDict({"query": [PROBLEM] * rows}, batch_size=(rows,)))
    policy = ScriptedPolicy(script)
    for _ in TURNS:
        step = env.step(policy(td))
        td = step["next"] if bool(step["next", "done"].all()) else env.step_mdp(step)
    env.close()
    assert bool(td["done"].all())
    for row, conversation in enumerate(border.prompts(td.to_lazystack(0))):
        messages = [message.read() for message in conversation.messages]
        assert [message.role for message in messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant",
        ]
        assert [message.text for message in messages if message.role == "tool"] == [
            str(3 - row),
            str(149 + row),
        ]


async def test_an_answer_that_was_cut_off_runs_nothing():
    """A generation that reached its length: its call looks whole, and must not run."""
    async with scripted_server([Reply(body=FINE)]) as scripted:

        def run() -> list[str]:
            env = _env(SandboxFusionTool(scripted.url), 1)
            cut = Message("assistant", TURNS[0], is_complete=False)
            td = env.reset(TensorDict({"query": [PROBLEM]}, batch_size=(1,)))
            step = env.step(ScriptedPolicy([[cut]])(td))["next"]
            env.close()
            (row,) = border.prompts(step.to_lazystack(0))
            return [message.read().text for message in row.messages]

        texts = await asyncio.to_thread(run)
    assert texts == [PROBLEM, TURNS[0]]
    assert scripted.requests == []


def test_processes_that_name_the_same_service_share_its_limit(tmp_path: Path):
    """Two processes with four calls each at a limit of three: never more than three are inside at once."""
    program = """
import asyncio, sys
from torchrl_agentic import SandboxFusionTool, ToolContext
async def main():
    tool = SandboxFusionTool(sys.argv[1], rate_limit=3)
    await tool.setup()
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(tool.run({"code": "1"}, ToolContext(call_id=str(i))) for i in range(6)))
    await tool.teardown()
asyncio.run(main())
"""
    inside = most = 0

    async def answer(path: str, data: Any) -> Reply:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.1)
        inside -= 1
        return Reply(body=FINE)

    async def main() -> int:
        async with scripted_server(answer) as scripted:
            words = [sys.executable, "-c", program, scripted.url]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            both = [await asyncio.create_subprocess_exec(*words, **pipes) for _ in range(2)]
            for process in both:
                assert process.stdout is not None
                await process.stdout.readline()
            done = await asyncio.wait_for(
                asyncio.gather(*(one.communicate(b"go\n") for one in both)), limit(60)
            )
            assert len(done) == 2
            assert [one.returncode for one in both] == [0, 0]
            return len(scripted.requests)

    assert asyncio.run(main()) == 12
    assert 1 < most <= 3


async def test_a_cancelled_call_holds_nothing_any_more(server: str):
    tool = SandboxFusionTool(server, rate_limit=1)
    await tool.setup()
    hung = asyncio.create_task(tool.client.run_code("while True: pass", run_timeout=60))
    assert tool.client.service.limiter is not None
    while not tool.client.service.limiter.stats().in_flight:
        await asyncio.sleep(0.01)
    hung.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hung
    run = await asyncio.wait_for(tool.client.run_code("print(1)"), limit(30))
    assert run.stdout == "1\n"
    await tool.teardown()


async def test_no_language_is_invented(server: str):
    async with SandboxFusionClient(server) as client:
        with pytest.raises(ValueError, match="klingon"):
            await client.run_code("x", language="klingon")


async def test_python_that_cannot_be_parsed_is_named_with_its_line(server: str):
    result = await _call(SandboxFusionTool(server), "a = 1\nb = (\n")
    assert 'main.py", line 2' in result.text


def test_by_hand_it_needs_no_setup(server: str):
    async def main() -> str:
        tool = SandboxFusionTool(server)
        result = await tool.run({"code": "print(1)"}, ToolContext(call_id="c"))
        await tool.teardown()
        return result.text

    assert asyncio.run(main()) == "1"


def test_tool_replaces_the_python_tool():
    tool = SandboxFusionTool("http://x", name="python", description=PythonTool.description)
    assert (tool.name, tool.description) == ("python", PythonTool.description)


async def test_claimed_image_data_is_not_trusted():
    display = [{"image/png": "é"}, {"image/png": "aGVsbG8="}]
    shown = {
        "status": "Success",
        "driver": {"status": "Finished", "return_code": 0},
        "cells": [{"stdout": "said", "display": display, "error": []}],
    }
    async with scripted_server([Reply(body=shown)]) as scripted:
        result = await _call(SandboxFusionTool(scripted.url, jupyter=True), "plot()")
    assert result.text == "said"


def test_used_tool_can_be_pickled(server: str):
    async def use(tool: SandboxFusionTool) -> str:
        result = await tool.run({"code": "print(1)"}, ToolContext(call_id="c"))
        copy = pickle.dumps(tool)
        await tool.teardown()
        again = pickle.loads(copy)
        assert (await again.run({"code": "print(2)"}, ToolContext(call_id="d"))).text == "2"
        await again.teardown()
        return result.text

    assert asyncio.run(use(SandboxFusionTool(server))) == "1"


async def test_two_tools_with_different_limits_for_one_service_are_rejected():
    one, other = SandboxFusionTool("http://x", rate_limit=10), SandboxFusionTool("http://x", rate_limit=3)
    await one.setup()
    with pytest.raises(ValueError, match="another name"):
        await other.setup()
    await one.teardown()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_server_that_wants_a_token_is_sent_the_one_that_the_file_of_tools_names(
    tmp_path: Path, is_known: bool
):
    token = "correct-horse-battery-staple"
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(token if is_known else token[::-1])
    with serving(sandbox_app(access=Access(token=token))) as url:
        options = f"{{sandbox_fusion_url: '{url}', token_file: {path}, enable_global_rate_limit: false}}"
        (tmp_path / "tools.yaml").write_text(f"tools:\n  - sandbox_fusion: {options}\n")
        (tool,) = load_tools(tmp_path / "tools.yaml").tools
        dispatcher = Dispatcher([tool])
        async with dispatcher.session("t") as session:
            (result,) = await session.run([ParsedCall(tool.name, {"code": "print(6 * 7)"}, "c1")])
        await dispatcher.close()
        passed, _ = await asyncio.to_thread(
            _process_single_case, 0, None, "42", url, "print(42)", 10, token_file=str(path)
        )
    assert (result.status, "42" in result.text) == ((Status.OK, True) if is_known else (Status.INFRA, False))
    assert passed == (True if is_known else -1)
