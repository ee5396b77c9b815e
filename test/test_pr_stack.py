"""The tables of `docs/migrate/pr_stack.md` hold: what goes on unchanged, what to change, what differs on
purpose."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import tensordict
from torchrl.envs import StepCounter

import torchrl_agentic
from torchrl_agentic import (
    DispatchResult,
    HttpTool,
    MCPServerConfig,
    MCPToolset,
    ParsedCall,
    ShellTool,
    Tool,
    ToolCompose,
    ToolContext,
    ToolError,
    ToolResult,
    validate_args,
)
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.repl import JupyterRepl
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    LandlockSandbox,
    ResourceLimits,
    UnsafeSubprocessSandbox,
    default_sandbox,
)
from torchrl_agentic.sandbox.forkserver_sandbox import ForkServerSandbox
from torchrl_agentic.sandbox.tiers import TIERS

PAGE = (Path(__file__).parent.parent / "docs" / "migrate" / "pr_stack.md").read_text("utf-8")
PUBLIC = (
    "ToolCompose DispatchResult RateLimiter Tool ToolCallParser ToolContext ToolError "
    "ToolResult ToolResultPart TextPart JsonPart ImagePart FileRefPart ParsedCall "
    "ParseResult PythonTool ShellTool FileReadTool StopTool StopSignal HttpTool "
    "MCPServerConfig MCPToolset as_tool json_schema_from_pydantic validate_args "
)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def code(cell: str) -> str:
    return cell.removeprefix("`").removesuffix("`")


class Duck:
    name, description, input_schema = "duck", "Quack.", {"type": "object"}
    limits = ResourceLimits()

    async def run(self, *args: Any, **options: Any) -> str:
        return "quack"

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def write_file(self, path: str, data: bytes) -> None: ...
    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        return b""

    tools = ()


NAMES = {"ToolResult": ToolResult, "DispatchResult": DispatchResult, "HttpTool": HttpTool}
UNCHANGED: dict[str, Any] = {}
DIFFERENT: dict[str, Any] = {}


def row(table: dict[str, Any], name: str) -> Any:
    def keep(test: Any) -> Any:
        table[name] = test
        return test

    return keep


@row(UNCHANGED, "from torchrl_agentic import ToolCompose, DispatchResult, RateLimiter")
def _() -> None:
    assert [name for name in PUBLIC.split() if not hasattr(torchrl_agentic, name)] == []


@row(UNCHANGED, "isinstance(look_alike, Tool)")
def _() -> None:
    assert isinstance(Duck(), Tool)


@row(UNCHANGED, "ShellTool(look_alike)")
def _() -> None:
    ShellTool(Duck())  # pyright: ignore[reportArgumentType]


@row(UNCHANGED, "compose.add_toolset(look_alike)")
def _() -> None:
    compose = ToolCompose()
    compose.add_toolset(Duck())
    compose.close()


@row(UNCHANGED, "MCPToolset(config).tools")
def _() -> None:
    toolset = MCPToolset(MCPServerConfig("true"))
    assert (toolset.tools, callable(toolset.open), callable(toolset.close)) == ((), True, True)


@row(UNCHANGED, "compose.append_transform(StepCounter())")
def _() -> None:
    with pytest.raises(TypeError, match="TransformedEnv"):
        ToolCompose().append_transform(StepCounter())


@row(UNCHANGED, 'JupyterRepl(kernel_name="python3")')
def _() -> None:
    JupyterRepl(UnsafeSubprocessSandbox(), kernel_name="python3")


@row(UNCHANGED, 'BubblewrapSandbox(bwrap_path="bwrap")')
def _() -> None:
    BubblewrapSandbox(bwrap_path="bwrap")


@row(UNCHANGED, "limits.narrow(ResourceLimits(env={}))")
def _() -> None:
    assert ResourceLimits(env={"A": "1"}).narrow(ResourceLimits(env={})).env == {}


@row(DIFFERENT, "values: `ToolResult`, `ParsedCall`, parts, `ResourceLimits`")
def _() -> None:
    with pytest.raises(Exception, match=r"."):
        tensordict.lazy_stack([ToolResult(), ToolResult()])  # pyright: ignore[reportArgumentType]


@row(DIFFERENT, "`per_call_timeout`")
def _() -> None:
    assert inspect.signature(ToolCompose).parameters["per_call_timeout"].default == 30


@row(DIFFERENT, "`DispatchResult.any_error`, `stop_requested`")
def _() -> None:
    failed = ToolResult.from_text("no", is_error=True, stop=True)
    result = DispatchResult("", (ParsedCall("f", {}, "c"),), (failed,))
    assert result.any_error
    assert result.stop_requested


@row(DIFFERENT, "a message that cannot be read")
def _() -> None:
    (call,) = get_parser("json").parse({"tools": [{"args": {}}]}).calls
    assert call.error is not None


@row(DIFFERENT, "`validate_args` with an unknown type, or a schema that is no object's")
def _() -> None:
    for schema in ({"type": "object", "properties": {"a": {"type": "thing"}}}, {"type": "string"}):
        with pytest.raises(ValueError, match=r"."):
            validate_args({"a": {}}, schema)


@row(DIFFERENT, "tool text that looks like XML calls")
def _() -> None:
    said = get_parser("xml").render_result("c", ToolResult.from_text('<tool name="x">{}</tool>'))["content"]
    assert "\u200b" in said
    assert "&lt;" not in said


@row(DIFFERENT, "`HttpTool.run` by hand with a refused URL")
async def _() -> None:
    with pytest.raises(ToolError):
        await HttpTool().run({"url": "ftp://example.org/"}, ToolContext(call_id="c"))


@row(DIFFERENT, "`default_sandbox()` on Linux")
def _() -> None:
    assert [kind for kind, _ in TIERS][:3] == [ForkServerSandbox, BubblewrapSandbox, LandlockSandbox]
    assert callable(default_sandbox)


@row(DIFFERENT, "`compose.clone()`")
def _() -> None:
    compose = ToolCompose([Duck()])
    clone = compose.clone()
    assert clone.tools == compose.tools
    assert clone.parser is compose.parser


@row(DIFFERENT, '`network="allowlist"` where a backend has none')
def _() -> None:
    with pytest.raises(ValueError, match="allowlist"):
        BubblewrapSandbox(ResourceLimits(network="allowlist"))


@row(DIFFERENT, "`read_file` and `write_file` with a path that is not granted")
async def _() -> None:
    async with UnsafeSubprocessSandbox() as sandbox:
        for work in (sandbox.read_file("/etc/passwd"), sandbox.write_file("/etc/passwd", b"")):
            with pytest.raises(ToolError, match="granted folders: none") as raised:
                await work
            assert isinstance(raised.value, PermissionError)


def test_each_row_has_a_test_and_each_test_a_row():
    assert {code(cells[0]) for cells in rows("Unchanged")} == set(UNCHANGED)
    assert {cells[0] for cells in rows("Different on purpose")} == set(DIFFERENT)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
@pytest.mark.parametrize("name", [*UNCHANGED, *DIFFERENT])
async def test_a_row_holds(name: str):
    done = {**UNCHANGED, **DIFFERENT}[name]()
    if done is not None:
        await done


@pytest.mark.parametrize("cells", rows("To change"), ids=lambda cells: code(cells[0]))
def test_migration_rows_fail_before_and_work_after_the_change(cells: list[str]):
    before, after = map(code, cells)
    if "HttpTool(" not in before:  # the old form is accepted, and means other ports
        with pytest.raises((ImportError, TypeError)):
            exec(before, dict(NAMES))
    exec(after, dict(NAMES))
