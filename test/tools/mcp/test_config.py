import pytest

from torchrl_agentic.sandbox import BubblewrapSandbox
from torchrl_agentic.tools import MCPServerConfig, MCPToolset


def test_the_three_fixed_arguments_come_in_their_order():
    config = MCPServerConfig("npx", ["-y", "@scope/files", "/data"], {"KEY": "value"})
    assert (config.command, config.args, config.env) == (
        "npx",
        ("-y", "@scope/files", "/data"),
        {"KEY": "value"},
    )
    assert MCPServerConfig("npx").args == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either a command"),
        ({"command": "a", "url": "http://b"}, "either a command"),
        ({"command": "a", "auth_token": "t"}, "auth_token needs a url"),
        ({"command": "a", "headers": {"A": "b"}}, "headers needs a url"),
        ({"command": "a", "transport": "sse"}, "needs a url"),
        ({"url": "http://b", "transport": "stdio"}, "needs a command"),
        ({"url": "http://b", "env": {"A": "b"}}, "env needs a command"),
        ({"url": "http://b", "cwd": "/"}, "cwd needs a command"),
        ({"url": "http://b", "sandbox": BubblewrapSandbox()}, "sandbox needs a command"),
        ({"url": "ftp://b"}, "begins with http"),
        ({"url": "http://b", "transport": "pigeon"}, "expected transport as one of auto, stdio"),
        ({"command": "npx -y server", "args": ["/data"]}, r"command='npx', args=\['-y', 'server', '/data'\]"),
    ],
)
def test_contradictory_options_are_rejected(arguments, said):
    with pytest.raises(ValueError, match=said):
        MCPServerConfig(**arguments)


def test_arguments_in_one_string_are_refused_with_the_list_to_write():
    with pytest.raises(TypeError, match=r"\['-y', 'server'\]; got a string"):
        MCPServerConfig("npx", "-y server")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MCPServerConfig("/usr/bin/npx", ["-y", "@scope/files", "/data"]), "npx files"),
        (MCPServerConfig("serve"), "serve"),
        (MCPServerConfig(url="https://user:pw@host.org:8443/mcp?key=1"), "host.org:8443"),
        (MCPServerConfig("serve", name="mine"), "mine"),
    ],
)
def test_a_server_has_a_name(config, name):
    assert config.name == name


def test_secrets_are_not_in_repr_or_output():
    secret = "s3cr3t-value"
    local = MCPServerConfig("serve", [f"--key={secret}"], {"KEY": secret})
    remote = MCPServerConfig(
        url=f"https://u:{secret}@host/mcp?k={secret}", headers={"X-Key": secret}, auth_token=secret
    )
    for config in (local, remote):
        assert secret not in f"{config} {config.shown} {config.name} {MCPToolset(config)}"
    assert local.shown == "serve --key=***"
    assert remote.without_secrets(f"sent {secret}") == "sent ***"
    bearer = MCPServerConfig(url="https://host/mcp", headers={"Authorization": f"Bearer {secret}"})
    assert bearer.without_secrets(f"token {secret} is no good") == "token *** is no good"


def test_short_values_of_the_environment_do_not_blot_out_messages():
    assert MCPServerConfig("serve", env={"DEBUG": "1"}).without_secrets("exit code 1") == "exit code 1"


@pytest.mark.parametrize(
    ("url", "transport", "kinds"),
    [
        ("http://h/mcp", "auto", ("streamable_http", "sse")),
        ("http://h/v1/sse/", "auto", ("sse", "streamable_http")),
        ("http://h/sse", "streamable_http", ("streamable_http",)),
    ],
)
def test_the_transports_to_be_tried(url, transport, kinds):
    assert MCPServerConfig(url=url, transport=transport).kinds == kinds
