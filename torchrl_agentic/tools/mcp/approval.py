"""Whether the tools of a server are still described as they were when the toolset was set up."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.text import printable

if TYPE_CHECKING:
    import mcp_types

logger = logging.getLogger(__name__)

OnChange: TypeAlias = Literal["warn", "refuse"]
_KEPT = {"name", "title", "description", "input_schema", "output_schema", "annotations"}
_SHOWN = 200
_MOST_TOLD = 100  # changes that are logged: a server may make up a new one for each call


class ChangedTool(InfrastructureError):
    """A tool was not called, because its server describes it otherwise than when it was approved."""


def canonical(definition: mcp_types.Tool) -> str:
    """Write what a server says of a tool as JSON that is the same for the same meaning."""
    return json.dumps(definition.model_dump(include=_KEPT, exclude_none=True, mode="json"), sort_keys=True)


def fingerprint(definition: mcp_types.Tool) -> str:
    """Return a digest of what a server says of a tool: name, description, schemas and annotations."""
    return hashlib.sha256(canonical(definition).encode()).hexdigest()[:32]


class Approval:
    """The fingerprints of the tools that were approved: those of the first listing, unless they are given.

    Args:
        server: Name of the server, for messages.
        on_change: What becomes of a tool that is described otherwise.
        selected: Names of the tools that matter; None: all.
        fingerprints: What was approved before, by the server's names.
    """

    def __init__(
        self,
        server: str,
        on_change: OnChange,
        selected: Collection[str] | None,
        fingerprints: Mapping[str, str] | None,
    ) -> None:
        self.server, self.on_change, self.selected = server, on_change, selected
        self.is_pinned = fingerprints is not None
        self.fingerprints = None if fingerprints is None else dict(fingerprints)
        self._told: set[tuple[str, str]] = set()

    def see(self, found: Sequence[mcp_types.Tool]) -> dict[str, str]:
        """Approve the first listing; log what is described otherwise in a later one, once each.

        Returns:
            The fingerprints of what was listed.
        """
        now = {definition.name: fingerprint(definition) for definition in found}
        if self.fingerprints is None:
            self.fingerprints = now
        for definition in found:
            name, found_one = definition.name, now[definition.name]
            is_told = (name, found_one) in self._told or len(self._told) >= _MOST_TOLD
            if self.is_other(name, found_one) and not is_told:
                self._told.add((name, found_one))
                logger.warning(
                    "the MCP server %r %s%s; it says now: %r",
                    self.server,
                    self._what(name),
                    "" if self.on_change == "warn" else ", which is refused",
                    printable((definition.description or "")[:_SHOWN]),
                )
        return now

    def is_other(self, name: str, now: str | None) -> bool:
        """Whether a tool that is offered is described otherwise than was approved, or is new."""
        if self.fingerprints is None or now is None or not (self.selected is None or name in self.selected):
            return False
        return self.fingerprints.get(name) != now

    def check(self, name: str, now: str | None) -> tuple[str, ...]:
        """Return the notes for the result of a call.

        Raises:
            ChangedTool: The tool is described otherwise, and that is refused.
        """
        if not self.is_other(name, now):
            return ()
        what = f"the MCP server {self.server!r} {self._what(name)}"
        if self.on_change == "refuse":
            raise ChangedTool(f"{what}, and on_change='refuse': it was not called")
        return (what,)

    def refuses(self, definition: mcp_types.Tool) -> bool:
        """Whether a tool is not to be offered as it is described now."""
        return self.on_change == "refuse" and self.is_other(definition.name, fingerprint(definition))

    def check_pinned(self, found: Sequence[mcp_types.Tool]) -> None:
        """Raise if a tool is described otherwise than the fingerprints that were given say.

        Raises:
            ValueError: It is, and that is refused.
        """
        if not self.is_pinned or self.on_change != "refuse":
            return
        for definition in found:
            name, one = definition.name, fingerprint(definition)
            if name in (self.fingerprints or ()) and self.is_other(name, one):
                raise ValueError(
                    f"the MCP server {self.server!r} describes its tool {name[:_SHOWN]!r} otherwise than "
                    f"fingerprints= says: if you have read what it says now, give {one!r} for it"
                )

    def _what(self, name: str) -> str:
        is_new = name not in (self.fingerprints or ())
        return (
            f"has {'added' if is_new else 'changed'} its tool {name[:_SHOWN]!r} since its tools were approved"
        )
