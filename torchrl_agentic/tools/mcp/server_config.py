"""Configuration of one MCP server: its command or its URL."""

from __future__ import annotations

import os
import shlex
import shutil
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from torchrl_agentic.sandbox import Sandbox

Transport: TypeAlias = Literal["auto", "stdio", "sse", "streamable_http"]
MAX_RESULT_BYTES = 16 << 20
"""Default size limit of a response, in bytes of JSON."""
MIN_SECRET = 6
"""Shortest value that is hidden in messages, in characters; hiding each "1" would make them unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfigFields:
    """Stored fields of `MCPServerConfig`; see `messages._ToolResultFields` for the reason."""

    command: str | None
    args: tuple[str, ...]
    env: Mapping[str, str] | None = field(repr=False)
    url: str | None
    transport: Transport
    headers: Mapping[str, str] | None = field(repr=False)
    auth_token: str | None = field(repr=False)
    cwd: str | None
    sandbox: Sandbox | None
    name: str
    trust_env: bool
    secrets: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, init=False, repr=False)
class MCPServerConfig(_ConfigFields):
    """One MCP server: a command that communicates over stdin and stdout, or the URL of a running server.

    Messages and reprs do not show values of `env`, `headers`, `auth_token` and `secrets`.

    Args:
        command: The program, not a shell command line.
        args: Its arguments.
        env: Environment variables of the program besides PATH, HOME and the like; no other variables of this
            process are passed on. In a sandbox: besides the variables of the sandbox.
        url: URL of a running server.
        transport: For a URL, "auto" tries streamable HTTP and then SSE, or SSE first if the path ends
            in /sse.
        headers: HTTP headers of each request.
        auth_token: Token that is sent with each request as "Authorization: Bearer …".
        cwd: Folder to start the command in; in a sandbox, a path inside.
        sandbox: Template of a sandbox; each connection starts the command in a fresh sandbox of its kind.
        name: Name of the server in messages and effects; by default its host, or its program.
        trust_env: Whether a URL is reached through the proxies that environment variables name.
        secrets: Other values to hide in messages.

    Raises:
        ValueError: If there is neither a command nor a URL, or both, or an argument does not fit.
        TypeError: If `args` is a string.
    """

    __slots__ = ()

    def __init__(
        self,
        command: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        url: str | None = None,
        transport: Transport = "auto",
        headers: Mapping[str, str] | None = None,
        auth_token: str | None = None,
        cwd: str | None = None,
        sandbox: Sandbox | None = None,
        name: str = "",
        trust_env: bool = False,
        secrets: tuple[str, ...] = (),
    ) -> None:
        if isinstance(args, str):
            raise TypeError(f"expected args as a list of strings, e.g. {shlex.split(args)}; got a string")
        if bool(command) == bool(url):
            raise ValueError(
                "expected either a command, MCPServerConfig('npx', ['-y', 'some-server']), or a URL, "
                "MCPServerConfig(url='https://…')"
            )
        if transport not in get_args(Transport):
            raise ValueError(
                f"expected transport as one of {', '.join(get_args(Transport))}; got {transport!r}"
            )
        super().__init__(
            command=command,
            args=tuple(args),
            env=env,
            url=url,
            transport=transport,
            headers=headers,
            auth_token=auth_token,
            cwd=cwd,
            sandbox=sandbox,
            name=name or _hide(_name(command, args, url), _secrets(env, headers, auth_token, secrets)),
            trust_env=trust_env,
            secrets=secrets,
        )
        _check_command(self) if command else _check_url(self)

    @property
    def kinds(self) -> tuple[Transport, ...]:
        """The transports to try, in order."""
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
        """Return a text with "***" in place of each secret of this server."""
        return _hide(text, _secrets(self.env, self.headers, self.auth_token, self.secrets))

    def __repr__(self) -> str:
        return f"MCPServerConfig({self.name!r}: {self.shown})"


def too_large(size: int | None, most: int) -> str:
    """Return the message for the model that a response was too large.

    Args:
        size: Its size in bytes; None if it was not counted to the end.
        most: Most bytes allowed.
    """
    found = "" if size is None else f"{size:,} bytes, "
    return f"the response has {found}more than the allowed {most:,} bytes; request a smaller part"


MAX_VALUES = 50_000
"""Most values in the JSON of a message: to read one takes up to 10 µs, in which nothing else runs."""
TOO_MANY = f"the response has more than the allowed {MAX_VALUES:,} values; request a smaller part"


def has_too_many_values(data: bytes | bytearray) -> bool:
    """Return whether the JSON of a message has more than `MAX_VALUES` values."""
    return count_json_values(data, MAX_VALUES) > MAX_VALUES


def count_json_values(data: bytes | bytearray, enough: int) -> int:
    """Return about how many values JSON has, from its commas and brackets, without reading it.

    Args:
        data: The JSON.
        enough: If there are more values or strings, the result is any larger number.
    """
    count = sum(map(data.count, b",[{"))
    if count <= enough:
        return count
    parts = split_at_quotes(data, 2 * enough + 2)
    if len(parts) > 2 * enough + 2:
        return enough + 1
    outside = b"".join(parts[::2])  # of strings
    return sum(map(outside.count, b",[{"))


def split_at_quotes(data: bytes | bytearray, most: int = -1) -> list[bytes] | list[bytearray]:
    """Return what JSON has outside and inside of its strings, in turn, without escaped quotes.

    Args:
        data: The JSON.
        most: Maximum number of quotes at which it is split; -1 for no limit.
    """
    return data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', most)


def _check_command(config: MCPServerConfig) -> None:
    for what in ("headers", "auth_token"):
        if getattr(config, what):
            raise ValueError(f"{what} needs a url; pass such values to a command with args or env")
    if config.transport not in ("auto", "stdio"):
        raise ValueError(f"a command uses stdio; transport={config.transport!r} needs a url")
    command = config.command or ""
    if " " in command.strip() and not os.path.exists(command) and shutil.which(command) is None:
        first, *rest = shlex.split(command)
        raise ValueError(
            f"expected one program as command; write command={first!r}, args={[*rest, *config.args]}"
        )


def _check_url(config: MCPServerConfig) -> None:
    for what in ("args", "env", "cwd", "sandbox"):
        if getattr(config, what):
            raise ValueError(f"{what} needs a command; the server at a url runs already")
    if config.transport == "stdio":
        raise ValueError("a url uses HTTP; transport='stdio' needs a command")
    parts = urllib.parse.urlsplit(config.url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected a url that begins with http:// or https://; got {_bare(config.url)!r}")


def _bare(url: str | None) -> str:
    """Return a URL without user, password, query and fragment, which may be secret."""
    parts = urllib.parse.urlsplit(url or "")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _name(command: str | None, args: Sequence[str], url: str | None) -> str:
    """Return the host of a server, or its program and the first argument that is not an option."""
    if command is None:
        return urllib.parse.urlsplit(url or "").netloc.rpartition("@")[2]
    words = [command, *[arg for arg in args if not arg.startswith("-")][:1]]
    return " ".join(os.path.basename(word.rstrip("/")) or word for word in words)


def _secrets(
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
    auth_token: str | None,
    others: Iterable[str],
) -> set[str]:
    values = [*(env or {}).values(), *(headers or {}).values(), *others, auth_token or ""]
    return {*values, *(value.split()[-1] for value in values if value.strip())}  # of "Bearer …" the token too


def _hide(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted((value for value in secrets if len(value) >= MIN_SECRET), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
