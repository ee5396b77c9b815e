"""The short form: `python`, `search: {topk: 5}`, `function: "file.py:name"`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from torchrl_agentic.repl import repl_in
from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.tool_config.mistakes import described, nearest
from torchrl_agentic.tool_config.options import call
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Tool

NATIVE: Mapping[str, tuple[str, str | None]] = {
    "python": ("PythonTool", "repl"),
    "shell": ("ShellTool", "sandbox"),
    "file_read": ("FileReadTool", "sandbox"),
    "file_write": ("FileWriteTool", "sandbox"),
    "file_edit": ("FileEditTool", "sandbox"),
    "stop": ("StopTool", None),
    "http": ("HttpTool", None),
    "search": ("SearchTool", None),
    "sandbox_fusion": ("SandboxFusionTool", None),
}
"""Name → the class in `tools`, and what it is given of the sandbox that all tools of a file share."""
KNOWN = (*NATIVE, "function", "mcp")


class Workplace:
    """The sandbox that the tools of a configuration share, so that they share their files."""

    @functools.cached_property
    def sandbox(self) -> Sandbox:
        """The sandbox, made at its first use."""
        return default_sandbox()

    def gives(self, what: str | None) -> dict[str, Any]:
        """Give what a tool is made with."""
        if what is None:
            return {}
        return {what: repl_in(self.sandbox) if what == "repl" else self.sandbox}


def make_native(kind: str, options: Any, spot: Spot, workplace: Workplace) -> Tool:
    """Make a tool that comes with the package.

    spot: where its name stands.

    Raises:
        ConfigError: there is none of this name, or the options do not fit.
    """
    if kind not in NATIVE:
        spot.fail(f"no tool {kind!r}{nearest(kind, KNOWN)} (known: {', '.join(KNOWN)}; or 'class_name: …')")
    if not isinstance(options, Mapping | None):
        spot.fail(f"expected options, e.g. {{name: …}}; got {options!r}, {described(options)}")
    name, needs = NATIVE[kind]
    made: Callable[..., Any] = getattr(importlib.import_module("torchrl_agentic.tools"), name)
    told = cast("Mapping[str, Any]", options or {})
    return call(made, told, lambda key: str(spot.at(key) if key else spot), given=workplace.gives(needs))
