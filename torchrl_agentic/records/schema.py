"""The JSON Schema of a line of a dump."""

from __future__ import annotations

import functools
import json
from importlib import resources

from torchrl_agentic.messages import Fields


@functools.cache
def json_schema() -> Fields:
    """Give the JSON Schema (draft 2020-12) of what a `Recorder` writes, a line each."""
    text = resources.files("torchrl_agentic.records").joinpath("trajectory.schema.json").read_text("utf-8")
    return json.loads(text)
