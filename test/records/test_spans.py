"""A trajectory becomes spans for observability tools, without message texts."""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import replace

import pytest
from helpers.record_strategies import turn
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import Status, Timing, ToolResult
from torchrl_agentic.records.spans import SpanRecorder


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def recorder(exported: InMemorySpanExporter) -> SpanRecorder:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return SpanRecorder(provider)


def named(exported: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exported.get_finished_spans() if span.name == name]


def test_spans_nest_calls_in_turns_in_trajectories(recorder: SpanRecorder, exported: InMemorySpanExporter):
    start = time.time()
    timing = Timing(start, 0.25, 0.5)
    recording = recorder.begin("0.0", 3)
    recording.record_turn(turn(result=replace(ToolResult.from_text("6"), timing=timing, reward=2.0)))
    recording.record_turn(turn(index=1))
    recording.add_reward(1.0)
    recording.finish("no_calls")

    (call,), turns, (whole,) = (named(exported, name) for name in ("execute_tool f", "turn", "invoke_agent"))
    assert call.parent is not None
    assert call.parent.span_id == turns[0].get_span_context().span_id
    assert all(
        one.parent is not None and one.parent.span_id == whole.get_span_context().span_id for one in turns
    )
    assert whole.parent is None
    assert call.start_time == int(start * 1e9)
    assert call.end_time == call.start_time + 750_000_000
    assert turns[0].start_time <= call.start_time
    assert turns[0].end_time == turns[1].start_time
    assert dict(call.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "f", "gen_ai.tool.call.id": "call_0_0",
        "agentic.status": "ok", "agentic.queue_s": 0.25, "agentic.reward": 2.0,
    }  # fmt: skip
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": "0.0", "agentic.row": 3,
        "agentic.reward": 1.0, "agentic.termination_reason": "no_calls",
    }  # fmt: skip


def test_a_call_that_failed_says_how(recorder: SpanRecorder, exported: InMemorySpanExporter):
    recorder.begin("0.0").record_turn(turn(result=ToolResult.from_text("late", status=Status.TIMEOUT)))
    (call,) = named(exported, "execute_tool f")
    assert (call.attributes or {})["error.type"] == "timeout"
    assert not call.status.is_ok


def test_spans_contain_no_message_text(recorder: SpanRecorder, exported: InMemorySpanExporter):
    recording = recorder.begin("0.0")
    recording.record_turn(turn("SECRET", args={"SECRET": "SECRET"}, result=ToolResult.from_text("SECRET")))
    recording.annotate(score=0.5, gts="SECRET", other="SECRET")
    recording.finish("no_calls")
    assert "SECRET" not in "".join(span.to_json() for span in exported.get_finished_spans())
    (whole,) = named(exported, "invoke_agent")
    assert (whole.attributes or {})["agentic.score"] == 0.5


def test_hook_can_be_pickled_to_workers(recorder: SpanRecorder):
    recording = pickle.loads(pickle.dumps(recorder)).begin("0.0")
    recording.record_turn(turn())
    recording.finish("reset")


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match="opentelemetry"):
        SpanRecorder()
