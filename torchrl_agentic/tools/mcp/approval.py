"""`Approval`: checks that a server still describes its tools as it did when they were approved."""

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
_MAX_LOGGED = 100  # changes: a server may invent a new one for each call


class ChangedTool(InfrastructureError):
    """A tool was not called, because its server has changed its description since it was approved."""


def canonical(definition: mcp_types.Tool) -> str:
    """Return the description of a tool as JSON that is equal for equal descriptions."""
    return json.dumps(definition.model_dump(include=_KEPT, exclude_none=True, mode="json"), sort_keys=True)


def fingerprint(definition: mcp_types.Tool) -> str:
    """Return a digest of the name, description, schemas and annotations of a tool."""
    return hashlib.sha256(canonical(definition).encode()).hexdigest()[:32]


class Approval:
    """The fingerprints of the approved tools: the given ones, or else those of the first listing.

    Args:
        server: Name of the server, for messages.
        on_change: Treatment of a tool whose description has changed: "warn" or "refuse".
        selected: Names of the tools to check; None: all.
        fingerprints: Fingerprints that were approved before, by the server's names; None: approve the first
            listing.

    Attributes:
        is_pinned: Whether fingerprints were given.
        left_out: Tools of the last listing that cannot be offered, with the reason.
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
        self.left_out: Mapping[str, str] = {}
        self._logged: set[tuple[str, str]] = set()

    def see(self, found: Sequence[mcp_types.Tool], left_out: Mapping[str, str]) -> dict[str, str]:
        """Approve the first listing, and log once each change in a later one and each tool that is left out.

        Args:
            found: The listed tools.
            left_out: Tools that cannot be offered, with the reason.

        Returns:
            Their fingerprints, by the server's names.
        """
        self.left_out = left_out
        for name, why in left_out.items():
            if (self.selected is None or name in self.selected) and self._is_new((name, why)):
                logger.warning(
                    "the MCP server %r has a tool %r that is not offered: %s",
                    self.server,
                    name[:_SHOWN],
                    printable(why[:_SHOWN]),
                )
        now = {definition.name: fingerprint(definition) for definition in found}
        if self.fingerprints is None:
            self.fingerprints = now
        for definition in found:
            seen = (definition.name, now[definition.name])
            change = self.change(*seen)
            if change and self._is_new(seen):
                logger.warning(
                    "%s%s; its description now: %r",
                    change,
                    "" if self.on_change == "warn" else ", which is refused",
                    printable((definition.description or "")[:_SHOWN]),
                )
        return now

    def _is_new(self, event: tuple[str, str]) -> bool:
        """Return whether an event was not logged before, and may be now."""
        if event in self._logged or len(self._logged) >= _MAX_LOGGED:
            return False
        self._logged.add(event)
        return True

    def change(self, name: str, now: str | None) -> str | None:
        """Return a message if a selected tool differs from its approved description or is new, else None.

        Args:
            name: The server's name of the tool.
            now: Its current fingerprint; None if the server does not list it.
        """
        approved = self.fingerprints
        is_selected = self.selected is None or name in self.selected
        if approved is None or now is None or not is_selected or approved.get(name) == now:
            return None
        what = f"{'changed' if name in approved else 'added'} its tool {name[:_SHOWN]!r}"
        return f"the MCP server {self.server!r} has {what} since its tools were approved"

    def check(self, name: str, now: str | None) -> tuple[str, ...]:
        """Return the notes for the result of a call.

        Args:
            name: The server's name of the tool.
            now: Its current fingerprint; None if the server does not list it.

        Raises:
            ChangedTool: If the tool has changed, and changes are refused.
        """
        change = self.change(name, now)
        if change and self.on_change == "refuse":
            raise ChangedTool(f"{change}, and on_change='refuse': it was not called")
        return (change,) if change else ()

    def refuses(self, definition: mcp_types.Tool) -> bool:
        """Return whether a tool has changed, and changes are refused."""
        return (
            self.on_change == "refuse" and self.change(definition.name, fingerprint(definition)) is not None
        )

    def check_pinned(self, found: Sequence[mcp_types.Tool]) -> None:
        """Check the listed tools against the given fingerprints.

        Args:
            found: The listed tools.

        Raises:
            ValueError: If a tool differs, and changes are refused.
        """
        for definition in found if self.is_pinned else ():
            if definition.name in (self.fingerprints or ()) and self.refuses(definition):
                name, now = definition.name[:_SHOWN], fingerprint(definition)
                raise ValueError(
                    f"the MCP server {self.server!r} describes its tool {name!r} differently than "
                    f"fingerprints= expects: if you approve its current description, pass {now!r}"
                )
