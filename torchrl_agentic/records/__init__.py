"""Records of trajectories: JSON lines that a running program writes, and that reports and viewers read.

`Recorder` writes, `Dump` and `read_records` read; a `TrajectoryRecord` is one line. Other observers of
trajectories are subclasses of `TrajectoryHook`, such as `spans.SpanRecorder`.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
