"""Each row of the table in `tutorials/10_from_torchrl_transforms.py` holds, old and new form."""

import json
import re
import time
from pathlib import Path

import pytest
import tensordict
from helpers.legacy_envs import LegacyEnv, call, calls, divide, run
from helpers.limit import limit
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import (
    BrowserTransform,
    ExecuteToolsInOrder,
    JSONCallParser,
    MCPToolTransform,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)
from torchrl.envs.llm.transforms.tools import ToolTransformBase

from torchrl_agentic import as_tool
from torchrl_agentic.messages import Status
from torchrl_agentic.parsers import get_parser

pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
TUTORIAL = Path(__file__).parent.parent / "tutorials" / "10_from_torchrl_transforms.py"
FENCED = "```python\n%s\n```"


@pytest.fixture(scope="module", autouse=True)
def _lists_are_stacks():
    tensordict.set_list_to_stack(True).set()


def rows():
    """The first cells of the table, verbatim."""
    found = re.findall(r"^#    \* - ``(.+)``$", TUTORIAL.read_text(), re.MULTILINE)
    assert len(found) == len(set(found)) > 20
    return found


TESTS = {}


def row(name, *marks):
    def keep(test):
        assert name not in TESTS, f"two tests of the row {name}"
        TESTS[name] = pytest.param(test, id=name, marks=marks)
        return test

    return keep


def old(transform, *said):
    """What TorchRL appends to each row, when these are its messages."""
    env = TransformedEnv(ChatEnv(batch_size=(len(said),)), transform)
    td = env.reset(TensorDict({"query": ["q"] * len(said)}, batch_size=(len(said),)))
    answers = tensordict.lazy_stack([tensordict.lazy_stack([History("assistant", text)]) for text in said])
    td["history"].full = td["history"].prompt.extend(answers, dim=-1, inplace=False)
    prompts = env.step(td)["next", "history"].prompt
    found = [
        [(m.role, m.content) for m in row.unbind(0)[2:] if m.role != "<none>"] for row in prompts.unbind(0)
    ]
    env.close()
    transform.close()
    return found


def new(*tools, said, **options):
    """The messages that a ToolCompose appends to each row."""
    chat = LegacyEnv(len(said), *tools, **options)
    try:
        return chat.step(*said), chat.errors()
    finally:
        chat.compose.close()
        chat.env.close()


def wrapped(transform, name, said, **options):
    return new(as_tool(transform, name=name), said=said, **options)


def test_each_row_of_the_table_has_a_test_and_each_test_a_row():
    assert set(rows()) == set(TESTS)


@row("env.append_transform(A()).append_transform(B())")
def _():
    def make():
        return [SimpleToolTransform(tools={name: lambda name=name: f"from {name}"}) for name in "ab"]

    stacked = old(Compose(*make()), "<tool>a\n{}</tool><tool>b\n{}</tool>")
    assert len(stacked[0]) == 2
    assert not any("from b" in text for _, text in stacked[0])
    tools = [as_tool(transform, name=name) for transform, name in zip(make(), "ab", strict=True)]
    said = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "bab")
    assert new(*tools, said=[said])[0] == [["from b", "from a", "from b"]]


@row("PythonInterpreter()")
def _():
    assert "42" in old(PythonInterpreter(), FENCED % "print(42)")[0][0][1]
    found, errors = wrapped(PythonInterpreter(), "python", [FENCED % "print(42)"], parser="fence")
    assert "42" in found[0][0]
    found, errors = wrapped(PythonInterpreter(), "python", [FENCED % "print(42)\n1 / 0"], parser="fence")
    assert "42" in found[0][0]
    assert "ZeroDivisionError" in found[0][0]
    assert errors == [1]
    assert "forty-two" not in old(PythonInterpreter(), FENCED % "print('forty-' 'two')\n1 / 0")[0][0][1]


@row("PythonInterpreter(persistent=True)")
def _():
    chat = LegacyEnv(1, as_tool(PythonInterpreter(persistent=True), name="python"))
    chat.step(call("python", code="x = 1"))
    assert chat.step(call("python", code="print(x)")) == [["1"]]
    chat.step(call("python", code="raise SystemExit"))
    assert "are lost" in chat.step(call("python", code="print(2)"))[0][0]
    chat.step(call("python", code="import sys; print('careful', file=sys.stderr)"))
    assert chat.errors() == [1]
    chat.compose.close()


@row("PythonInterpreter(timeout=)")
def _():
    tool = as_tool(PythonInterpreter(timeout=0.5), name="python")
    assert run(tool, {"code": "while True: pass"}).status is Status.TIMEOUT
    said = [call("python", code="while True: pass")]
    found, _ = wrapped(PythonInterpreter(timeout=60), "python", said, per_call_timeout=0.5)
    assert "did not finish within 0.5 s" in found[0][0]


def role_is_the_compose_s(make, name, said):
    """`make(tool_name)` gives a transform whose role TorchRL uses; here `tool_role` does."""
    with pytest.warns(UserWarning, match="tool_role='observer'"):
        tool = as_tool(make("observer"), name=name)
    chat = LegacyEnv(1, tool, tool_role="observer")
    chat.step(said)
    from torchrl_agentic.transforms import history as border

    (conversation,) = border.prompts(chat.td)
    assert conversation.messages[-1].read().role == "observer"
    chat.compose.close()


@row("PythonInterpreter(tool_name=)")
def _():
    assert old(PythonInterpreter(tool_name="observer"), FENCED % "print(1)")[0][0][0] == "observer"
    role_is_the_compose_s(
        lambda role: PythonInterpreter(tool_name=role), "python", call("python", code="print(1)")
    )


@row("PythonInterpreter(tokenizer=)")
def _():
    found, _ = wrapped(PythonInterpreter(tokenizer=object()), "python", [call("python", code="print(1)")])
    assert found == [["1"]]


@row(
    "PythonInterpreter(services=, service_name=, namespace=)",
    pytest.mark.legacy,
    pytest.mark.timeout(limit(400)),
)
def _():
    import ray
    from torchrl.envs.llm.transforms.tools import PythonExecutorService
    from torchrl.services import get_services

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="old")
    try:
        services = get_services(backend="ray", namespace="old")
        services.register("executor", PythonExecutorService, pool_size=1, timeout=10.0, num_cpus=1)
        transform = PythonInterpreter(services="ray", service_name="executor", namespace="old")
        chat = LegacyEnv(2, as_tool(transform, name="python"), per_call_timeout=None)
        chat.step(call("python", code="x = 1"), "x")
        assert chat.step("x", call("python", code="print(x)"))[1] == ["1"]
        chat.compose.close()
    finally:
        ray.shutdown()


ASK = '<tool>f\n{"a": 1, "b": 4}</tool>'


@row("SimpleToolTransform(tools=)")
def _():
    assert "0.25" in old(SimpleToolTransform(tools={"f": divide}), ASK)[0][0][1]
    assert wrapped(SimpleToolTransform(tools={"f": divide}), "f", [call("f", a=1, b=4)])[0] == [
        ['{"quotient": 0.25}']
    ]
    assert new(divide, said=[call("divide", a=1, b=4)])[0] == [['{"quotient": 0.25}']]
    failing = SimpleToolTransform(tools={"f": lambda: {"success": False, "error": "no"}})
    assert wrapped(failing, "f", [call("f")]) == ([["no"]], [1])
    assert wrapped(SimpleToolTransform(tools={"f": lambda: (1, 2)}), "f", [call("f")])[0] == [["[1, 2]"]]
    assert wrapped(SimpleToolTransform(tools={"f": divide}), "f", [call("f", a="x", b=1)])[1] == [1]


@row("SimpleToolTransform(tool_schemas=)")
def _():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    transform = SimpleToolTransform(tools={"f": divide}, tool_schemas={"f": schema})
    assert as_tool(transform, name="f").input_schema == schema
    assert as_tool(transform, name="f", input_schema={"type": "object"}).input_schema == {"type": "object"}


@row("SimpleToolTransform(parser=)")
def _():
    said = '<tool name="f">{"a": 1, "b": 4}</tool>'
    assert "0.25" in old(SimpleToolTransform(tools={"f": divide}, parser=XMLBlockParser()), said)[0][0][1]
    assert "0.25" in wrapped(SimpleToolTransform(tools={"f": divide}), "f", [said], parser="xml")[0][0][0]


@row("SimpleToolTransform(tool_call_pattern=)")
def _():
    pattern = r"CALL\[(.*?)\]\((.*?)\)"
    transform = SimpleToolTransform(tools={"f": lambda text: text}, tool_call_pattern=pattern)
    assert "failed" in old(transform, 'CALL[f]({"text": "a)b"})')[0][0][1]
    transform = SimpleToolTransform(tools={"f": lambda text: text}, tool_call_pattern=pattern)
    assert wrapped(transform, "f", [call("f", text="a)b")])[0] == [["a)b"]]


@row("SimpleToolTransform(tool_name=)")
def _():
    role_is_the_compose_s(
        lambda role: SimpleToolTransform(tools={"f": divide}, tool_name=role), "f", call("f", a=1, b=1)
    )


@row("SimpleToolTransform(timeout=)")
def _():
    transform = SimpleToolTransform(tools={"f": lambda: time.sleep(600)}, timeout=0.1)
    found, _ = wrapped(transform, "f", [call("f")], per_call_timeout=0.5)
    assert "did not finish within 0.5 s" in found[0][0]


@row("BrowserTransform()", pytest.mark.legacy)
def _(browser):
    transform, url = browser()
    chat = LegacyEnv(1, as_tool(transform, name="browser"))
    assert '"status": 200' in chat.step(call("browser", action="navigate", url=url))[0][0]
    assert "Unknown action" in chat.step(call("browser", action="screenshot"))[0][0]
    chat.compose.close()


@row("BrowserTransform(allowed_domains=)")
def _():
    transform = BrowserTransform(allowed_domains=["example.org"])
    assert transform._validate_url("https://notexample.org/")  # TorchRL's own check
    found, errors = wrapped(
        transform, "browser", [call("browser", action="navigate", url="https://notexample.org/")]
    )
    assert "Domain not allowed" in found[0][0]
    assert errors == [1]


@row("BrowserTransform(headless=)", pytest.mark.legacy)
def _(browser):
    transform, url = browser(headless=True)
    found, errors = wrapped(transform, "browser", [call("browser", action="navigate", url=url)])
    assert errors == [0]
    assert "200" in found[0][0]


@row("BrowserTransform(timeout=)", pytest.mark.legacy)
def _(browser):
    transform, url = browser(timeout=3)
    chat = LegacyEnv(1, as_tool(transform, name="browser"))
    chat.step(call("browser", action="navigate", url=url))
    assert "Timeout 3000ms" in chat.step(call("browser", action="click", selector="#absent"))[0][0]
    chat.compose.close()


@row("BrowserTransform(tokenizer=, tool_name=)")
def _():
    role_is_the_compose_s(
        lambda role: BrowserTransform(tokenizer=object(), tool_name=role),
        "browser",
        call("browser", action="navigate", url="file:///"),
    )


@row("MCPToolTransform(servers=)", pytest.mark.legacy)
def _(mcp_server):
    said = [call("lenient.add", a=1, b=2)]
    assert wrapped(mcp_server("lenient"), "lenient.add", said) == ([["3"]], [0])
    assert wrapped(mcp_server("lenient"), "lenient.fail", [call("lenient.fail")])[1] == [1]
    found, _ = wrapped(mcp_server("strict"), "strict.add", [call("strict.add", a=1, b=2)])
    assert "use MCPToolset" in found[0][0]


@row("MCPToolTransform(tool_call_pattern=, tool_name=)")
def _():
    role_is_the_compose_s(
        lambda role: MCPToolTransform({}, tool_call_pattern="unused", tool_name=role), "s.f", call("s.f")
    )


@row("MCPToolTransform(timeout=)", pytest.mark.legacy)
def _(mcp_server):
    assert run(as_tool(mcp_server("lenient", timeout=0.5), name="lenient.hang"), {}).status is Status.TIMEOUT


class Sum:
    """Adds."""

    name = "sum"
    schema_in, schema_out = {"a": int, "b": int}, {"sum": int}

    def __call__(self, a, b=0, _state=None):
        if b < 0:
            raise ValueError("b is negative")
        return {"sum": a + b} if b else [a]


def in_order(service=None, parser=None, **options):
    return ExecuteToolsInOrder(ToolRegistry([service or Sum()]), parser or XMLBlockParser(), **options)


@row("ExecuteToolsInOrder(registry=)")
def _():
    said = [calls("sum", {"a": 1}, {"a": 1, "b": -1}, {"a": 1, "b": 1})]
    found, errors = wrapped(in_order(), "sum", said)
    assert found == [["[1]", "Error: sum failed: b is negative", '{"sum": 2}']]
    assert errors == [1]
    assert "failed" in old(in_order(), '<tool name="sum">{"a": 1}</tool>')[0][0][1]  # a list


@row("ExecuteToolsInOrder(parser=XMLBlockParser())")
def _():
    said = '<tool name="sum" tag="A">{"a": 1, "b": 1}</tool>'
    assert "[tag: A]" in old(in_order(), said)[0][0][1]
    found, _ = wrapped(in_order(), "sum", [said], parser="xml")
    assert found == [['<tool_result call_id="A">{"sum": 2}</tool_result>']]
    other = said.replace('name="sum" tag="A"', 'tag="A" name="sum"')
    assert wrapped(in_order(), "sum", [other], parser="xml")[0] == found
    assert XMLBlockParser()(other)["calls"] == []
    broken = '<tool name="sum">{oops</tool>'
    assert XMLBlockParser()(broken)["calls"][0].args == {"raw": "{oops"}
    assert wrapped(in_order(), "sum", [broken], parser="xml")[1] == [1]


@row("ExecuteToolsInOrder(parser=JSONCallParser())")
def _():
    item = {"tool": "sum", "args": {"a": 1, "b": 1}, "tag": "A"}
    said = json.dumps({"message": "", "tools": [item]})
    assert "succeeded" in old(in_order(parser=JSONCallParser()), said)[0][0][1]
    (found,), _ = wrapped(in_order(), "sum", [said + "<|im_end|>"], parser="json")
    assert json.loads(found[0]) == {"id": "A", "is_error": False, "output": '{"sum": 2}'}
    assert JSONCallParser()(said + "<|im_end|>")["calls"] == []
    with_id = json.dumps({"message": "", "tools": [{**item, "id": "c1"}]})
    with pytest.raises(TypeError):
        JSONCallParser()(with_id)
    assert get_parser("json").parse(with_id).calls[0].call_id == "c1"
    with pytest.raises(AttributeError):
        JSONCallParser()("42")
    assert get_parser("json").parse("42").text == "42"


@row("ExecuteToolsInOrder(stop_on_error=True)")
def _():
    (found,), _ = wrapped(
        in_order(stop_on_error=True), "sum", [calls("sum", {"a": 1, "b": -1}, {"a": 1, "b": 1})]
    )
    assert found[1].startswith("not run")


@row("ExecuteToolsInOrder(pass_state_to_tools=)")
def _():
    class Stateful(Sum):
        seen = []  # noqa: RUF012

        def __call__(self, a, _state=None, **kwargs):
            self.seen.append(_state if _state is None else dict(_state.items()))
            return {"sum": a}

    old(in_order(Stateful()), '<tool name="sum">{"a": 1}</tool>')
    wrapped(in_order(Stateful()), "sum", [call("sum", a=1)])
    wrapped(in_order(Stateful(), pass_state_to_tools=False), "sum", [call("sum", a=1)])
    new(
        as_tool(in_order(Stateful()), name="sum", wants_state=True),
        said=[call("sum", a=1)],
        pass_state_to_tools=True,
    )
    assert Stateful.seen[:3] == [{}, {}, None]
    assert "query" in Stateful.seen[3]
    assert "history" not in Stateful.seen[3]

    class Plain(Sum):
        def __call__(self, a):
            return {"sum": a}

    assert wrapped(in_order(Plain()), "sum", [call("sum", a=1)])[1] == [0]


@row("ToolService.schema_in")
def _():
    tool = as_tool(in_order(), name="sum")
    assert tool.input_schema["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}}
    assert wrapped(in_order(), "sum", [call("sum", a="x")])[1] == [1]


@row("ToolService.schema_out")
def _():
    assert as_tool(in_order(), name="sum").output_schema is None


class Mine(ToolTransformBase):
    def _process_batch_item(self, content, index):
        return [f"{index}: {content}"] if "mine" in content else None

    def _format_result(self, result):
        return f"<{result}>"


@row("class Mine(ToolTransformBase)")
def _():
    assert old(Mine(), "call mine") == [[("tool", "<0: call mine>")]]
    assert wrapped(Mine(), "mine", [call("mine", a=1)])[0] == [['<0: <tool name="mine">{"a": 1}</tool>>']]
    tool = as_tool(Mine(), name="mine", render_call=lambda name, args: f"call {name}")
    assert new(tool, said=[call("mine")])[0] == [["<0: call mine>"]]


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """A factory of transforms, with the address of a page that they may visit."""
    from helpers.browser_site import Site
    from helpers.chromium import browsers_folder

    from torchrl_agentic.testing.servers.embedded import serving

    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(browsers_folder(tmp_path / "browsers")))
    with serving(Site()) as url:
        yield lambda **options: (BrowserTransform(**options), url + "/")


@pytest.fixture
def mcp_server():
    """A factory of transforms connected to a server of `mcp_servers`."""
    import sys

    from helpers import mcp_servers

    def make(kind, **options):
        config = {"command": sys.executable, "args": [mcp_servers.__file__, kind]}
        return MCPToolTransform({kind: config}, **options)

    return make


@pytest.mark.parametrize("test", TESTS.values())
def test_a_row_holds(test, request):
    """A row's test names the fixtures that it needs."""
    import inspect

    test(*(request.getfixturevalue(name) for name in inspect.signature(test).parameters))
