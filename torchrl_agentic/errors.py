"""The exceptions of the package, one per reader: the model, the program, whoever runs the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ToolError(Exception):
    """What a tool raises when the model can put it right: the message is what the model reads.

    detail: kept in the `meta` of the result, not shown to the model.
    """

    def __init__(self, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = dict(detail or {})


class StopSignal(Exception):
    """What a tool raises to end its trajectory; the message is the reason.

    The call counts as answered, and the flags `stop_requested`, `done` and `terminated` of that row are set.
    """


class InfrastructureError(RuntimeError):
    """Something that the model is not to blame for: a sandbox lost, a service overloaded.

    A tool that lets it through gives a result with the status INFRA, which a reward can leave out.
    """


class SandboxError(InfrastructureError):
    """A sandbox could not start, was lost, or cannot be had on this machine.

    A command that fails inside a working sandbox is no such error; it has an exit code.
    """


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message names the pip command that installs it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the {package!r} package: pip install 'torchrl-agentic[{extra}]'")
