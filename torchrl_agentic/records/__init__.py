"""Records of trajectories: JSON lines that a running program writes, and that reports and viewers read.

`Recorder` writes, `Dump` and `read_records` read; a `TrajectoryRecord` is one line. Other observers of
trajectories are subclasses of `TrajectoryHook`, such as `spans.SpanRecorder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.records.contained_hook import as_hook
    from torchrl_agentic.records.dump import Dump, DumpFile, read_line, read_records
    from torchrl_agentic.records.group_record import GroupMember, GroupRecord, Groups, read_groups
    from torchrl_agentic.records.hooks import Recorders, Recording, TrajectoryHook
    from torchrl_agentic.records.json_dump import SECRET_NAMES, Secrets
    from torchrl_agentic.records.jsonl_index import DumpTooLarge
    from torchrl_agentic.records.record import (
        BadLine,
        Origin,
        Summary,
        TokenRecord,
        TrajectoryRecord,
        group_of,
        plain_text,
        question_of,
    )
    from torchrl_agentic.records.record_json import (
        SCHEMA_VERSION,
        json_schema,
        message_to_json,
        record_from_json,
        record_to_json,
    )
    from torchrl_agentic.records.recorder import SUFFIXES, FileRecording, Recorder

__all__ = [
    "SCHEMA_VERSION",
    "SECRET_NAMES",
    "SUFFIXES",
    "BadLine",
    "Dump",
    "DumpFile",
    "DumpTooLarge",
    "FileRecording",
    "GroupMember",
    "GroupRecord",
    "Groups",
    "Origin",
    "Recorder",
    "Recorders",
    "Recording",
    "Secrets",
    "Summary",
    "TokenRecord",
    "TrajectoryHook",
    "TrajectoryRecord",
    "as_hook",
    "group_of",
    "json_schema",
    "message_to_json",
    "plain_text",
    "question_of",
    "read_groups",
    "read_line",
    "read_records",
    "record_from_json",
    "record_to_json",
]

__getattr__ = load_lazily(
    __name__,
    {
        "contained_hook": ("as_hook",),
        "dump": (
            "Dump",
            "DumpFile",
            "read_line",
            "read_records",
        ),
        "group_record": (
            "GroupRecord",
            "Groups",
            "GroupMember",
            "read_groups",
        ),
        "hooks": (
            "Recorders",
            "Recording",
            "TrajectoryHook",
        ),
        "json_dump": (
            "SECRET_NAMES",
            "Secrets",
        ),
        "jsonl_index": ("DumpTooLarge",),
        "record": (
            "BadLine",
            "Origin",
            "Summary",
            "TokenRecord",
            "TrajectoryRecord",
            "group_of",
            "plain_text",
            "question_of",
        ),
        "record_json": (
            "SCHEMA_VERSION",
            "json_schema",
            "message_to_json",
            "record_from_json",
            "record_to_json",
        ),
        "recorder": (
            "SUFFIXES",
            "FileRecording",
            "Recorder",
        ),
    },
)
