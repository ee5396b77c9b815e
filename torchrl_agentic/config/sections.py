"""The keys of a configuration, ours and verl's, as pydantic models."""

from __future__ import annotations

import inspect
import logging
import typing
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic
from pydantic import PositiveInt

from torchrl_agentic.config.document import ConfigError, Location, unknown_key
from torchrl_agentic.text import nearest
from torchrl_agentic.tools.schema import shorten

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=pydantic.BaseModel)
Model = type[pydantic.BaseModel]
_FIELDS = {
    "format": "parser",
    "max_parallel_calls": "max_calls_per_turn",
    "max_turns": "max_turns",
    "max_assistant_turns": "max_turns",
    "max_user_turns": "max_user_turns",
}
"""Key of `multi_turn` → field of `LoadedTools`; the last that is set counts."""


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    return {"enable": value} if isinstance(value, bool) else value


Strings = Annotated[list[str], pydantic.BeforeValidator(_listed)]
"""One string or a list of them."""


class Section(pydantic.BaseModel):
    """A mapping without other keys, and without values of other types."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class TrainerSection(Section):
    """A section of verl's trainer; keys that have no meaning here are ignored."""


class MCPSettings(Section):
    """Arguments of `MCPToolset`, and the limits of all servers together.

    Attributes:
        rate_limit: Largest number of calls per second; None for no limit.
        max_concurrent: Largest number of calls at the same time; None for no limit.
        timeout: The argument `request_timeout`, in seconds.
    """

    type: Literal["mcp"] = "mcp"
    rate_limit: float | None = None
    max_concurrent: int | None = None
    timeout: Any = None
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

    name: Annotated[str, pydantic.Field(pattern=r"\S")]
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool | None = None


class SchemaSection(Section):
    """The schema of a tool in the form of OpenAI's API."""

    type: Literal["function"] = "function"
    function: FunctionSection


class ClassSection(Section):
    """An entry in verl's form: `package.module.Class` or `file.py:Class`, and the arguments of that class."""

    class_name: str
    config: dict[str, Any] = {}
    tool_schema: SchemaSection | None = None
    mcp: MCPSection | None = None


class FilesSection(Section):
    """Files of tools: YAML, Python with marked functions, JSON of MCP servers."""

    function_tool_path: Strings = []
    tools_config_file: Strings = []
    tool_config_path: Strings = []
    mcp_servers_config_path: Strings = []
    tool_selected_list: list[str] | None = None


class MultiTurnSection(FilesSection, TrainerSection):
    """Verl's `rollout.multi_turn`."""

    enable: bool = True
    format: str | None = None
    max_parallel_calls: PositiveInt | None = None
    max_turns: PositiveInt | None = None
    max_assistant_turns: PositiveInt | None = None
    max_user_turns: PositiveInt | None = None
    max_tool_response_length: PositiveInt | None = None
    tool_response_truncate_side: Literal["left", "middle", "right"] | None = None
    use_inference_chat_template: bool | None = None
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] | None = None
    interaction_config_path: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the stated settings by the field of `LoadedTools`."""
        return {_FIELDS[k]: v for k, v in self.model_dump(exclude_none=True).items() if k in _FIELDS}

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the stated settings by the argument of `TurnTokenizer`; a length of null means no bound."""
        options = self.model_dump(include=set(VERL_DEFAULTS), exclude_none=True)
        if "max_tool_response_length" in self.model_fields_set:
            options["max_tool_response_chars"] = self.max_tool_response_length
        if self.tokenization_sanity_check_mode == "off":
            options["tokenization_sanity_check_mode"] = "disable"
        return options


VERL_DEFAULTS = {
    "max_tool_response_chars": 256,
    "tool_response_truncate_side": "middle",
    "use_inference_chat_template": False,
    "tokenization_sanity_check_mode": "strict",
}
"""Arguments of `TurnTokenizer` that mean what verl does by default."""
MultiTurn = Annotated[MultiTurnSection | None, pydantic.BeforeValidator(_switch)]
"""The section, or `multi_turn: true`."""


class RolloutSection(TrainerSection):
    """Verl's `actor_rollout_ref.rollout`; `tool_kwargs` is an older name of `multi_turn`."""

    multi_turn: MultiTurn = None
    tool_kwargs: FilesSection | None = None


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

    def multi_turn_sections(self) -> dict[tuple[str, ...], MultiTurnSection]:
        """Return the `multi_turn` sections by the keys that lead to them; every trainer has one."""
        found: dict[tuple[str, ...], MultiTurnSection | None] = {("multi_turn",): self.multi_turn}
        if self.actor_rollout_ref is not None:
            rollout = self.actor_rollout_ref.rollout or RolloutSection()
            found["actor_rollout_ref", "rollout", "multi_turn"] = rollout.multi_turn or MultiTurnSection()
        return {steps: section for steps, section in found.items() if section is not None}


def read_section(model: type[S], data: Any, location: Location) -> S:
    """Validate a part of a file; log the keys of verl's trainer that are ignored.

    Args:
        model: Model of the section.
        data: Its plain values.
        location: Its position.

    Returns:
        The validated section.

    Raises:
        ConfigError: If the data does not fit the model; the message has one line per mistake.
    """
    data, ignored = _without_trainer_keys(model, data)
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
    if kind == "value_error":
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    if kind not in ("extra_forbidden", "model_type"):
        return f"{where}: {item['msg']}; got {shorten(item['input'])}"
    for step in steps[:-1] if kind == "extra_forbidden" else steps:
        model = _section_of(model, step) or model
    if kind == "model_type":
        keys = ", ".join(model.model_fields)
        return f"{where}: expected a mapping with keys of {keys}; got {shorten(item['input'])}"
    is_elsewhere = any(
        steps[-1] in other.model_fields for other in (ClassSection, MCPSettings, MultiTurnSection)
    )
    hint = "; check its indentation" if is_elsewhere else ""
    return f"{where.place}: {unknown_key(steps[-1], model.model_fields, hint)}"


def _section_of(model: Model, key: str) -> Model | None:
    """Return the model of a field that is a section, or of the items of a list of sections."""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    kinds = [kind for kind in (annotation, *typing.get_args(annotation)) if inspect.isclass(kind)]
    return next((kind for kind in kinds if issubclass(kind, pydantic.BaseModel)), None)


def _without_trainer_keys(model: Model, data: Any, above: str = "") -> tuple[Any, list[str]]:
    """Return the data without keys that have no meaning here, and those keys; misspelt ones stay."""
    if not isinstance(data, dict):
        return data, []
    fields = cast("dict[str, Any]", data)
    is_trainer = issubclass(model, TrainerSection) or "actor_rollout_ref" in fields
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in fields.items():
        section = _section_of(model, key)
        if (
            key not in model.model_fields
            and is_trainer
            and nearest(key, model.model_fields, cutoff=0.8) is None
        ):
            ignored.append(above + key)
        else:
            kept[key], inner = (
                (value, []) if section is None else _without_trainer_keys(section, value, f"{above}{key}.")
            )
            ignored += inner
    return kept, ignored
