import json

import pytest

from torchrl_agentic.sandbox import BubblewrapSandbox
from torchrl_agentic.tools import MCPToolset, mcp_servers


@pytest.fixture
def file(tmp_path):
    def write(data):
        path = tmp_path / "mcp.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


def test_every_server_of_the_file_becomes_a_toolset_of_its_own(file):
    path = file({
        "mcpServers": {
            "files": {"command": "npx", "args": ["-y", "files"], "env": {"A": "b"}, "autoApprove": ["x"]},
            "wiki": {"url": "https://wiki.org/mcp", "auth_token": "t0ken-t0ken", "type": "http"},
            "old": {"url": "https://old.org/x", "type": "sse", "headers": {"K": "v"}},
            "off": {"command": "off", "disabled": True},
        }
    })  # fmt: skip
    found = mcp_servers(path)
    assert list(found) == ["files", "wiki", "old"]
    assert all(isinstance(toolset, MCPToolset) for toolset in found.values())
    files, wiki, old = (toolset.config for toolset in found.values())
    assert (files.name, files.command, files.args, files.env) == ("files", "npx", ("-y", "files"), {"A": "b"})
    assert (wiki.url, wiki.auth_token, wiki.kinds) == (
        "https://wiki.org/mcp", "t0ken-t0ken", ("streamable_http",)
    )  # fmt: skip
    assert (old.kinds, old.headers) == (("sse",), {"K": "v"})


def test_the_form_of_editors_is_read_too_and_from_a_mapping():
    found = mcp_servers({"servers": {"a": {"type": "stdio", "command": "a"}}, "inputs": []})
    assert found["a"].config.kinds == ("stdio",)


def test_options_go_to_each_toolset_and_prefixes_are_made_of_names():
    data = {"mcpServers": {"a": {"command": "a"}, "b": {"command": "b"}}}
    found = mcp_servers(data, prefix=True, request_timeout=3.0)
    assert [toolset.name_prefix for toolset in found.values()] == ["a_", "b_"]
    assert {toolset.request_timeout for toolset in found.values()} == {3.0}
    assert list(mcp_servers(data, only=["b"])) == ["b"]


def test_the_tools_that_are_listed_are_those_that_are_offered():
    data = {
        "servers": {
            "a": {"command": "a", "tools": ["read"]},
            "b": {"command": "b", "tools": ["*"]},
            "c": {"command": "c"},
        }
    }
    assert [toolset.selected for toolset in mcp_servers(data).values()] == [("read",), None, None]
    assert mcp_servers(data, tools=["write"])["a"].selected == ("write",)


def test_stdio_server_can_be_started_in_a_sandbox():
    sandbox = BubblewrapSandbox()
    data = {"mcpServers": {"here": {"command": "a"}, "there": {"url": "http://b"}}}
    found = mcp_servers(data, sandbox=sandbox)
    assert found["here"].config.sandbox is sandbox
    assert found["there"].config.sandbox is None


def test_variables_are_put_in_and_not_shown():
    environ = {"HOST": "h.org", "TOKEN": "very-secret-1", "KEY": "very-secret-2"}
    data = {
        "mcpServers": {
            "a": {"url": "https://${HOST}/mcp", "headers": {"Authorization": "Bearer ${env:TOKEN}"}},
            "b": {"command": "serve", "args": ["--key=${KEY}", "--level=${LEVEL:-info}", "$HOME"]},
        }
    }
    found = mcp_servers(data, environ=environ)
    assert found["a"].config.url == "https://h.org/mcp"
    assert found["a"].config.headers == {"Authorization": "Bearer very-secret-1"}
    assert found["b"].config.args == ("--key=very-secret-2", "--level=info", "$HOME")
    assert "very-secret" not in f"{found} {found['b'].config.shown}"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"command": "a", "env": {"T": "${MISSING}"}},
            r"mcpServers\.x\.env\.T: the environment variable MISSING",
        ),
        ({"command": "a", "args": ["${input:key}"]}, r"mcpServers\.x\.args\[0\]: unknown \$\{input:key\}"),
        ({"comand": "a"}, r"mcpServers\.x: unknown key 'comand'; did you mean 'command'\?"),
        ({"command": "a", "zzz": 1}, r"mcpServers\.x: unknown key 'zzz'; known: command, args"),
        ({"command": 3}, r"mcpServers\.x\.command: expected a string; got 3"),
        ({"command": "a", "tools": "b"}, r"mcpServers\.x\.tools: expected a list of names; got"),
        ({"command": "a", "args": "b"}, r"mcpServers\.x\.args: expected a list"),
        ({"command": "a", "args": [1]}, r"mcpServers\.x\.args\[0\]: expected a string; got 1"),
        ({"command": "a", "env": ["b"]}, r"mcpServers\.x\.env: expected an object"),
        ({"url": "http://a", "type": "pigeon"}, r"mcpServers\.x\.type: expected one of .*; got 'pigeon'"),
        ({"url": "http://a", "serverUrl": "http://b"}, r"mcpServers\.x: url and serverUrl mean the same"),
        ({"command": "a", "url": "http://a"}, r"mcpServers\.x: expected either a command"),
        ({}, r"mcpServers\.x: expected either a command"),
        ([], r"mcpServers\.x: expected an object"),
    ],
)
def test_configuration_error_has_file_and_position(file, entry, said):
    with pytest.raises(ValueError, match=rf"mcp\.json: {said}"):
        mcp_servers(file({"mcpServers": {"x": entry}}), environ={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"mcpServers": {"a": {}},,}', "line 1, column 26"),
        ('{"mcpServers": {"a": {"command": "a"}, "a": {"command": "b"}}}', "the key 'a' twice"),
        ('{"tools": {}}', "expected .*mcpServers.* got 'tools'"),
        ("[]", "expected an object"),
    ],
)
def test_a_file_of_another_form_is_refused(file, text, said):
    with pytest.raises(ValueError, match=rf"mcp\.json: .*{said}"):
        mcp_servers(file(text))


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        mcp_servers(tmp_path / "nowhere.json")


def test_a_server_that_is_not_listed_is_refused():
    with pytest.raises(ValueError, match="no server 'b'; servers: a"):
        mcp_servers({"mcpServers": {"a": {"command": "a"}}}, only=["b"])
