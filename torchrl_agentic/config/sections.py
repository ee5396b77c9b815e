"""The keys of a configuration, ours and verl's, as pydantic models, and the messages for wrong ones."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

import pydantic
from pydantic import BeforeValidator, Field, PositiveInt

from torchrl_agentic.config.document import Location
from torchrl_agentic.errors import ConfigError
from torchrl_agentic.text import did_you_mean, nearest, shorten, unknown_key
from torchrl_agentic.tools.loading import find_file
from torchrl_agentic.tools.row_data import AGENT

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=pydantic.BaseModel)
Model = type[pydantic.BaseModel]
Strings = Annotated[
    list[str], BeforeValidator(lambda v: [] if v is None else [v] if isinstance(v, str) else v)
]
"""One string or a list of them."""


class Section(pydantic.BaseModel):
    """A mapping without other keys, and without values of other types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class TrainerSection(Section):
    """A section of verl's trainer; keys that have no meaning here are ignored."""


class MCPSettings(Section):
    """Arguments of `MCPToolset`, where `timeout` is `request_timeout`, and limits of all servers together."""

    type: Literal["mcp"] = "mcp"
    rate_limit: float | None = None
    max_concurrent: int | None = None
    timeout: Any = Field(default=None, serialization_alias="request_timeout")
    sessions: Any = None
    start_timeout: Any = None
    max_result_bytes: Any = None
    on_change: Any = None
    fingerprints: Any = None
    num_workers: Any = None


class MCPSection(MCPSettings):
    """MCP servers from JSON files `{"mcpServers": {name: …}}`, with all of their tools or selected ones."""

    mcp_servers_config_path: Strings
    tool_selected_list: list[str] | None = None
    name_prefix: str = ""


class FunctionSection(Section):
    """The function of a `tool_schema`; `parameters` is the JSON Schema of an object."""

    name: Annotated[str, Field(pattern=r"\S")]
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool | None = None


class SchemaSection(Section):
    """The schema of a tool in the form of OpenAI's API."""

    type: Literal["function"] = "function"
    function: FunctionSection


class ToolOptions(Section, extra="allow"):
    """Arguments of a class of tools."""

    type: Literal["native", "mcp"] = "native"


class ClassSection(Section):
    """An entry in verl's form: `package.module.Class` or `file.py:Class`, and the arguments of that class."""

    class_name: str
    config: ToolOptions = ToolOptions()
    tool_schema: SchemaSection | None = None


class MCPClassSection(Section):
    """MCP servers in verl's form."""

    class_name: Literal["verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool"]
    config: MCPSettings = MCPSettings()
    mcp: MCPSection


class FilesSection(Section):
    """Files of tools: Python with marked functions, YAML, JSON of MCP servers; and which tools to keep."""

    function_tool_path: Strings = []
    tools_config_file: Strings = []
    tool_config_path: Strings = []
    mcp_servers_config_path: Strings = []
    tool_selected_list: list[str] | None = None


class MultiTurnSection(FilesSection, TrainerSection):
    """Verl's `rollout.multi_turn`."""

    enable: bool = True
    format: str | None = Field(default=None, serialization_alias="parser")
    max_parallel_calls: PositiveInt | None = Field(default=None, serialization_alias="max_calls_per_turn")
    max_turns: PositiveInt | None = None
    max_assistant_turns: PositiveInt | None = Field(default=None, serialization_alias="max_turns")
    max_user_turns: PositiveInt | None = None
    max_tool_response_length: PositiveInt | None = None
    tool_response_truncate_side: Literal["left", "middle", "right"] | None = None
    use_inference_chat_template: bool | None = None
    tokenization_sanity_check_mode: Annotated[
        Literal["strict", "ignore_strippable", "disable"] | None,
        BeforeValidator(lambda value: "disable" if value == "off" else value),
    ] = None
    interaction_config_path: str | None = None

    def settings(self, location: Location) -> dict[str, Any]:
        """Return the stated settings by their names here; a length of null means no bound."""
        others = {"enable", *FilesSection.model_fields}
        found = self.model_dump(exclude_none=True, by_alias=True, exclude=others)
        if "max_tool_response_length" in self.model_fields_set:
            found["max_tool_response_chars"] = found.pop("max_tool_response_length", None)
        if name := self.interaction_config_path:
            found["interaction_config_path"] = location.at("interaction_config_path").find(find_file, name)
        if end := {"left": "head", "right": "tail"}.get(self.tool_response_truncate_side or ""):
            where = location.at("tool_response_truncate_side")
            logger.warning("%s: keeps the %s of a long result, as verl up to 0.7 and not since", where, end)
        return found


MultiTurn = Annotated[
    MultiTurnSection | None, BeforeValidator(lambda v: {"enable": v} if isinstance(v, bool) else v)
]
"""The section, or `multi_turn: true`."""


class AgentSection(TrainerSection):
    """Verl's `rollout.agent`."""

    default_agent_loop: str | None = None
    agent_loop_config_path: str | None = None


class RolloutSection(TrainerSection):
    """Verl's `actor_rollout_ref.rollout`; `tool_kwargs` is an older name of `multi_turn`."""

    multi_turn: MultiTurn = None
    tool_kwargs: FilesSection | None = None
    agent: AgentSection = AgentSection()

    @pydantic.model_validator(mode="after")
    def _only_tool_agents(self) -> Self:
        loop = self.agent.default_agent_loop
        if loop not in (None, AGENT) and (self.multi_turn is None or self.multi_turn.enable):
            raise ValueError(
                f"agent.default_agent_loop is {loop!r}, and {AGENT!r} is the only one here; set it, or "
                "multi_turn.enable to False"
            )
        if self.agent.agent_loop_config_path is not None:
            raise ValueError(
                f"agent.agent_loop_config_path: {AGENT!r} is the only agent loop here; remove it"
            )
        return self


class ActorRolloutRefSection(TrainerSection):
    """Verl's `actor_rollout_ref`."""

    rollout: RolloutSection | None = None


class ToolsConfig(FilesSection):
    """A configuration of tools.

    Attributes:
        tools: Entries in the short form (`python`, `python: {timeout: 10}`, `function: "file.py:name"`) or in
            verl's (`class_name: …`).
        mcp: MCP servers.
        tool_selected_list: Names of the tools to keep, of all that this file leads to.
        limits: Tool name → arguments of `RateLimiter`, or of `ClusterRateLimiter` if they include a name.
        multi_turn: Verl's section of this name; also `tool_kwargs` and `actor_rollout_ref`.
    """

    tools: list[Any] = []
    mcp: MCPSection | None = None
    limits: dict[str, dict[str, Any]] = {}
    multi_turn: MultiTurn = None
    tool_kwargs: FilesSection | None = None
    actor_rollout_ref: ActorRolloutRefSection | None = None

    def inner_sections(self) -> dict[tuple[str, ...], FilesSection]:
        """Return the sections that name files, by their keys; every trainer has a `multi_turn`."""
        rollout = self.actor_rollout_ref and (self.actor_rollout_ref.rollout or RolloutSection())
        found: dict[tuple[str, ...], FilesSection | None] = {
            ("tool_kwargs",): self.tool_kwargs,
            ("actor_rollout_ref", "rollout", "tool_kwargs"): rollout and rollout.tool_kwargs,
            ("multi_turn",): self.multi_turn,
            ("actor_rollout_ref", "rollout", "multi_turn"): rollout
            and (rollout.multi_turn or MultiTurnSection()),
        }
        return {steps: section for steps, section in found.items() if section is not None}


def read_section(model: type[S], data: Any, location: Location) -> S:
    """Return a part of a file as a validated section; log the keys of verl's trainer that are ignored.

    Args:
        model: Model of the section.
        data: Its plain values.
        location: Its position.

    Raises:
        ConfigError: If the data does not fit the model; the message has one line per mistake.
    """
    ignored: list[str] = []
    data = _without_trainer_keys(model, data, ignored)
    if ignored:
        logger.warning("%s: ignored keys of the trainer: %s", location.place, ", ".join(ignored))
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        mistakes = [_mistake(item, model, location) for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(mistakes)) from None


def _mistake(item: Any, model: Model, location: Location) -> str:
    kind, steps, where = item["type"], item["loc"], location.at(*item["loc"])
    if kind == "missing":
        return f"{where.place}: {steps[-1]!r} is missing"
    if kind not in ("extra_forbidden", "model_type"):
        got = "" if kind == "value_error" else f"; got {shorten(item['input'])}"
        if kind == "literal_error":
            got += did_you_mean(item["input"], re.findall("'(.*?)'", item["ctx"]["expected"]))
        return f"{where}: {item['msg'].removeprefix('Value error, ')}{got}"
    for step in steps[:-1] if kind == "extra_forbidden" else steps:
        model = _section_of(model, step) or model
    if kind == "model_type":
        keys = ", ".join(model.model_fields)
        return f"{where}: expected a mapping with keys of {keys}; got {shorten(item['input'])}"
    return f"{where.place}: {unknown_key(steps[-1], model.model_fields)}"


def _section_of(model: Model, key: str) -> Model | None:
    """Return the model of a field that is a section, or of the items of a list of sections."""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    kinds = [kind for kind in (annotation, *get_args(annotation)) if inspect.isclass(kind)]
    return next((kind for kind in kinds if issubclass(kind, pydantic.BaseModel)), None)


def _without_trainer_keys(model: Model | None, data: Any, ignored: list[str], above: str = "") -> Any:
    """Return the data without keys that have no meaning here, which go into a list; misspelt keys stay."""
    if model is None or not isinstance(data, dict):
        return data
    fields, foreign = cast("dict[str, Any]", data), list[str]()
    if issubclass(model, TrainerSection) or "actor_rollout_ref" in fields:
        foreign = [key for key in fields if nearest(key, model.model_fields, cutoff=0.8) is None]
        ignored += [above + key for key in foreign]
    return {
        key: _without_trainer_keys(_section_of(model, key), value, ignored, f"{above}{key}.")
        for key, value in fields.items()
        if key not in foreign
    }
