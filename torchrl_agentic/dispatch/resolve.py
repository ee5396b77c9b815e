"""Decide what becomes of a call before it runs: `resolve` looks the tool up and checks the arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torchrl_agentic.dispatch import model_messages
from torchrl_agentic.errors import SchemaValidationError
from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.tools.base import Effects, Tool, Toolset

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter
    from torchrl_agentic.tools.schema import Validator


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool, and what is computed once when it is added.

    Attributes:
        tool: The tool.
        effects: Effects of its calls, which decide their order.
        has_sessions: True if each trajectory opens the tool for itself.
        validator: Checks arguments against the tool's schema.
        limiter: Limiter that each call waits for, or None.
        world: Toolset whose state the tool shares (see `Toolset.session`), or None.
    """

    tool: Tool
    effects: Effects
    has_sessions: bool
    validator: Validator
    limiter: Limiter | None
    world: Toolset | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that may run.

    Attributes:
        bound: The tool.
        args: Arguments as the schema accepts them.
        notes: Notes of the parser and of the validation, for the result.
    """

    bound: BoundTool
    args: Mapping[str, JSON]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that does not run.

    Attributes:
        result: The result that tells the model why.
    """

    result: ToolResult


Resolved: TypeAlias = Ready | Refusal


def resolve(
    call: ParsedCall,
    number: int,
    tools: Mapping[str, BoundTool],
    *,
    allowed: Collection[str] | None = None,
    max_calls: int | None = None,
    validate: bool = True,
) -> Resolved:
    """Decide whether a call may run.

    Args:
        call: The call as the parser read it.
        number: Index of the call in its message, from 0.
        tools: Tools by name.
        allowed: Names of the tools that the trajectory may use in this turn, or None for all.
        max_calls: Number of calls that a message may contain, or None for no limit.
        validate: Whether arguments are checked against the schema of the tool.

    Returns:
        `Ready`, or `Refusal` with the result for the model. Nothing is changed and nothing is opened.
    """
    if call.error is not None:
        return Refusal(model_messages.unreadable_call(call.error))
    if max_calls is not None and number >= max_calls:
        return Refusal(model_messages.too_many_calls(max_calls))
    bound = tools.get(call.tool)
    if bound is None or (allowed is not None and call.tool not in allowed):
        available = [name for name in tools if allowed is None or name in allowed]
        return Refusal(model_messages.unknown_tool(call.tool, available))
    if not validate:
        return Ready(bound, call.args, call.notes)
    try:
        args, notes = bound.validator.accept(call.args)
    except SchemaValidationError as error:
        return Refusal(model_messages.invalid_arguments(call.tool, error))
    return Ready(bound, args, (*call.notes, *notes) if notes else call.notes)
