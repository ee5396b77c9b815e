"""Create a tool of this package by its short name, as configurations do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from torchrl_agentic.repl import repl_in
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.text import shorten
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.options import OptionError, create
from torchrl_agentic.tools.signatures import keywords_of

TOOLS: Mapping[str, str] = {
    "python": "PythonTool",
    "shell": "ShellTool",
    "file_read": "FileReadTool",
    "file_write": "FileWriteTool",
    "file_edit": "FileEditTool",
    "stop": "StopTool",
    "http": "HttpTool",
    "search": "SearchTool",
    "sandbox_fusion": "SandboxFusionTool",
}
"""Short name → class in `torchrl_agentic.tools`."""


def native_tool(name: str, options: Any, sandbox: Callable[[], Sandbox]) -> Tool:
    """Create a tool of this package; load its module if needed.

    Args:
        name: Its short name, one of `TOOLS`.
        options: Mapping of arguments that a user wrote, or None.
        sandbox: Function that returns the sandbox of a tool that runs in one.

    Raises:
        MissingExtra: If the tool needs an extra that is not installed.
        OptionError: If an option is wrong.
    """
    if not isinstance(options, dict | None):
        raise OptionError(f"expected options, such as {{name: …}}; got {shorten(options)}")
    kind = getattr(importlib.import_module("torchrl_agentic.tools"), TOOLS[name])
    taken, given = keywords_of(kind), dict[str, Any]()
    if "repl" in taken:
        given["repl"] = repl_in(sandbox())
    elif "sandbox" in taken:
        given["sandbox"] = sandbox()
    return create(kind, cast("dict[str, Any]", options or {}), **given)
