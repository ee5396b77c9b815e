"""Where an MCP server is, or how it is started."""

from __future__ import annotations

import os
import shlex
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, TypeAlias, get_args

from torchrl_agentic.sandbox import Sandbox

Transport: TypeAlias = Literal["auto", "stdio", "sse", "streamable_http"]
MAX_RESULT_BYTES = 16 << 20
"""The most bytes of an answer, as JSON, unless a toolset is given another number."""
LEAST_SECRET = 6
"""Shorter values are left in messages: hiding each "1" would make them unreadable."""


@dataclass(frozen=True, slots=True)
class MCPServerConfig:
    """One MCP server: a command that speaks over its stdin and stdout, or the URL of one that runs.

    Values of `env`, `headers`, `auth_token` and `secrets` appear in no message and no repr.

    Args:
        command, args: the program and its arguments, not a line for a shell.
        env: what it finds in its environment besides PATH, HOME and the like; nothing else of ours is passed
            on. In a sandbox: besides what the sandbox has.
        url: of a server that runs already.
        transport: for a URL, "auto" tries streamable HTTP and then SSE; the other way round where its path
            ends in /sse.
        headers, auth_token: sent with each request; the token as "Authorization: Bearer …".
        cwd: the folder to start the command in; in a sandbox, a path inside.
        sandbox: a template; each connection starts the command in a fresh one of its kind.
        name: of the server, in messages and effects; found out if not given.
        trust_env: whether proxies of the environment are used for a URL.
        secrets: what else must not be shown.

    Raises:
        ValueError: neither a command nor a URL, both, or what goes with the other one only.
        TypeError: args is one string.
    """

    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = field(default=None, repr=False)
    _: KW_ONLY
    url: str | None = None
    transport: Transport = "auto"
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    auth_token: str | None = field(default=None, repr=False)
    cwd: str | None = None
    sandbox: Sandbox | None = None
    name: str = ""
    trust_env: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if isinstance(self.args, str):
            raise TypeError(f"args is a list of strings, e.g. {shlex.split(self.args)}; got a string")
        if bool(self.command) == bool(self.url):
            raise ValueError(
                "an MCP server has either a command, MCPServerConfig('npx', ['-y', 'some-server']), or a "
                "URL, MCPServerConfig(url='https://…')"
            )
        if self.transport not in get_args(Transport):
            raise ValueError(f"transport is one of {', '.join(get_args(Transport))}; got {self.transport!r}")
        _check_command(self) if self.command else _check_url(self)
        object.__setattr__(self, "args", tuple(self.args))
        if not self.name:
            object.__setattr__(self, "name", _name(self))

    @property
    def kinds(self) -> tuple[Transport, ...]:
        """The transports to be tried, in their order."""
        if self.command:
            return ("stdio",)
        if self.transport != "auto":
            return (self.transport,)
        path = urllib.parse.urlsplit(self.url or "").path
        return ("sse", "streamable_http") if path.rstrip("/").endswith("/sse") else ("streamable_http", "sse")

    @property
    def shown(self) -> str:
        """The command or the URL, for messages."""
        return self.without_secrets(
            shlex.join([self.command, *self.args]) if self.command else _bare(self.url)
        )

    def without_secrets(self, text: str) -> str:
        """Give a text with the secrets in it blotted out."""
        values = [*(self.env or {}).values(), *(self.headers or {}).values(), *self.secrets]
        values.append(self.auth_token or "")
        known = {*values, *(value.split()[-1] for value in values if value.strip())}  # "Bearer …"
        for secret in sorted((value for value in known if len(value) >= LEAST_SECRET), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"MCPServerConfig({self.name!r}: {self.shown})"


def too_large(size: int | None, most: int) -> str:
    """Tell the model that an answer was left out. size: its bytes, if they were counted."""
    found = (
        f"more than {most:,} bytes"
        if size is None
        else f"{size:,} bytes, more than the {most:,} that are taken"
    )
    return f"the answer has {found}: ask for less of it"


def _check_command(config: MCPServerConfig) -> None:
    for what in ("headers", "auth_token"):
        if getattr(config, what):
            raise ValueError(f"{what} goes with a url; a command gets what it needs by args or env")
    if config.transport not in ("auto", "stdio"):
        raise ValueError(f"a command is spoken to over stdio; transport={config.transport!r} goes with a url")
    command = config.command or ""
    if " " in command.strip() and not os.path.exists(command) and shutil.which(command) is None:
        first, *rest = shlex.split(command)
        raise ValueError(f"command is one program; write command={first!r}, args={[*rest, *config.args]}")


def _check_url(config: MCPServerConfig) -> None:
    for what in ("args", "env", "cwd", "sandbox"):
        if getattr(config, what):
            raise ValueError(f"{what} goes with a command; the server at a url runs already")
    if config.transport == "stdio":
        raise ValueError("a url is spoken to over HTTP; transport='stdio' goes with a command")
    parts = urllib.parse.urlsplit(config.url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"the url of an MCP server begins with http:// or https://; got {_bare(config.url)!r}"
        )


def _bare(url: str | None) -> str:
    """Give a URL without what may be secret in it."""
    parts = urllib.parse.urlsplit(url or "")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _name(config: MCPServerConfig) -> str:
    """Name a server after its host, or its program and the first argument that is no option."""
    if config.command is None:
        return urllib.parse.urlsplit(config.url or "").netloc.rpartition("@")[2]
    words = [config.command, *[arg for arg in config.args if not arg.startswith("-")][:1]]
    return config.without_secrets(" ".join(os.path.basename(word.rstrip("/")) or word for word in words))
