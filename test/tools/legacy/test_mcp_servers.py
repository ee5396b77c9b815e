"""`as_tool(MCPToolTransform())` with real servers: deselected by default, see `make test-legacy`."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from helpers.legacy_envs import call, calls, gone, run
from helpers.processes import children
from torchrl.envs.llm.transforms import MCPToolTransform

from torchrl_agentic import as_tool
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ImagePart, Status

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def _sdk():
    if importlib.util.find_spec("mcp") is None:
        pytest.fail("no mcp: this needs the MCP SDK, 1.x or 2.x: pip install mcp, or `make test-legacy`")


@pytest.fixture
def servers():
    """A factory of transforms, closed behind the test."""
    made = []

    def make(*kinds, **options):
        script = str(Path(__file__).parents[2] / "helpers" / "mcp_servers.py")
        where = {kind: {"command": sys.executable, "args": [script, kind]} for kind in kinds}
        made.append(MCPToolTransform(where, **options))
        return made[-1]

    yield make
    for transform in made:
        transform.close()


def test_a_server_answers_in_text(chat, servers):
    """TorchRL shows the model the repr of the SDK's objects."""
    chat = chat(2, as_tool(servers("lenient"), name="lenient.add"))
    chat.step(*[call("lenient.add", a=1, b=n) for n in range(2)])
    assert chat.step(call("lenient.add", a=1, b=2), call("lenient.add", a=2, b=2)) == [["3"], ["4"]]


def test_an_error_of_the_server_is_an_error(chat, servers):
    """TorchRL drops the server's word that it is one."""
    chat = chat(1, as_tool(servers("lenient"), name="lenient.fail"))
    assert chat.step(call("lenient.fail")) == [["no such thing"]]
    assert chat.errors() == [1]


def test_an_image_stays_one(servers):
    assert run(as_tool(servers("lenient"), name="lenient.draw"), {}).parts == (ImagePart(b"hi", "image/png"),)


def test_model_sees_the_descriptions_of_the_server(servers):
    tool = as_tool(servers("lenient"), name="lenient.add")
    assert tool.description == "Add two numbers."
    assert tool.input_schema["required"] == ["a", "b"]


def test_its_own_timeout_is_a_timeout(servers):
    assert run(as_tool(servers("lenient", timeout=0.3), name="lenient.hang"), {}).status is Status.TIMEOUT


def test_hanging_call_is_abandoned_and_does_not_delay_others(chat, servers):
    transform = servers("lenient", timeout=600)
    tools = [as_tool(transform, name=f"lenient.{name}") for name in ("hang", "add")]
    chat = chat(2, *tools, per_call_timeout=2)
    found = chat.step(call("lenient.hang"), call("lenient.add", a=1, b=1))
    assert "did not finish" in found[0][0]
    assert found[1] == ["2"]
    assert chat.step(call("lenient.add", a=2, b=1), "x")[0] == ["3"]


def test_closing_ends_the_servers_and_a_later_step_starts_them_again(chat, servers):
    """TorchRL leaves them running."""
    before = set(children(os.getpid()))
    chat = chat(1, as_tool(servers("lenient"), name="lenient.add"))
    (pid,) = set(children(os.getpid())) - before
    chat.compose.close()
    assert gone(pid)
    assert chat.step(call("lenient.add", a=1, b=1)) == [["2"]]


def test_server_of_the_python_sdk_is_rejected_with_the_alternative(servers):
    """It insists on "initialize", which TorchRL 0.14 never sends, with SDK 1.x and with 2.x."""
    tool = as_tool(servers("strict"), name="strict.add")
    with pytest.raises(InfrastructureError, match=r"initialize.*use MCPToolset"):
        run(tool, {"a": 1, "b": 2})


def test_two_calls_of_one_message_come_back_in_order(chat, servers):
    chat = chat(1, as_tool(servers("lenient"), name="lenient.add"))
    assert chat.step(calls("lenient.add", *[{"a": n, "b": 0} for n in range(3)])) == [["0", "1", "2"]]
