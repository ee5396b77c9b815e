"""`mcp_servers`: reads the files in which desktop clients and editors list MCP servers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torchrl_agentic.messages import JSON, Fields
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.text import TooDeepError, did_you_mean, read_json
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, Transport
from torchrl_agentic.tools.mcp.toolset import MCPToolset

_TRANSPORTS: dict[str, Transport] = {
    "auto": "auto", "stdio": "stdio", "sse": "sse", "http": "streamable_http",
    "streamable_http": "streamable_http", "streamable-http": "streamable_http",
    "streamableHttp": "streamable_http",
}  # fmt: skip
_KEYS = (
    "command", "args", "env", "cwd", "url", "httpUrl", "serverUrl", "type", "transport", "headers",
    "auth_token", "disabled", "enabled", "tools",
)  # fmt: skip
_OTHERS = frozenset({
    "autoApprove", "alwaysAllow", "description", "timeout", "trust", "name", "icon", "gallery", "version",
    "dev", "initTimeout", "note", "$schema",
})  # fmt: skip
"""Ignored keys: settings of the clients for approval and display. `timeout` is ignored because clients use
different units; ours is `request_timeout`."""
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{([^}]*)\}")


def mcp_servers(
    source: str | os.PathLike[str] | Mapping[str, JSON],
    *,
    prefix: bool = False,
    only: Sequence[str] | None = None,
    sandbox: Sandbox | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, MCPToolset]:
    """Return a toolset for each MCP server in a file, by name, except disabled ones.

    The file has `{"mcpServers": {name: {"command", "args", "env", "cwd"} or {"url", "type", "headers",
    "auth_token"}}}` or `{"servers": …}`. `${VAR}`, `${env:VAR}` and `${VAR:-default}` in values are replaced
    by environment variables::

        for toolset in mcp_servers("mcp.json").values():
            compose.add_toolset(toolset)

    Args:
        source: A JSON file, or its content.
        prefix: Whether tools of each server get the prefix "<server>_".
        only: Names of the servers to read; None: all.
        sandbox: Template of the sandboxes in which servers with a command run; None: no sandbox.
        environ: The environment variables; None: those of this process.
        options: Further arguments of each `MCPToolset`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If an entry is invalid, or a variable is not set; the message has the file and the place.
        MissingExtra: If the MCP SDK is not installed.
    """
    where, data = ("the mapping", source) if isinstance(source, Mapping) else _read(Path(source))
    listed = _servers(where, data)
    if unknown := [name for name in only or () if name not in listed]:
        raise ValueError(f"{where}: no server {unknown[0]!r}; servers: {', '.join(listed) or 'none'}")
    place = next(key for key in ("mcpServers", "servers") if key in cast("Fields", data))
    variables = os.environ if environ is None else environ
    toolsets: dict[str, MCPToolset] = {}
    for name, entry in listed.items():
        if only is not None and name not in only:
            continue
        config = _config(name, entry, f"{where}: {place}.{name}", variables)
        if config is not None:
            if sandbox is not None and config.command:
                config = replace(config, sandbox=sandbox)
            mine: dict[str, Any] = {"name_prefix": f"{name}_"} if prefix else {}
            if (wanted := _wanted(entry, f"{where}: {place}.{name}")) is not None:
                mine["tools"] = wanted
            mine.update(options)
            toolsets[name] = MCPToolset(config, **mine)
    return toolsets


def _read(path: Path) -> tuple[str, JSON]:
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"the file of MCP servers {str(path)!r} does not exist") from None
    try:
        return str(path), read_json(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (_TwinError, TooDeepError) as error:
        raise ValueError(f"{path}: {error}") from None


class _TwinError(ValueError):
    """An object has one key twice, of which JSON readers silently drop the first."""


def _without_twins(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise _TwinError(f"an object has the key {twin!r} twice")
    return found


def _servers(where: str, data: JSON) -> dict[str, Any]:
    fields = _object(data, where)
    found = [key for key in ("mcpServers", "servers") if key in fields]
    if len(found) != 1:
        raise ValueError(
            f'{where}: expected {{"mcpServers": {{name: {{"command": …}} or {{"url": …}}}}}}, with "servers" '
            f'in place of "mcpServers" if you like; got {", ".join(map(repr, fields)) or "nothing"}'
        )
    return dict(_object(fields[found[0]], f"{where}: {found[0]}"))


def _config(name: str, entry: JSON, at: str, environ: Mapping[str, str]) -> MCPServerConfig | None:
    fields = _object(entry, at)
    for key in fields:
        if key not in _KEYS and key not in _OTHERS:
            hint = did_you_mean(key, _KEYS) or f"; known: {', '.join(_KEYS)}"
            raise ValueError(f"{at}: unknown key {key!r}{hint}")
    if fields.get("disabled") is True or fields.get("enabled") is False:
        return None
    secrets: list[str] = []

    def text(key: str, value: JSON) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{at}.{key}: expected a string; got {json.dumps(value)}")
        return _expanded(value, f"{at}.{key}", environ, secrets)

    def texts(key: str) -> dict[str, str] | None:
        value = fields.get(key)
        if value is None:
            return None
        return {what: text(f"{key}.{what}", item) for what, item in _object(value, f"{at}.{key}").items()}

    def one(*keys: str) -> str | None:
        given = [key for key in keys if fields.get(key) is not None]
        if len(given) > 1:
            raise ValueError(f"{at}: {' and '.join(given)} mean the same; use one of them")
        return text(given[0], fields[given[0]]) if given else None

    transport = one("type", "transport")
    if transport is not None and transport not in _TRANSPORTS:
        raise ValueError(f"{at}.type: expected one of {', '.join(_TRANSPORTS)}; got {transport!r}")
    args = fields.get("args", [])
    if not isinstance(args, list):
        raise ValueError(f"{at}.args: expected a list of strings; got {json.dumps(args)}")
    try:
        return MCPServerConfig(
            one("command"),
            [text(f"args[{index}]", arg) for index, arg in enumerate(cast("list[JSON]", args))],
            texts("env"),
            url=one("url", "httpUrl", "serverUrl"),
            transport=_TRANSPORTS[transport or "auto"],
            headers=texts("headers"),
            auth_token=one("auth_token"),
            cwd=one("cwd"),
            name=name,
            secrets=tuple(secrets),
        )
    except ValueError as error:
        raise error if str(error).startswith(at) else ValueError(f"{at}: {error}") from None


def _wanted(entry: Fields, at: str) -> list[str] | None:
    """Return the names of the tools to offer, or None for all."""
    wanted = entry.get("tools")
    if wanted is None:
        return None
    names = cast("list[JSON]", wanted) if isinstance(wanted, list) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{at}.tools: expected a list of names; got {json.dumps(wanted)}")
    return None if "*" in names else cast("list[str]", names)


def _object(value: JSON, at: str) -> Fields:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at}: expected an object; got {json.dumps(value)[:80]}")
    return cast("Fields", value)


def _expanded(value: str, at: str, environ: Mapping[str, str], secrets: list[str]) -> str:
    """Replace variables by their values, and add the values to the secrets."""

    def found(match: re.Match[str]) -> str:
        name, default, other = match.group(1), match.group(2), match.group(3)
        if other is not None:
            raise ValueError(f"{at}: unknown ${{{other}}}; write ${{VAR}} for an environment variable")
        known = environ.get(name)
        if known is None:
            if default is None:
                raise ValueError(f"{at}: the environment variable {name} is not set, which ${{{name}}} needs")
            return default
        secrets.append(known)
        return known

    return _VARIABLE.sub(found, value)
