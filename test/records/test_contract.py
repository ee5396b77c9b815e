"""Both hooks that come with the package keep what hooks promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from torchrl_agentic import Recorder, read_records
from torchrl_agentic.records import TrajectoryHook
from torchrl_agentic.records.spans import SpanRecorder
from torchrl_agentic.testing import HookContract


class TestRecorder(HookContract):
    suffix = ".jsonl"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "dump"

    def make(self) -> Recorder:
        return Recorder(self.path, suffix=self.suffix)

    def told(self, hook: TrajectoryHook) -> int:
        assert isinstance(hook, Recorder)
        hook.flush()
        return len(list(read_records(self.path)))


class TestCompressed(TestRecorder):
    suffix = ".jsonl.zst"


class TestSpanRecorder(HookContract):
    def make(self) -> SpanRecorder:
        self.exported = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exported))
        return SpanRecorder(provider)

    def told(self, hook: TrajectoryHook) -> int:
        return sum(span.name == "invoke_agent" for span in self.exported.get_finished_spans())


class TestFunction(HookContract):
    """A function that is called with each turn is a hook too."""

    def make(self) -> TrajectoryHook:
        from torchrl_agentic.records import as_hook

        hook = as_hook(print)
        assert hook is not None
        return hook
