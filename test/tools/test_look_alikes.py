"""Sandboxes, interpreters and parsers that derive from no class of ours, as scripts of the PR stack do."""

import contextlib
import io
import threading
from typing import Any

import pytest

from torchrl_agentic import FileReadTool, PythonTool, ShellTool, ToolCallParser
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall, ParseResult, Status, ToolResult
from torchrl_agentic.parsers import XMLToolCallParser, get_parser
from torchrl_agentic.repl import JupyterRepl, Repl, ReplError, ReplResult, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, Sandbox, SandboxResult

OPENED: list[int] = []


class Memory:
    """A sandbox in memory with the PR's protocol: `tee PATH TEXT` writes, `cat PATH` reads."""

    name = "memory"

    def __init__(self, banner: str = "") -> None:
        self.limits = ResourceLimits()
        self.banner = banner
        self.files: dict[str, bytes] = {}
        self.events: list[str] = []

    async def open(self) -> None:
        self.events.append("open")
        OPENED.append(id(self))

    async def close(self) -> None:
        self.events.append("close")
        OPENED.remove(id(self))

    async def run(
        self, argv: Any, *, stdin: Any = None, cwd: Any = None, limits: Any = None
    ) -> SandboxResult:
        if argv[0] == "tee":
            self.files[argv[1]] = argv[2].encode()
            return SandboxResult(self.banner, "", 0, 0.0)
        return SandboxResult(self.files.get(argv[1], b"nothing").decode(), "", 0, 0.0)

    async def write_file(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        return self.files[path][:max_bytes]


class Plain:
    """An interpreter in this process with the PR's protocol."""

    name = "plain"

    def __init__(self, sandbox: Any) -> None:
        self.sandbox = self._mine = sandbox
        self.names: dict[str, Any] = {}

    async def open(self) -> None:
        self.names["files"] = self._mine.files

    async def close(self) -> None: ...

    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self.names)
        except Exception as error:
            return ReplResult(printed.getvalue(), error=ReplError(type(error).__name__, str(error)))
        return ReplResult(printed.getvalue())

    async def interrupt(self) -> None: ...

    async def restart(self) -> None: ...


class Shout:
    """A parser with the PR's protocol."""

    name = "shout"

    def parse(self, response: Any) -> ParseResult:
        return ParseResult("", (ParsedCall(str(response).lower(), {}, "c"),), response)

    def render_call(self, call: ParsedCall) -> str:
        return call.tool.upper()

    def render_result(self, call_id: str, result: ToolResult) -> dict[str, Any]:
        return {"role": "tool", "content": result.text}


async def asked(
    dispatcher: Dispatcher, trajectory: str, *calls: tuple[str, dict[str, Any]]
) -> list[ToolResult]:
    async with dispatcher.session(trajectory) as session:
        parsed = [ParsedCall(name, args, f"c{index}") for index, (name, args) in enumerate(calls)]
        return await session.run(parsed)


@pytest.mark.parametrize(
    ("item", "interface"), [(Memory(), Sandbox), (Plain(Memory()), Repl), (Shout(), ToolCallParser)]
)
def test_a_complete_look_alike_is_an_instance(item: Any, interface: Any):
    assert isinstance(item, interface)
    assert not isinstance(object(), interface)
    assert not isinstance(type(item), interface)


def test_look_alike_is_not_an_instance_of_a_subclass():
    assert not isinstance(Memory(), BubblewrapSandbox)
    assert not isinstance(Plain(Memory()), SubprocessRepl)
    assert not isinstance(Shout(), XMLToolCallParser)


async def test_each_trajectory_has_a_look_alike_sandbox_of_its_own_that_its_tools_share():
    given = Memory()
    dispatcher = Dispatcher([ShellTool(given), FileReadTool(given)])
    write, read = ("shell", {"argv": ["tee", "a", "text"]}), ("file_read", {"path": "a"})
    written, found = await asked(dispatcher, "1", write, read)
    assert (written.status, found.text) == (Status.OK, "text")
    (other,) = await asked(dispatcher, "2", ("shell", {"argv": ["cat", "a"]}))
    assert other.text.startswith("nothing")
    await dispatcher.close()
    assert given.files == {}
    assert OPENED == []


async def test_each_trajectory_has_a_look_alike_interpreter_in_the_sandbox_of_its_tools():
    given = Memory()
    repl = Plain(given)
    dispatcher = Dispatcher([PythonTool(repl), ShellTool(given)])
    results = await asked(
        dispatcher,
        "1",
        ("shell", {"argv": ["tee", "a", "text"]}),
        ("python", {"code": "x = files['a']"}),
        ("python", {"code": "print(x)"}),
        ("python", {"code": "print(1); 1 / 0"}),
    )
    assert [result.status for result in results] == [Status.OK] * 3 + [Status.ERROR]
    assert results[2].text == "b'text'"
    assert "ZeroDivisionError" in results[3].text
    (other,) = await asked(dispatcher, "2", ("python", {"code": "print(x)"}))
    assert "NameError" in other.text
    await dispatcher.close()
    assert repl.names == {}
    assert OPENED == []


async def test_branch_of_a_look_alike_interpreter_replays_its_cells():
    tool = PythonTool(Plain(Memory()))
    async with tool.session("1") as live:
        await live.repl.execute("x = 1")
        copy = live.repl.fresh()
        async with copy:
            for cell in live.repl.cells:
                await copy.execute(cell)
            assert (await copy.execute("print(x)")).stdout == "1\n"
        await live.repl.interrupt()
        await live.repl.restart()
        assert live.repl.cells == []


async def test_a_look_alike_says_itself_how_to_make_another_one():
    class Fresh(Memory):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()  # cannot be copied

        def fresh(self) -> Any:
            Fresh.made += 1
            return Fresh()

    dispatcher = Dispatcher([ShellTool(Fresh())])
    (result,) = await asked(dispatcher, "1", ("shell", {"argv": ["cat", "a"]}))
    await dispatcher.close()
    assert result.status is Status.OK
    assert Fresh.made == 1


def without(kind: type, *names: str) -> Any:
    return type(kind.__name__, (), {key: value for key, value in vars(kind).items() if key not in names})


@pytest.mark.parametrize("make", [ShellTool, FileReadTool])
@pytest.mark.parametrize("name", ["open", "close", "run", "write_file", "read_file"])
def test_incomplete_sandbox_is_rejected_with_the_missing_members(make: Any, name: str):
    with pytest.raises(TypeError, match=f"Memory lacks {name}$"):
        make(without(Memory, name)())


@pytest.mark.parametrize("name", ["open", "close", "execute", "interrupt", "restart"])
def test_incomplete_interpreter_is_rejected_with_the_missing_members(name: str):
    with pytest.raises(TypeError, match=f"Plain lacks {name}$"):
        PythonTool(without(Plain, name)(Memory()))


@pytest.mark.parametrize("name", ["parse", "render_call", "render_result"])
def test_incomplete_parser_is_rejected_with_the_missing_members(name: str):
    assert not isinstance(without(Shout, name)(), ToolCallParser)
    with pytest.raises(TypeError, match=f"lacks {name}$"):
        get_parser(without(Shout, name)())


@pytest.mark.parametrize("make", [SubprocessRepl, JupyterRepl])
def test_our_interpreters_need_a_sandbox_that_starts_processes(make: Any):
    with pytest.raises(TypeError, match=r"Memory lacks spawn$"):
        make(Memory())
    with pytest.raises(TypeError, match="int lacks limits, open"):
        make(3)


@pytest.mark.parametrize(
    ("make", "kind"), [(ShellTool, Memory), (PythonTool, Plain), (SubprocessRepl, Memory)]
)
def test_class_is_rejected_with_the_correct_form(make: Any, kind: type):
    with pytest.raises(TypeError, match=rf"write {kind.__name__}\(\.\.\.\)"):
        make(kind)


def test_sandbox_that_cannot_be_recreated_is_rejected():
    locked, opened = Memory(), Memory()
    locked.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    opened.is_open = True  # pyright: ignore[reportAttributeAccessIssue]
    for sandbox, reason in ((locked, "cannot be copied"), (opened, "already open")):
        with pytest.raises(TypeError, match=rf"has no fresh\(\), and .*{reason}.*define fresh\(\)"):
            ShellTool(sandbox)
        with pytest.raises(TypeError, match=reason):
            PythonTool(Plain(sandbox))
