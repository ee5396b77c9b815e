"""What one entry of `tools` means: a short form, or verl's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import pydantic

from torchrl_agentic.tool_config.mistakes import ConfigError, described, mistakes_of
from torchrl_agentic.tool_config.models import (
    OTHER_SECTIONS,
    ClassSection,
    MCPSection,
    SchemaSection,
    Section,
)
from torchrl_agentic.tool_config.schemas import checked_schema
from torchrl_agentic.tool_config.spot import Spot

Options = Mapping[str, Any]
S = TypeVar("S", bound=Section)
KINDS = ("native", "mcp")


def read_section(kind: type[S], data: Any, spot: Spot) -> S:
    """Read a part of a file.

    Raises:
        ConfigError: it says something else than `kind` has; one line for each mistake.
    """
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as error:
        found = mistakes_of(error, kind, lambda steps: str(spot.at(*steps)), OTHER_SECTIONS)
        raise ConfigError(found) from None


def read_entry(entry: Any, spot: Spot) -> ClassSection | tuple[str, Any]:
    """Say what an entry names: what verl's form says, or a short form's name and options.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(entry, str):
        return entry, None
    if not isinstance(entry, dict) or not entry:
        met = described(cast("object", entry))
        spot.fail(f"an entry is a tool's name, 'name: {{options}}', or has a class_name; got {met}")
    fields = cast("dict[str, Any]", entry)
    if fields.keys() & {"class_name", "config", "tool_schema"} or difflib.get_close_matches(
        "class_name", fields
    ):
        return read_section(ClassSection, fields, spot)
    name, *others = fields
    if others:
        spot.at(others[0]).fail(
            f"an entry names one tool, and {others[0]!r} stands beside {name!r}; an option of {name!r} is "
            "indented further, another tool begins with '- '"
        )
    return name, fields[name]


def kind_of(section: ClassSection, spot: Spot) -> str:
    """Say whether an entry is native or mcp.

    Raises:
        ConfigError: it says something else, or both.
    """
    said = section.config.get("type")
    kind = said or ("mcp" if section.mcp is not None else "native")
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        spot.at("config", "type").fail(f"no type {kind!r}{hint} (types: {', '.join(KINDS)})")
    if kind == "native" and section.mcp is not None:
        spot.at("mcp").fail("an entry with 'mcp' has the type mcp; write 'config: {type: mcp}'")
    return kind


def read_schema(section: SchemaSection, spot: Spot) -> tuple[SchemaSection, list[str]]:
    """Give a schema as it is meant, and what there is to say about it.

    spot: where it stands.

    Raises:
        ConfigError: the parameters are no JSON Schema of an object.
    """
    parameters = spot.at("function", "parameters")
    if not section.function.name.strip():
        spot.at("function", "name").fail("the name is empty")
    mended, notes = checked_schema(section.function.parameters, lambda steps: str(parameters.at(*steps)))
    function = section.function.model_copy(update={"parameters": mended})
    return section.model_copy(update={"function": function}), notes


def read_servers(data: Any, spot: Spot, settings: tuple[str, ...]) -> tuple[MCPSection, Options]:
    """Read the short form of MCP servers: the section, and the settings that stand beside it.

    Raises:
        ConfigError: it says something else.
    """
    if not isinstance(data, dict):
        spot.fail(f"expected {{mcp_servers_config_path: servers.json}}; got {described(data)}")
    fields = cast("dict[str, Any]", data)
    options = {key: value for key, value in fields.items() if key in settings}
    rest = {key: value for key, value in fields.items() if key not in settings}
    return read_section(MCPSection, rest, spot), options
