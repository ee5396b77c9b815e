"""`as_tool(PythonInterpreter())`: a process per call or per row."""

import asyncio
import os
import pickle
import signal

import pytest
from helpers.chat_envs import call as hermes
from helpers.legacy_envs import call, calls, gone, run
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import (
    PythonInterpreter,
)

from torchrl_agentic import AgentCollector, EndTrajectory, Renamed, ToolCompose, as_tool, tool
from torchrl_agentic.collectors import Branching
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.messages import Status
from torchrl_agentic.testing import ScriptedPolicy, load_tiny
from torchrl_agentic.tools import Truncated
from torchrl_agentic.transforms import history as border


class TestPythonInterpreter:
    def test_a_fresh_process_per_call_keeps_nothing(self, chat):
        chat = chat(1, as_tool(PythonInterpreter(), name="python"))
        assert chat.step(call("python", code="x = 7\nprint(x)")) == [["7"]]
        ((text,),) = chat.step(call("python", code="print(x)"))
        assert "NameError" in text
        assert chat.errors() == [1]

    def test_persistent_process_keeps_the_state_of_its_row_only(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(call("python", code="secret = 7"), call("python", code="pass"))
        found = chat.step(*[call("python", code="print(globals().get('secret'))")] * 2)
        assert found == [["7"], ["None"]]
        assert chat.errors() == [0, 0]

    @pytest.mark.parametrize("wrap", [lambda tool: tool, lambda tool: Renamed(Truncated(tool, 99), "python")])
    def test_a_reset_also_reaches_a_transform_inside_wrappers(self, chat, wrap):
        chat = chat(2, wrap(as_tool(PythonInterpreter(persistent=True), name="python")))
        chat.step(*[call("python", code="secret = 7")] * 2)
        chat.reset(True, False)
        found = chat.step(*[call("python", code="print(globals().get('secret'))")] * 2)
        assert found == [["None"], ["7"]]

    @pytest.mark.parametrize("in_flight", [1, 2, 4])
    def test_trajectories_of_a_collector_have_an_interpreter_each(self, in_flight):
        """Groups run side by side, and a later trajectory takes the row of one that has ended."""
        _, tokenizer = load_tiny()
        code = ["print(globals().get('secret'))", "secret = 1", "print(secret)"]
        script = [hermes("python", code=one) for one in code]
        with AgentCollector(
            Compose(
                ToolCompose([as_tool(PythonInterpreter(persistent=True), name="python")]),
                EndTrajectory(max_turns=3),
            ),
            engine=ScriptedEngine([script], tokenizer),
            tokenizer=tokenizer,
            tasks=[{"query": f"q{number}"} for number in range(3)],
            group_size=2,
            max_in_flight=in_flight,
        ) as collector:
            found = [one for group in collector.trajectories() for one in group]
        texts = [[result.text.strip() for _, result in one.calls] for one in found]
        assert texts == [["None", "", "1"]] * 6

    def test_a_branch_of_a_tree_has_a_fresh_interpreter_too(self):
        """It forks before its first call, and takes the row of a trajectory that has ended."""
        _, tokenizer = load_tiny()

        @tool
        def wait() -> str:
            """Wait."""
            return "waited"

        def script(key, turn, ids):
            code = ["print(globals().get('secret'))", "secret = 1"]
            n_before = tokenizer.decode(ids).count("<|im_start|>assistant") - 1
            return hermes("python", code=code[n_before - 1]) if n_before else hermes("wait")

        python = as_tool(PythonInterpreter(persistent=True), name="python")
        with AgentCollector(
            Compose(ToolCompose([wait, python]), EndTrajectory(max_turns=3)),
            engine=ScriptedEngine(script, tokenizer),
            tokenizer=tokenizer,
            tasks=[{"query": f"q{number}"} for number in range(3)],
            branching=Branching(at=(1,), width=2),
            max_in_flight=2,
        ) as collector:
            found = [one for group in collector.trajectories() for one in group]
        texts = [[result.text.strip() for _, result in one.calls] for one in found]
        assert texts == [["waited", "None", ""]] * 6

    def test_rows_that_call_for_the_first_time_at_once_get_a_process_each(self, chat):
        """Made without a lock, some rows get none: "Too many processes: 5 > 4"."""
        tool = as_tool(PythonInterpreter(persistent=True), name="python")
        chat = chat(6, tool)
        found = chat.step(*[call("python", code="import os; print(os.getpid())")] * 6)
        assert chat.errors() == [0] * 6
        assert len({row[0] for row in found}) == 6

    def test_a_row_beyond_the_first_may_call_before_the_others(self, chat):
        chat = chat(3, as_tool(PythonInterpreter(persistent=True), name="python"))
        assert chat.step("x", "x", call("python", code="print(1)"))[2] == ["1"]
        assert chat.step(call("python", code="print(2)"), "x", "x")[0] == ["2"]

    def test_two_calls_of_one_row_run_in_order(self, chat):
        chat = chat(1, as_tool(PythonInterpreter(persistent=True), name="python"))
        assert chat.step(calls("python", {"code": "x = 1"}, {"code": "x += 1"}, {"code": "print(x)"})) == [
            ["", "", "2"]
        ]

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_fence_in_the_code_does_not_cut_it(self, chat, persistent):
        """The transform finds code between fences: from text, it would run the first half."""
        chat = chat(1, as_tool(PythonInterpreter(persistent=persistent), name="python"))
        code = "text = '''\n```\nmarkdown\n```\n'''\nprint(len(text.splitlines()))"
        assert chat.step(call("python", code=code)) == [["4"]]

    @pytest.mark.parametrize("persistent", [True, False])
    def test_failure_is_an_error_with_the_earlier_output(self, chat, persistent):
        """TorchRL may answer before its thread has read all of stderr; hence the tries."""
        chat = chat(1, as_tool(PythonInterpreter(persistent=persistent), name="python"))
        for _ in range(20 if persistent else 1):
            ((text,),) = chat.step(call("python", code="print('before')\n1 / 0"))
            assert "before" in text
            if "ZeroDivisionError" in text:
                break
        assert "ZeroDivisionError" in text
        assert chat.errors() == [1]

    @pytest.mark.parametrize("persistent", [True, False])
    def test_the_transform_s_own_timeout_is_a_timeout(self, persistent):
        tool = as_tool(PythonInterpreter(persistent=persistent, timeout=0.5), name="python")
        result = run(tool, {"code": "while True: pass"})
        assert result.status is Status.TIMEOUT
        asyncio.run(tool.teardown())

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_call_that_runs_out_of_time_ends_its_process(self, chat, persistent, tmp_path):
        """The code prints its process id before it hangs; afterwards the process is gone."""
        note = tmp_path / "pid"
        tool = as_tool(PythonInterpreter(persistent=persistent, timeout=60), name="python")
        chat = chat(1, tool, per_call_timeout=2.0)
        code = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
        ((text,),) = chat.step(call("python", code=code))
        assert "did not finish" in text
        assert gone(int(note.read_text()))

    def test_after_a_timeout_the_row_works_again_and_the_others_kept_their_state(self, chat):
        chat = chat(
            2, as_tool(PythonInterpreter(persistent=True, timeout=60), name="python"), per_call_timeout=1.5
        )
        chat.step(call("python", code="x = 1"), call("python", code="x = 2"))
        chat.step(call("python", code="import time; time.sleep(600)"), "x")
        first, second = chat.step(call("python", code="print(3)"), call("python", code="print(x)"))
        assert (first, second) == (["3"], ["2"])

    def test_killed_process_is_restarted_after_a_reset(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        pids = [int(row[0]) for row in chat.step(*[call("python", code="import os; print(os.getpid())")] * 2)]
        os.kill(pids[0], signal.SIGKILL)
        assert gone(pids[0])
        chat.reset(True, False)
        first, second = chat.step(*[call("python", code="import os; print(os.getpid())")] * 2)
        assert int(first[0]) != pids[0]
        assert int(second[0]) == pids[1]

    def test_a_masked_reset_restarts_that_row_s_process_only(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(call("python", code="x = 1"), call("python", code="x = 2"))
        chat.reset(True, False)
        first, second = chat.step(*[call("python", code="print(x)")] * 2)
        assert "name 'x' is not defined" in first[0]
        assert second == ["2"]

    def test_a_full_reset_restarts_all(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(*[call("python", code="x = 1")] * 2)
        chat.reset(True, True)
        # TorchRL may return before it has read the last line of a traceback, which has the name of the error.
        assert all(
            "name 'x' is not defined" in row[0] for row in chat.step(*[call("python", code="print(x)")] * 2)
        )

    def test_closing_ends_all_processes(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        pids = [int(row[0]) for row in chat.step(*[call("python", code="import os; print(os.getpid())")] * 2)]
        chat.compose.close()
        assert all(gone(pid) for pid in pids)

    def test_it_works_again_after_close(self, chat):
        chat = chat(1, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(call("python", code="x = 1"))
        chat.compose.close()
        assert chat.step(call("python", code="print(2)")) == [["2"]]

    def test_schema_has_the_code_and_rejects_other_arguments(self, chat):
        tool = as_tool(PythonInterpreter(), name="python", description="Run Python.")
        assert tool.spec()["function"]["parameters"]["required"] == ["code"]
        assert tool.description == "Run Python."
        chat = chat(1, tool)
        chat.step(call("python"))
        assert chat.errors() == [1]

    def test_it_runs_by_hand_without_an_environment(self):
        assert run(as_tool(PythonInterpreter(), name="python"), {"code": "print(1 + 1)"}).text == "2"

    def test_it_pickles_before_use(self):
        tool = pickle.loads(pickle.dumps(as_tool(PythonInterpreter(), name="python")))
        assert run(tool, {"code": "print(3)"}).text == "3"

    def test_a_grid_of_rows_has_a_process_each(self):
        compose = ToolCompose([as_tool(PythonInterpreter(persistent=True), name="python")])
        env = TransformedEnv(ChatEnv(batch_size=(1, 2)), compose)
        td = env.reset(TensorDict({"query": [["a", "b"]]}, batch_size=(1, 2)))
        said = ScriptedPolicy([[call("python", code=f"x = {i}\nprint(x)")] for i in range(2)])
        td = env.step(said(td))
        texts = [row.messages[-1].read().content for row in border.prompts(td["next"])]
        compose.close()
        assert texts == ["0", "1"]
