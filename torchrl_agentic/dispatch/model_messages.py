"""Results that the dispatcher writes itself: every text here is read by the model, which has one chance."""

from __future__ import annotations

from collections.abc import Iterable

from torchrl_agentic.errors import UnreadableResult
from torchrl_agentic.messages import CallError, Status, ToolResult


def unreadable_call(error: CallError) -> ToolResult:
    """Return the result of a call that the parser could not read, or that exceeds the parser's limit."""
    status = Status.SKIPPED if error.code == "over_limit" else Status.MALFORMED
    return _failure(status, error.message)


def too_many_calls(limit: int) -> ToolResult:
    """Return the result of a call beyond `max_calls_per_turn`."""
    return _failure(Status.SKIPPED, f"not run; a message may contain at most {limit} calls")


def unknown_tool(name: str, available: Iterable[str]) -> ToolResult:
    """Return the result of a call of a tool that does not exist, or that the trajectory may not use.

    Args:
        name: Name that the model wrote.
        available: Names of the tools that the model may call.
    """
    known = ", ".join(available) or "none"
    return _failure(Status.UNKNOWN_TOOL, f"no tool named {name!r}; available: {known}")


def invalid_arguments(name: str, reason: object) -> ToolResult:
    """Return the result of a call whose arguments do not fit the schema.

    Args:
        name: Name of the tool.
        reason: What the schema rejects, and what it expects.
    """
    return _failure(Status.INVALID_ARGS, f"{name}: {reason}")


def call_timeout(name: str, seconds: float | None) -> ToolResult:
    """Return the result of a call that exceeded `per_call_timeout`.

    Args:
        name: Name of the tool.
        seconds: The limit.
    """
    return _failure(Status.TIMEOUT, f"{name} did not finish within {seconds:g} s and was stopped")


def turn_timeout(name: str, seconds: float | None) -> ToolResult:
    """Return the result of a call that had not finished when `per_turn_timeout` expired.

    Args:
        name: Name of the tool.
        seconds: The limit.
    """
    return _failure(Status.TIMEOUT, f"{name} had not finished when the turn's limit of {seconds:g} s expired")


def cancelled(name: str) -> ToolResult:
    """Return the result of a call that was cancelled."""
    return _failure(Status.CANCELLED, f"{name} was cancelled")


def unavailable(name: str, reason: str) -> ToolResult:
    """Return the result of a call that lost its slot at a shared service.

    Args:
        name: Name of the tool.
        reason: Why the slot was lost.
    """
    return _failure(Status.INFRA, f"{name} is not available at the moment: {reason}")


def crashed(name: str, error: BaseException) -> ToolResult:
    """Return the result of a call whose tool raised an exception that it should not raise.

    Args:
        name: Name of the tool.
        error: The exception; the model reads its class only, because its text may hold anything.
    """
    kind = type(error).__name__
    if isinstance(error, UnreadableResult):
        return _failure(Status.CRASH, f"{name} finished, but its result cannot be read ({kind})")
    return _failure(Status.CRASH, f"{name} crashed ({kind}); it did not finish")


def _failure(status: Status, text: str) -> ToolResult:
    return ToolResult.from_text(f"Error: {text}", status=status)
