"""Tools of MCP servers that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.tool_config.mistakes import unknown_key
from torchrl_agentic.tool_config.models import MCPSection
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.mcp import mcp_servers

_OPTIONS = ("sessions", "start_timeout", "max_result_bytes", "on_change", "fingerprints")
"""What `MCPToolset` takes by the same name."""
SETTINGS = ("rate_limit", "max_concurrent", "timeout", *_OPTIONS)
"""What the `config` of an MCP entry may say, besides its type; rate_limit and max_concurrent hold for all its
servers together. rate_limit: calls per second, as in verl."""
_FROM_VERL = ("num_workers",)


def open_servers(
    section: MCPSection, config: Mapping[str, Any], spot: Spot, config_spot: Spot
) -> dict[str, Toolset]:
    """Give a toolset for each server of the files that a section names; none is started yet.

    Raises:
        ConfigError: a file is missing or wrong, or a setting is.
        MissingExtra: the MCP SDK is not installed.
    """
    options = _options(config, config_spot)
    found: dict[str, Toolset] = {}
    for name in section.mcp_servers_config_path:
        path = spot.at("mcp_servers_config_path").path(name)
        try:
            listed = mcp_servers(str(path), name_prefix=section.name_prefix, **options)
        except MissingExtra:
            raise
        except (ValueError, TypeError) as error:
            spot.fail(str(error))
        found |= {f"{path}, server {server!r}": toolset for server, toolset in listed.items()}
    return found


def _options(config: Mapping[str, Any], spot: Spot) -> dict[str, Any]:
    for key in config:
        if key not in SETTINGS and key not in ("type", *_FROM_VERL):
            spot.at(key).fail(unknown_key(key, SETTINGS))
    options = {key: config[key] for key in _OPTIONS if key in config}
    if "timeout" in config:
        options["request_timeout"] = config["timeout"]
    try:
        if {"rate_limit", "max_concurrent"} & config.keys():
            options["limiter"] = RateLimiter(
                rate_per_second=config.get("rate_limit"), max_concurrent=config.get("max_concurrent")
            )
    except (TypeError, ValueError) as error:
        spot.fail(str(error))
    return options
