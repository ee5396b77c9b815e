"""Trajectories as OpenTelemetry spans: one per trajectory, with one per turn, with one per tool call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON, ParsedCall, ToolResult, Turn
from torchrl_agentic.records.hooks import Recording, TrajectoryHook
from torchrl_agentic.records.record import TokenRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider


class SpanRecorder(TrajectoryHook):
    """Creates OpenTelemetry spans: `ToolCompose(recorder=[Recorder("dump"), SpanRecorder()])`.

    Names and attributes follow the semantic conventions for generative AI: "invoke_agent" for the trajectory,
    and "execute_tool <name>" for a call, with "gen_ai.tool.name", "gen_ai.tool.call.id" and, if its status is
    not OK, the status as "error.type". Between them, a span "turn" begins at the end of the previous one, so
    that it includes the generation. Messages, arguments and results are left out, since they may be secret
    and are long; `Recorder` writes them.

    Args:
        provider: Tracer provider; None for the global one. It is not copied to workers, which use their
            global one.

    Raises:
        MissingExtra: If opentelemetry-api is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise MissingExtra("SpanRecorder", "opentelemetry-api", "opentelemetry") from None
        self._tracer = trace.get_tracer("torchrl_agentic", tracer_provider=provider)

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start the span of a trajectory."""
        return _SpanRecording(self._tracer, trajectory, row)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SpanRecorder, ())


class _SpanRecording(Recording):
    __slots__ = ("_span", "_total", "_tracer", "_turn_began")

    def __init__(self, tracer: Tracer, trajectory: str, row: int) -> None:
        self._tracer = tracer
        self._turn_began = time.time_ns()
        self._total: float | None = None
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": trajectory,
            "agentic.row": row,
        }
        self._span = tracer.start_span("invoke_agent", start_time=self._turn_began, attributes=attributes)

    def record_turn(self, turn: Turn) -> None:
        """Create the spans of a turn and its calls."""
        from opentelemetry.trace import set_span_in_context

        pairs = list(zip(turn.outcome.calls, turn.outcome.results, strict=True))
        began = min([self._turn_began, *(_start(result) for _, result in pairs if result.timing is not None)])
        span = self._tracer.start_span(
            "turn",
            context=set_span_in_context(self._span),
            start_time=began,
            attributes={"agentic.turn": turn.index, "agentic.n_calls": len(pairs)},
        )
        for call, result in pairs:
            self._call(span, call, result)
        self._turn_began = time.time_ns()
        span.end(self._turn_began)

    def _call(self, parent: Span, call: ParsedCall, result: ToolResult) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        began = _start(result) if result.timing is not None else time.time_ns()
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.tool,
            "gen_ai.tool.call.id": call.call_id,
            "agentic.status": str(result.status),
        }
        took = 0.0
        if result.timing is not None:
            attributes["agentic.queue_s"] = result.timing.queue_s
            took = result.timing.queue_s + result.timing.run_s
        if result.reward is not None:
            attributes["agentic.reward"] = result.reward
        if result.is_error:
            attributes["error.type"] = str(result.status)
        span = self._tracer.start_span(
            f"execute_tool {call.tool}".rstrip(),
            context=set_span_in_context(parent),
            start_time=began,
            attributes=attributes,
        )
        if result.is_error:
            span.set_status(Status(StatusCode.ERROR, str(result.status)))
        span.end(began + int(took * 1e9))

    def add_reward(self, value: float) -> None:
        """Add to the total reward."""
        self._total = value if self._total is None else self._total + value

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record the score, and ignore the rest."""
        del gts, tokens, extras
        if score is not None:
            self._span.set_attribute("agentic.score", score)

    def finish(self, reason: str) -> None:
        """End the span."""
        if self._total is not None:
            self._span.set_attribute("agentic.reward", self._total)
        self._span.set_attribute("agentic.termination_reason", reason)
        self._span.end()


def _start(result: ToolResult) -> int:
    assert result.timing is not None
    return int(result.timing.start * 1e9)
