"""The tools that come with the package, through a dispatcher and by hand."""

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import StopSignal, ToolError
from torchrl_agentic.messages import ParsedCall, Status, ToolResult
from torchrl_agentic.repl import SubprocessRepl, default_repl
from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, UnsafeSubprocessSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.testing import ToolContract
from torchrl_agentic.tools import FileEditTool, FileReadTool, FileWriteTool, PythonTool, ShellTool, StopTool
from torchrl_agentic.tools.base import ToolContext

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")


class TestPython(ToolContract):
    good = {"code": "1 + 1"}  # noqa: RUF012
    bad = ({}, {"code": 3}, {"code": None})
    endless = (
        {"code": "print('begun')\nwhile True: pass"},
        {"code": "import os\nos.system('echo begun; sleep 600')"},
    )

    def make(self) -> PythonTool:
        return PythonTool()


class TestShell(ToolContract):
    good = {"argv": ["true"]}  # noqa: RUF012
    bad = ({"argv": "ls"}, {"command": 3}, {"argv": [1]})
    endless = ({"command": "echo begun; sleep 600"}, {"argv": ["sh", "-c", "echo begun; exec sleep 600"]})

    def make(self) -> ShellTool:
        return ShellTool(BubblewrapSandbox())


class TestFileWrite(ToolContract):
    good = {"path": "f", "content": "x"}  # noqa: RUF012
    bad = ({"path": "f"}, {"path": 3, "content": "x"}, {"content": "x"})

    def make(self) -> FileWriteTool:
        return FileWriteTool(BubblewrapSandbox())


@pytest.fixture
async def dispatcher() -> AsyncGenerator[Dispatcher]:
    sandbox = BubblewrapSandbox(ResourceLimits(wall_seconds=1.5))
    dispatcher = Dispatcher(
        [
            PythonTool(output_max_chars=100), ShellTool(sandbox, output_max_chars=200),
            FileReadTool(sandbox), FileWriteTool(sandbox), FileEditTool(sandbox), StopTool(),
        ],
        per_call_timeout=8,
    )  # fmt: skip
    yield dispatcher
    await dispatcher.close()


async def _ask(dispatcher: Dispatcher, name: str, trajectory: str = "t", **args: Any) -> ToolResult:
    async with dispatcher.session(trajectory) as session:
        return (await session.run([ParsedCall(name, args, "c1")]))[0]


async def test_state_lasts_as_long_as_its_trajectory(dispatcher: Dispatcher):
    one, other = dispatcher.session("t0"), dispatcher.session("t1")
    code = {"code": "secret = 7"}
    await dispatcher.run([(one, [ParsedCall("python", code, "c1")], None)])
    calls = [ParsedCall("python", {"code": "print(secret)"}, "c2")]
    (mine,), (theirs,) = await dispatcher.run([(one, calls, None), (other, calls, None)])
    assert (mine.text, mine.status) == ("7", Status.OK)
    assert theirs.status is Status.ERROR
    assert "NameError" in theirs.text
    await one.close()
    assert "NameError" in (await one.run(calls))[0].text
    await one.close()


async def test_a_template_is_used_itself_by_hand_only():
    repl = default_repl()
    tool = PythonTool(repl)
    dispatcher = Dispatcher([tool])
    await _ask(dispatcher, "python", code="x = 1")
    assert not repl.sandbox.is_open
    await tool.setup()
    await tool.run({"code": "x = 2"}, ToolContext(call_id="c1"))
    assert (await repl.execute("x")).value == "2"
    await tool.teardown()
    await dispatcher.close()


async def test_timed_out_code_returns_its_output():
    dispatcher = Dispatcher([PythonTool(timeout=0.5)])
    result = await _ask(dispatcher, "python", code="print('begun')\nwhile True: pass")
    assert result.status is Status.TIMEOUT
    assert result.text.startswith("begun\nExecution exceeded 0.5 s and was stopped")
    assert result.meta["timed_out"]
    await dispatcher.close()


async def test_code_stops_before_the_dispatcher_gives_up_so_that_output_is_not_lost():
    dispatcher = Dispatcher([PythonTool(timeout=None)], per_call_timeout=3.2)
    result = await _ask(dispatcher, "python", code="print('begun')\nwhile True: pass")
    assert result.status is Status.TIMEOUT
    assert result.text.startswith("begun\n")
    await dispatcher.close()


@pytest.mark.parametrize("length", [101, 110, 5000])
async def test_long_output_of_python_loses_its_middle_and_says_so(dispatcher: Dispatcher, length: int):
    result = await _ask(dispatcher, "python", code=f"print('a' * {length - 3} + 'end')")
    assert "characters omitted" in result.text
    assert result.text.endswith("end")
    assert result.meta["truncated"] is True


async def test_long_output_of_a_command_keeps_its_exit_code_and_says_so(dispatcher: Dispatcher):
    result = await _ask(dispatcher, "shell", argv=["seq", "1000"])
    assert "characters omitted" in result.text
    assert result.text.endswith("[exit 0]")
    assert result.meta["truncated"] is True


async def test_a_command_shows_both_outputs_and_how_it_ended(dispatcher: Dispatcher):
    result = await _ask(dispatcher, "shell", command="sh -c 'echo out; echo err >&2; exit 3'")
    assert result.text == "out\n[stderr]\nerr\n[exit 3]"
    assert (result.status, result.meta["exit_code"]) == (Status.ERROR, 3)


@pytest.mark.parametrize(
    ("command", "text", "code"),
    [
        ("cd /tmp && pwd", "/tmp\n[exit 0]", 0),
        ("echo hi; exit 3", "hi\n[exit 3]", 3),
        ("printf 'b\\na\\n' > f.txt && sort *.txt | head -1", "a\n[exit 0]", 0),
        ("x=(1 2); echo ${#x[@]}", "2\n[exit 0]", 0),  # bash, not sh
        ("exit 137", "[exit 137]", 137),
    ],
)
async def test_a_command_has_the_meaning_that_it_has_in_a_shell(command: str, text: str, code: int):
    dispatcher = Dispatcher([ShellTool()])
    result = await _ask(dispatcher, "shell", command=command)
    await dispatcher.close()
    assert (result.text, result.meta["exit_code"], result.is_error) == (text, code, code != 0)


async def test_without_bash_sh_runs_a_command(tmp_path: Path):
    for program in ("sh", "echo"):
        (tmp_path / program).symlink_to(f"/bin/{program}")
    limits = ResourceLimits(env={"PATH": str(tmp_path)})
    tool = ShellTool(UnsafeSubprocessSandbox(limits))
    with pytest.warns(UserWarning, match="all your rights"):
        result = await tool.run({"command": "echo $0 ok"}, ToolContext(call_id="c1"))
    await tool.teardown()
    assert result.text == "sh ok\n[exit 0]"


async def test_shell_and_file_tools_without_a_sandbox_share_the_files_of_a_trajectory():
    dispatcher = Dispatcher([ShellTool(), FileReadTool(), FileWriteTool(), FileEditTool()])
    async with dispatcher.session("a") as one, dispatcher.session("b") as other:
        calls = [
            ParsedCall("file_write", {"path": "f", "content": "old"}, "c1"),
            ParsedCall("file_edit", {"path": "f", "old": "old", "new": "new"}, "c2"),
            ParsedCall("shell", {"command": "cat f; echo shell > g"}, "c3"),
            ParsedCall("file_read", {"path": "g"}, "c4"),
        ]
        *_, said, read = await one.run(calls)
        (alone,) = await other.run([ParsedCall("file_read", {"path": "g"}, "c1")])
    await dispatcher.close()
    assert (said.text, read.text) == ("new\n[exit 0]", "shell\n")
    assert alone.status is Status.ERROR


async def test_shell_and_file_tools_without_a_sandbox_work_by_hand():
    ctx = ToolContext(call_id="c1")
    for tool, args in (
        (ShellTool(), {"command": "echo hi"}),
        (FileWriteTool(), {"path": "f", "content": "x"}),
    ):
        assert not (await tool.run(args, ctx)).is_error
        await tool.teardown()


async def test_timed_out_command_returns_its_output(dispatcher: Dispatcher):
    result = await _ask(dispatcher, "shell", argv=["sh", "-c", "echo begun; sleep 60"])
    assert result.status is Status.TIMEOUT
    assert result.text.startswith("begun\n[stopped after")


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"command": "ls", "argv": ["ls"]},
        {"command": "echo 'unclosed"},
        {"command": ""},
        {"command": "  "},
        {"command": "a\0b"},
        {"command": "echo " + "x" * 200_000},
        {"command": "no-such-command"},
        {"command": "pwd", "cwd": "missing"},
        {"argv": []},
        {"argv": ["a\0b"]},
        {"argv": ["pwd"], "cwd": "/etc"},
        {"argv": ["pwd"], "cwd": "missing"},
        {"argv": ["echo", "x" * 200_000]},
        {"argv": ["no-such-command"]},
    ],
    ids=lambda args: str(args)[:50],
)
async def test_the_models_mistakes_are_errors_and_never_infra(dispatcher: Dispatcher, args: dict[str, Any]):
    """A reward leaves INFRA out: a model could choose it."""
    result = await _ask(dispatcher, "shell", **args)
    assert result.status is Status.ERROR
    assert result.text


async def test_files_of_commands_can_be_read_by_a_tool_on_the_same_sandbox(dispatcher: Dispatcher):
    """DESIGN section 5: shell and file tools share "workspace". Alone, a file tool has nothing to read."""
    async with dispatcher.session("t") as session:
        calls = [
            ParsedCall("shell", {"argv": ["sh", "-c", "echo content > f"]}, "c1"),
            ParsedCall("file_read", {"path": "f"}, "c2"),
        ]
        _, read = await session.run(calls)
    assert (read.status, read.text) == (Status.OK, "content\n")


async def test_a_file_is_read_by_hand():
    sandbox = BubblewrapSandbox()
    tool, ctx = FileReadTool(sandbox), ToolContext(call_id="c1")
    await sandbox.open()
    await sandbox.write_file("f", b"caf\xc3\xa9 \xff")
    assert (await tool.run({"path": "f"}, ctx)).text == "café \ufffd"
    assert (await tool.run({"path": "/work/f", "max_bytes": 3}, ctx)).text == "caf"
    for path in ("missing", "../f", "/etc/passwd", ".", "a\0b"):
        with pytest.raises(ToolError):
            await tool.run({"path": path}, ctx)
    await tool.teardown()
    assert not sandbox.is_open


async def test_files_are_written_edited_and_run_in_the_order_of_the_calls(dispatcher: Dispatcher):
    """All four work on one workspace; nothing but their effects keeps them in order."""
    async with dispatcher.session("t") as session:
        calls = [
            ParsedCall("file_write", {"path": "d/p.py", "content": "print('one', 'one')\n"}, "c1"),
            ParsedCall("file_edit", {"path": "d/p.py", "old": "'one', 'one'", "new": "'é'"}, "c2"),
            ParsedCall("shell", {"command": "cat d/p.py"}, "c3"),
            ParsedCall("file_read", {"path": "/work/d/p.py"}, "c4"),
        ]
        results = await session.run(calls)
    assert [result.status for result in results] == [Status.OK] * 4
    assert results[0].text == "wrote 20 bytes to d/p.py"
    assert results[1].text == "replaced 1 occurrence in d/p.py"
    assert results[3].text == "print('é')\n"


async def test_an_edit_that_is_not_clear_changes_nothing():
    sandbox = BubblewrapSandbox()
    edit, ctx = FileEditTool(sandbox), ToolContext(call_id="c1")
    await sandbox.open()
    for path, data in (("f", b"a b a"), ("bytes", b"\xff"), ("big", b"a" * ((1 << 20) + 1))):
        await sandbox.write_file(path, data)
    for path, old, said in (
        ("f", "a", "2 times"), ("f", "c", "does not contain"), ("bytes", "a", "not UTF-8"),
        ("big", "a", "more than"), ("missing", "a", "missing"), ("../f", "a", "work"),
        ("/etc/x", "x", "work"),
    ):  # fmt: skip
        with pytest.raises(ToolError, match=said):
            await edit.run({"path": path, "old": old, "new": "x"}, ctx)
    assert await sandbox.read_file("f") == b"a b a"
    done = await edit.run({"path": "f", "old": "a", "new": "", "all": True}, ctx)
    assert (done.text, done.meta) == ("replaced 2 occurrences in f", {"replaced": 2})
    assert await sandbox.read_file("f") == b" b "
    with pytest.raises(ToolError, match="surrogate"):
        await FileWriteTool(sandbox).run({"path": "f", "content": "\ud800"}, ctx)
    for path in ("../f", "/etc/f", "a\0b", "."):
        with pytest.raises(ToolError):
            await FileWriteTool(sandbox).run({"path": path, "content": "x"}, ctx)
    await edit.teardown()
    assert not sandbox.is_open


@pytest.mark.parametrize("new", ["bb", "é", "b" * 500, "b" * (1 << 19)])
async def test_an_edit_that_would_make_a_file_too_large_is_refused_before_its_text_is_built(new: str):
    """The last of these texts would have 512 GiB."""
    async with BubblewrapSandbox() as sandbox:
        await sandbox.write_file("f", b"a" * (1 << 20))
        args, said = {"path": "f", "old": "a", "new": new, "all": True}, f"{len(new.encode()) << 20} bytes"
        with pytest.raises(ToolError, match=f"would have {said}.* at most {1 << 20}"):
            await FileEditTool(sandbox).run(args, ToolContext(call_id="c1"))
        assert await sandbox.read_file("f") == b"a" * (1 << 20)


async def test_an_edit_may_fill_a_file_up_to_the_limit():
    async with BubblewrapSandbox() as sandbox:
        await sandbox.write_file("f", "é".encode() * (1 << 19))
        args = {"path": "f", "old": "é", "new": "ab", "all": True}
        await FileEditTool(sandbox).run(args, ToolContext(call_id="c1"))
        assert await sandbox.read_file("f") == b"ab" * (1 << 19)


@pytest.mark.parametrize("limit", [1 << 10, 1 << 20])
async def test_a_file_that_is_larger_than_the_limit_of_a_file_is_not_written(limit: int):
    async with BubblewrapSandbox(ResourceLimits(disk_bytes=limit if limit < 1 << 20 else 1 << 30)) as sandbox:
        write, edit, ctx = FileWriteTool(sandbox), FileEditTool(sandbox), ToolContext(call_id="c1")
        for text in ("a" * (limit + 1), "é" * (limit // 2 + 1)):
            with pytest.raises(ToolError, match=f"would have .* at most {limit}"):
                await write.run({"path": "f", "content": text}, ctx)
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("f")
        await write.run({"path": "f", "content": "a" * limit}, ctx)
        with pytest.raises(ToolError, match=f"would have {2 * limit} bytes.* at most {limit}"):
            await edit.run({"path": "f", "old": "a", "new": "bb", "all": True}, ctx)


async def test_a_lost_sandbox_is_infra(dispatcher: Dispatcher):
    """The outer bwrap is killed from outside before code runs."""
    seen: list[int] = []

    class Killing(SubprocessRepl):
        def fresh(self, sandbox: Any = None) -> "Killing":
            return Killing(sandbox)

        async def execute(self, code: str, *, timeout: float | None = None) -> Any:
            seen.append(self._process.process.pid)
            os.kill(seen[-1], signal.SIGKILL)
            return await super().execute(code, timeout=timeout)

    lost = Dispatcher([PythonTool(Killing(BubblewrapSandbox()))])
    result = await _ask(lost, "python", code="import time; time.sleep(5)")
    assert seen
    assert result.status is Status.INFRA
    await lost.close()


async def test_stop_ends_the_trajectory_and_the_others_are_answered(dispatcher: Dispatcher):
    async with dispatcher.session("t") as session:
        stop, other = await session.run(
            [ParsedCall("stop", {"reason": "done"}, "c1"), ParsedCall("shell", {"argv": ["true"]}, "c2")]
        )
    assert (stop.stop, stop.status, stop.text) == (True, Status.OK, "[stop] done")
    assert (other.stop, other.status) == (False, Status.OK)
    with pytest.raises(StopSignal, match="done"):
        await StopTool().run({}, ToolContext(call_id="c1"))


def test_timeout_of_zero_is_rejected():
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            PythonTool(timeout=timeout)
