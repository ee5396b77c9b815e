"""What a configuration of tools may say: its keys, and verl's other names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

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


class MultiTurnSection(Section):
    """Verl's `rollout.multi_turn`. Settings that tools have nothing to do with are said to do nothing."""

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
    max_tool_response_length: pydantic.PositiveInt | None = None
    tool_response_truncate_side: Literal["left", "middle", "right"] | None = None
    use_inference_chat_template: bool | None = None
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] | None = None
    num_repeat_rollouts: pydantic.PositiveInt | None = None
    interaction_config_path: str | None = None
    completion_callback: str | None = None


ELSEWHERE: Mapping[str, str] = {
    "max_assistant_turns": "EndTrajectory(max_turns=…)",
    "max_user_turns": "UserSimulator(max_turns=…)",
    "max_turns": "EndTrajectory(max_turns=…)",
    "max_tool_response_length": "TurnTokenizer(max_tool_response_chars=…)",
    "tool_response_truncate_side": "TurnTokenizer(tool_response_truncate_side=…)",
    "use_inference_chat_template": "TurnTokenizer",
    "tokenization_sanity_check_mode": "TurnTokenizer",
    "num_repeat_rollouts": "the batch size of the environment",
    "interaction_config_path": "UserSimulator(load_interactions(…))",
    "completion_callback": "a transform of your own",
}
"""Settings of `multi_turn` that tools have nothing to do with: what does it here."""


class ToolKwargsSection(Section):
    """An older name of `multi_turn` for where the tools are."""

    tools_config_file: Strings = []
    tool_config_path: Strings = []


class ToolsConfig(Section):
    """Which tools there are, and how often they may be called.

    tools: entries in short form, such as `python`, `python: {timeout: 10}`, `function: "file.py:name"`, or in
    verl's, `class_name: …`. function_tool_path: Python files whose marked functions are tools.
    tool_config_path: files that hold these same keys. mcp: servers whose tools are offered.
    tool_selected_list: of all these tools, the ones that are used. limits: tool name → the arguments of
    `RateLimiter`; with a `name`, those of `ClusterRateLimiter`. multi_turn, tool_kwargs: where verl has them.

    Paths are relative to the file they stand in, or else to the working folder.
    """

    tools: list[Any] = []
    function_tool_path: Strings = []
    tool_config_path: Strings = []
    mcp: MCPSection | None = None
    mcp_servers_config_path: Strings = []
    tool_selected_list: list[str] | None = None
    limits: dict[str, dict[str, Any]] = {}
    multi_turn: MultiTurnSection | None = None
    tool_kwargs: ToolKwargsSection | None = None

    @pydantic.field_validator("multi_turn", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {"enable": value} if isinstance(value, bool) else value


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
