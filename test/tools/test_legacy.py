"""`as_tool`: TorchRL's own tool transforms, and other people's, behind the Tool interface."""

import asyncio
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import tensordict
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import (
    BrowserTransform,
    ExecuteToolsInOrder,
    MCPToolTransform,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)

from torchrl_agentic import Message, StopTool, ToolCompose, ToolContext, ToolResult, as_tool
from torchrl_agentic.messages import Status
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.transforms import history as border

# TorchRL's own processes, loops and pipes are left to the garbage collector, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """What is left behind here is collected here, not in somebody else's test."""
    yield
    gc.collect()


def run(tool, args, row=0, **context):
    """One call by hand."""
    return asyncio.run(tool.run(args, ToolContext(call_id="c", batch_index=row, **context)))


def call(name, **args):
    return Message("assistant", None, tool_calls=[{"name": name, "arguments": args}])


def calls(name, *many):
    return Message("assistant", None, tool_calls=[{"name": name, "arguments": args} for args in many])


class Chat:
    """An environment of some rows with one tool, stepped row by row."""

    def __init__(self, rows, *tools, **options):
        self.compose = ToolCompose(tools, **options)
        self.env = TransformedEnv(ChatEnv(batch_size=(rows,)), self.compose)
        self.td = self.env.reset(TensorDict({"query": ["q"] * rows}, batch_size=(rows,))).to_lazystack(0)

    def step(self, *said):
        """What each row's tools answered in this turn."""
        before = [border.length(row) for row in border.prompts(self.td)]
        stepped = self.env.step(ScriptedPolicy([[text] * 20 for text in said])(self.td))
        self.td = self.env.step_mdp(stepped)
        rows = zip(border.prompts(self.td), before, strict=True)
        return [[border.read_message(m).content for m in border.messages(row)[n + 1 :]] for row, n in rows]

    def reset(self, *mask):
        self.td["query"] = NonTensorData("again").expand(len(mask))
        self.td["_reset"] = torch.tensor(mask).unsqueeze(-1)
        self.td = self.env.reset(self.td)

    def errors(self):
        return self.td["agentic", "n_errors"].flatten().tolist()


@pytest.fixture(scope="module", autouse=True)
def _lists_are_stacks():
    """TorchRL's transforms are made before any ToolCompose."""
    tensordict.set_list_to_stack(True).set()


@pytest.fixture
def chat():
    made = []

    def make(*args, **options):
        made.append(Chat(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.env.close()
        one.compose.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid, seconds=20):
    """Whether a process ends, or waits only for its parent to look."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):  # the second: it went while the file was read
            return True
        time.sleep(0.02)
    return False


class TestPythonInterpreter:
    def test_a_fresh_process_per_call_keeps_nothing(self, chat):
        chat = chat(1, as_tool(PythonInterpreter(), name="python"))
        assert chat.step(call("python", code="x = 7\nprint(x)")) == [["7"]]
        ((text,),) = chat.step(call("python", code="print(x)"))
        assert "NameError" in text
        assert chat.errors() == [1]

    def test_a_persistent_process_keeps_what_its_row_made_and_no_other_row_sees_it(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(call("python", code="secret = 7"), call("python", code="pass"))
        first, second = chat.step(*[call("python", code="print(secret)")] * 2)
        assert first == ["7"]
        assert "NameError" in second[0]
        assert chat.errors() == [0, 1]

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
    def test_a_failure_is_an_error_and_what_was_printed_before_is_kept(self, chat, persistent):
        chat = chat(1, as_tool(PythonInterpreter(persistent=persistent), name="python"))
        ((text,),) = chat.step(call("python", code="print('before')\n1 / 0"))
        assert "before" in text
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
        """The code tells its number before it hangs; afterwards no such process is there."""
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

    def test_a_process_that_was_ended_from_outside_is_made_anew_after_a_reset(self, chat):
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
        assert "NameError" in first[0]
        assert second == ["2"]

    def test_a_full_reset_restarts_all(self, chat):
        chat = chat(2, as_tool(PythonInterpreter(persistent=True), name="python"))
        chat.step(*[call("python", code="x = 1")] * 2)
        chat.reset(True, True)
        assert all("NameError" in row[0] for row in chat.step(*[call("python", code="print(x)")] * 2))

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

    def test_the_model_is_told_of_the_code_and_other_arguments_are_refused(self, chat):
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
        texts = [border.read_message(border.messages(row)[-1]).content for row in border.prompts(td["next"])]
        compose.close()
        assert texts == ["0", "1"]


def divide(a: float, b: float):
    return {"quotient": a / b}


class TestSimpleToolTransform:
    def tool(self, function, name="f"):
        return as_tool(SimpleToolTransform(tools={name: function}), name=name)

    def test_it_calls_the_function(self, chat):
        chat = chat(1, self.tool(divide))
        assert chat.step(call("f", a=1, b=4)) == [['{"quotient": 0.25}']]

    def test_what_it_raises_is_an_error_of_the_tool(self, chat):
        chat = chat(1, self.tool(divide))
        ((text,),) = chat.step(call("f", a=1, b=0))
        assert "division by zero" in text
        assert chat.errors() == [1]

    def test_a_report_of_failure_inside_a_success_is_an_error(self, chat):
        """The transform says "success" of whatever did not raise."""
        chat = chat(1, self.tool(lambda: {"success": False, "error": "no such page"}))
        assert chat.step(call("f")) == [["no such page"]]
        assert chat.errors() == [1]

    def test_a_name_that_it_does_not_hold_is_an_error(self):
        tool = as_tool(SimpleToolTransform(tools={"f": divide}), name="g")
        assert run(tool, {}).is_error

    def test_arguments_that_look_like_its_syntax_arrive_whole(self, chat):
        chat = chat(1, self.tool(lambda text: text))
        assert chat.step(call("f", text="</tool>\n<tool>f\n{}</tool>")) == [["</tool>\n<tool>f\n{}</tool>"]]

    def test_rows_run_side_by_side_and_calls_of_one_row_in_order(self, chat):
        """Three rows meet at a barrier; then two calls of one row find themselves alone."""
        barrier, inside = threading.Barrier(3), []

        def meet(where):
            if where == "barrier":
                barrier.wait(30)
                return "met"
            inside.append(1)
            time.sleep(0)
            alone = len(inside) == 1
            inside.pop()
            return alone

        chat = chat(3, self.tool(meet))
        assert chat.step(*[call("f", where="barrier")] * 3) == [["met"]] * 3
        assert chat.step(calls("f", *[{"where": "here"}] * 3), "x", "x")[0] == ["true"] * 3

    def test_its_processes_end_when_the_call_is_given_up(self, chat, tmp_path):
        """A function that waits for a program must not wait on after the call is over."""
        note = tmp_path / "pid"

        def wait():
            import subprocess

            with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
                note.write_text(str(process.pid))
                return process.wait()

        chat = chat(1, self.tool(wait), per_call_timeout=1.0)
        assert "did not finish" in chat.step(call("f"))[0][0]
        assert gone(int(note.read_text()))


class Browser(BrowserTransform):
    """A browser without a browser: its pages are a dict, and it keeps a diary."""

    def __init__(self, **options):
        super().__init__(**options)
        self.diary, self.inside, self.most = [], 0, 0

    async def _execute_browser_action_async(self, **kwargs):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        if kwargs["action"] == "navigate":
            return await self._navigate(kwargs["url"])
        return {"success": False, "error": f"no element {kwargs.get('selector')}"}

    async def _init_browser(self):
        self.diary.append("init")

    async def _navigate(self, url):
        if not self._validate_url(url):
            return {"success": False, "error": "Domain not allowed"}
        await self._init_browser()
        return {"success": True, "result": {"url": url, "status": 200}}

    def close(self):
        if "diary" in self.__dict__:
            self.diary.append("close")


class TestBrowserTransform:
    def test_it_answers_with_the_result_alone(self, chat):
        chat = chat(1, as_tool(Browser(), name="browser"))
        assert chat.step(call("browser", action="navigate", url="https://a.org")) == [
            ['{"url": "https://a.org", "status": 200}']
        ]

    @pytest.mark.parametrize(
        "args", [{"action": "navigate", "url": "https://b.org"}, {"action": "click", "selector": "#x"}]
    )
    def test_what_it_reports_as_failed_is_an_error(self, chat, args):
        chat = chat(1, as_tool(Browser(allowed_domains=["a.org"]), name="browser"))
        chat.step(call("browser", **args))
        assert chat.errors() == [1]

    def test_one_page_serves_one_row_at_a_time(self, chat):
        """It has one page and one loop: two rows at once would be "this event loop is already running"."""
        browser = Browser()
        chat = chat(4, as_tool(browser, name="browser"))
        chat.step(*[call("browser", action="navigate", url="https://a.org")] * 4)
        assert chat.errors() == [0] * 4
        assert browser.most == 1

    def test_it_is_closed_with_the_environment(self, chat):
        browser = Browser()
        chat = chat(1, as_tool(browser, name="browser"))
        chat.compose.close()
        assert browser.diary[-1] == "close"

    def test_an_argument_that_is_missing_is_an_error_and_no_crash_of_the_batch(self, chat):
        chat = chat(2, as_tool(Browser(), name="browser"))
        found = chat.step(call("browser"), call("browser", action="navigate", url="https://a.org"))
        assert chat.errors() == [1, 0]
        assert "200" in found[1][0]


class Server(MCPToolTransform):
    """An MCP client without a server: a loop on a thread, as the real one has it."""

    def _start_mcp_thread(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _execute_tool_async(self, server_name, tool_name, args_json):
        if tool_name == "fail":
            return {"success": False, "error": "MCP tool call failed: no"}
        if tool_name == "hang":
            await asyncio.sleep(600)
        return {"success": True, "result": f"{server_name}/{tool_name} {args_json}"}

    def close(self):
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
        self._loop = self._thread = None


async def cancel_others():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class TestMCPToolTransform:
    servers: ClassVar = {"files": {"command": "no-such-command"}, "web": {"command": "no-such-command"}}

    @pytest.mark.parametrize(
        ("name", "where"), [("files.read", "files/read"), ("web.a.b", "web/a.b"), ("read", "files/read")]
    )
    def test_server_and_tool_are_read_off_the_name(self, chat, name, where):
        chat = chat(1, as_tool(Server(self.servers), name=name))
        assert chat.step(call(name, path="x")) == [[where + ' {"path": "x"}']]

    def test_a_failure_is_an_error(self, chat):
        chat = chat(1, as_tool(Server(self.servers), name="files.fail"))
        assert chat.step(call("files.fail")) == [["MCP tool call failed: no"]]
        assert chat.errors() == [1]

    def test_its_own_timeout_is_a_timeout(self):
        tool = as_tool(Server(self.servers, timeout=0.1), name="files.hang")
        assert run(tool, {}).status is Status.TIMEOUT
        asyncio.run(tool.teardown())

    def test_a_server_that_is_not_there_is_an_error_and_not_a_hang(self):
        tool = as_tool(MCPToolTransform({"dead": {"command": "/no/such/command"}}), name="dead.tool")
        result = run(tool, {})
        assert result.is_error
        assert "not connected" in result.text
        asyncio.run(tool.teardown())

    def test_a_closed_one_is_an_error(self):
        transform = Server(self.servers)
        tool = as_tool(transform, name="files.read")
        transform.close()
        assert "not running" in run(tool, {}).text


class Search:
    name = "search"
    schema_in, schema_out = {"query": str}, {"results": list}

    def __init__(self):
        self.states = []

    def __call__(self, query, _state=None, **kwargs):
        self.states.append(_state)
        if query == "nothing":
            return {"error": "not found"}
        if query == "raise":
            raise ValueError("a bug")
        return {"results": [query, 1, None]}


class TestExecuteToolsInOrder:
    def make(self, service, **options):
        return ExecuteToolsInOrder(ToolRegistry([service]), XMLBlockParser(), **options)

    def test_the_service_answers_with_json(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="search"))
        assert chat.step(call("search", query="x")) == [['{"results": ["x", 1, null]}']]

    def test_an_error_in_its_answer_is_an_error(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="search"))
        chat.step(call("search", query="nothing"))
        assert chat.errors() == [1]

    def test_what_it_raises_costs_its_row_only(self, chat, caplog):
        chat = chat(2, as_tool(self.make(Search()), name="search"))
        found = chat.step(call("search", query="raise"), call("search", query="x"))
        assert chat.errors() == [1, 0]
        assert found[1] == ['{"results": ["x", 1, null]}']

    def test_an_answer_that_is_no_json_does_not_cost_the_batch(self, chat, caplog):
        """The released transform loses all rows to it."""

        class Odd(Search):
            def __call__(self, **kwargs):
                return {"x": object()}

        chat = chat(2, as_tool(self.make(Odd()), name="search"), StopTool())
        found = chat.step(call("search", query="x"), call("stop"))
        assert chat.errors() == [1, 0]
        assert found[1] == ["[stop] done"]

    def test_a_service_that_is_not_registered_is_an_error_that_says_so(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="serch"))
        assert "no service named 'serch'" in chat.step(call("serch", query="x"))[0][0]

    def test_it_gets_the_state_of_its_row_where_it_is_asked_for(self, chat):
        search = Search()
        chat = chat(2, as_tool(self.make(search), name="search", wants_state=True), pass_state_to_tools=True)
        chat.td["level"] = torch.tensor([[1], [2]])
        chat.step(*[call("search", query="x")] * 2)
        assert sorted(state["level"].item() for state in search.states) == [1, 2]
        assert all("history" not in set(state.keys()) for state in search.states)

    def test_without_state_it_gets_an_empty_one_as_before(self, chat):
        search = Search()
        chat = chat(1, as_tool(self.make(search), name="search"))
        chat.step(call("search", query="x"))
        assert search.states == [{}]

    def test_a_transform_that_passes_no_state_passes_none(self, chat):
        class Plain(Search):
            def __call__(self, query):
                return {"results": query}

        chat = chat(1, as_tool(self.make(Plain(), pass_state_to_tools=False), name="search"))
        assert chat.step(call("search", query="x")) == [['{"results": "x"}']]


class Own:
    """A transform of somebody's own: it has the one stable seam."""

    def __init__(self, answer=lambda content, index: [content]):
        self.answer, self.closed = answer, 0

    def _process_batch_item(self, content, index):
        return self.answer(content, index)

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset

    def close(self):
        self.closed += 1


class Bare:
    """Nothing but the seam."""

    def _process_batch_item(self, content, index):
        return [content]


class TestOwn:
    def test_it_gets_the_call_in_torchrl_s_tags_with_its_row(self, chat):
        chat = chat(2, as_tool(Own(lambda content, index: [f"{index}: {content}"]), name="own"))
        assert chat.step(*[call("own", a="é<")] * 2) == [
            [f'{i}: <tool name="own">{{"a": "é<"}}</tool>'] for i in range(2)
        ]

    def test_own_syntax_is_written_by_render_call(self, chat):
        own = as_tool(Own(), name="own", render_call=lambda name, args: f"CALL {name}({args['x']})")
        assert chat(1, own).step(call("own", x=1)) == [["CALL own(1)"]]

    def test_render_call_comes_before_any_layer(self, chat):
        """Whoever writes the syntax wants the transform to read it, whatever else it has."""
        simple = SimpleToolTransform(tools={"f": divide})
        tool = as_tool(
            simple, name="f", render_call=lambda name, args: f"<tool>{name}\n" + '{"a": 1, "b": 2}</tool>'
        )
        assert "0.5" in chat(1, tool).step(call("f"))[0][0]

    def test_several_results_are_the_parts_of_one(self):
        result = run(as_tool(Own(lambda content, index: ["one", "two"]), name="own"), {})
        assert [part.text for part in result.parts] == ["one", "two"]

    def test_a_string_is_one_result_and_not_its_letters(self):
        assert run(as_tool(Own(lambda content, index: "abc"), name="own"), {}).text == "abc"

    def test_finding_no_call_is_an_error_that_names_the_remedy(self, chat):
        chat = chat(1, as_tool(Own(lambda content, index: None), name="own"))
        assert "render_call" in chat.step(call("own"))[0][0]
        assert chat.errors() == [1]

    def test_a_text_that_speaks_of_failure_as_torchrl_does_is_an_error(self):
        assert run(as_tool(Own(lambda content, index: ["Tool f failed:\nno"]), name="own"), {}).is_error

    def test_what_it_raises_costs_its_row_only(self, chat, caplog):
        def answer(content, index):
            if index == 0:
                raise KeyError("a bug")
            return ["fine"]

        chat = chat(2, as_tool(Own(answer), name="own"))
        assert chat.step(*[call("own")] * 2)[1] == ["fine"]
        assert chat.errors() == [1, 0]

    def test_it_is_closed_with_the_environment_once(self, chat):
        own = Own()
        chat = chat(1, as_tool(own, name="own"))
        chat.compose.close()
        chat.compose.close()
        assert own.closed == 1

    def test_it_can_be_reset_though_it_has_no_reset(self, chat):
        chat = chat(2, as_tool(Bare(), name="bare"))
        chat.reset(True, False)
        assert chat.errors() == [0, 0]

    def test_its_schema_is_what_was_given(self):
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        assert as_tool(Own(), name="own", input_schema=schema).spec()["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "thing", [None, "python", StepCounter(), object(), divide, functools.partial(divide, 1)]
)
def test_what_is_no_tool_transform_is_refused(thing):
    with pytest.raises(TypeError, match="no tool transform"):
        as_tool(thing, name="x")


def test_two_names_of_one_transform_are_two_tools(chat):
    simple = SimpleToolTransform(tools={"f": divide, "g": lambda: ToolResult.from_text("g")})
    chat = chat(1, as_tool(simple, name="f"), as_tool(simple, name="g"))
    assert chat.step(call("g")) == [["g"]]
    assert chat.step(call("f", a=1, b=1)) == [['{"quotient": 1.0}']]
