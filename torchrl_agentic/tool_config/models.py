"""What a configuration of tools may say: its keys, and verl's other names for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast

import pydantic

from torchrl_agentic.messages import JSON


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


Strings = Annotated[list[str], pydantic.BeforeValidator(_listed)]
"""One text or several."""


class Section(pydantic.BaseModel):
    """A mapping in the file: no other keys, no values of another kind."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class MCPSection(Section):
    """Which MCP servers, from a JSON file `{"mcpServers": {name: …}}`, and which of their tools, or all.

    name_prefix: before the names of the tools.
    """

    mcp_servers_config_path: Strings
    tool_selected_list: list[str] | None = None
    name_prefix: str = ""


class FunctionSection(Section):
    """The function of a `tool_schema`. parameters: any JSON Schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: bool | None = None


class SchemaSection(Section):
    """What the model is told about a tool, as OpenAI's API writes it."""

    type: Literal["function"] = "function"
    function: FunctionSection

    def spec(self) -> dict[str, JSON]:
        """Give it as plain JSON."""
        return self.model_dump(exclude_none=True)


class ClassSection(Section):
    """An entry in verl's form.

    class_name: `package.module.Class`, `package.module:Class` or `file.py:Class`. Importing it runs its code.
    config: `type`, and what the class takes. tool_schema: may be left out if the class has one.
    """

    class_name: str
    config: dict[str, Any] = {}
    tool_schema: SchemaSection | None = None
    mcp: MCPSection | None = None


class TrainerSection(Section):
    """A section of verl's trainer: keys that have no meaning here are dropped, misspelt ones are errors."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_foreign_keys(cls, data: Any) -> Any:
        return _without_foreign_keys(cls, data)


class MultiTurnSection(TrainerSection):
    """Verl's `rollout.multi_turn`. Defaults are those of verl, save `enable` and the parallel calls."""

    enable: bool = True
    tool_config_path: Strings = []
    function_tool_path: Strings = []
    mcp_servers_config_path: Strings = []
    tool_selected_list: list[str] | None = None
    format: str | None = None
    max_parallel_calls: pydantic.PositiveInt | None = None
    max_assistant_turns: pydantic.PositiveInt | None = None
    max_user_turns: pydantic.PositiveInt | None = None
    max_turns: pydantic.PositiveInt | None = None
    max_tool_response_length: pydantic.PositiveInt | None = 256
    tool_response_truncate_side: Literal["left", "middle", "right"] | None = "middle"
    use_inference_chat_template: bool | None = False
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] | None = "strict"
    interaction_config_path: str | None = None

    def tokenizer_options(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `TurnTokenizer` that these settings mean.

        Args:
            known: Those of another section, which only what this one says itself replaces.
        """
        mode = self.tokenization_sanity_check_mode or "strict"
        made = {
            "max_tool_response_chars": self.max_tool_response_length,
            "tool_response_truncate_side": self.tool_response_truncate_side or "middle",
            "use_inference_chat_template": bool(self.use_inference_chat_template),
            "tokenization_sanity_check_mode": "disable" if mode == "off" else mode,
        }
        names = {"max_tool_response_length": "max_tool_response_chars"}
        own = {names.get(key, key) for key in self.model_fields_set}
        return {**made, **known, **{name: value for name, value in made.items() if name in own}}


def _switch(value: Any) -> Any:
    return {"enable": value} if isinstance(value, bool) else value


MultiTurn = Annotated[MultiTurnSection, pydantic.BeforeValidator(_switch)]
"""The section, or `multi_turn: True`."""


class ToolKwargsSection(Section):
    """An older name of `multi_turn` for where the tools are."""

    tools_config_file: Strings = []
    tool_config_path: Strings = []


class RolloutSection(TrainerSection):
    """Verl's `actor_rollout_ref.rollout`."""

    multi_turn: MultiTurn | None = None
    tool_kwargs: ToolKwargsSection | None = None


class ActorRolloutRefSection(TrainerSection):
    """Verl's `actor_rollout_ref`."""

    rollout: RolloutSection | None = None


class ToolsConfig(Section):
    """Which tools there are, and how often they may be called.

    tools: entries in short form, such as `python`, `python: {timeout: 10}`, `function: "file.py:name"`, or in
    verl's, `class_name: …`. function_tool_path: Python files whose marked functions are tools.
    tool_config_path: files that hold these same keys. mcp: servers whose tools are offered.
    tool_selected_list: of all these tools, the ones that are used. limits: tool name → the arguments of
    `RateLimiter`; with a `name`, those of `ClusterRateLimiter`. multi_turn, tool_kwargs: verl's sections of
    these names; actor_rollout_ref: the configuration of verl's trainer that holds them. Beside it, keys that
    have no meaning here are dropped.

    Paths are relative to the file they stand in, or else to the working folder.
    """

    tools: list[Any] = []
    function_tool_path: Strings = []
    tool_config_path: Strings = []
    mcp: MCPSection | None = None
    mcp_servers_config_path: Strings = []
    tool_selected_list: list[str] | None = None
    limits: dict[str, dict[str, Any]] = {}
    multi_turn: MultiTurn | None = None
    tool_kwargs: ToolKwargsSection | None = None
    actor_rollout_ref: ActorRolloutRefSection | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_foreign_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and "actor_rollout_ref" in data:
            return _without_foreign_keys(cls, cast("Any", data))
        return cast("Any", data)

    @property
    def multi_turn_sections(self) -> dict[tuple[str, ...], MultiTurnSection]:
        """The sections `multi_turn`, by the keys that lead there; a trainer without one has defaults."""
        found: dict[tuple[str, ...], MultiTurnSection | None] = {("multi_turn",): self.multi_turn}
        if self.actor_rollout_ref is not None:
            rollout = self.actor_rollout_ref.rollout or RolloutSection()
            found["actor_rollout_ref", "rollout", "multi_turn"] = rollout.multi_turn or MultiTurnSection()
        return {steps: section for steps, section in found.items() if section is not None}


def foreign_keys(model: type[pydantic.BaseModel], data: Any, above: str = "") -> Iterator[str]:
    """Yield the keys of a trainer's configuration that have no meaning here, as dotted names."""
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    for key, value in fields.items():
        if key not in model.model_fields:
            yield above + key
        elif (section := _TRAINER_SECTIONS.get(key)) is not None:
            yield from foreign_keys(section, value, f"{above}{key}.")


_TRAINER_SECTIONS: Mapping[str, type[TrainerSection]] = {
    "actor_rollout_ref": ActorRolloutRefSection,
    "rollout": RolloutSection,
    "multi_turn": MultiTurnSection,
}


def _without_foreign_keys(model: type[pydantic.BaseModel], data: Any) -> Any:
    """Drop the keys that are not fields of the model, unless they look like a misspelt one."""
    if not isinstance(data, dict):
        return data
    fields, given = model.model_fields, cast("dict[str, Any]", data)
    return {key: value for key, value in given.items() if key in fields or _is_near(key, fields)}


def _is_near(key: str, known: Iterable[str]) -> bool:
    return bool(difflib.get_close_matches(key, list(known), 1, 0.8))


OTHER_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "an entry of 'tools'": tuple(ClassSection.model_fields),
    "'function' in 'tool_schema'": tuple(FunctionSection.model_fields),
    "'config' of an entry": ("type",),
    "'parameters' in 'function'": ("type", "properties", "required", "$defs", "items"),
    "'mcp'": tuple(MCPSection.model_fields),
    "'multi_turn'": tuple(MultiTurnSection.model_fields),
    "the top of the file": tuple(ToolsConfig.model_fields),
}
"""Where keys belong that are met in the wrong place."""
