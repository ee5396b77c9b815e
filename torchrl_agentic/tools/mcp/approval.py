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
        self._logged: set[tuple[str, str]] = set()

    def see(self, found: Sequence[mcp_types.Tool]) -> dict[str, str]:
        """Approve the first listing, and log each change in a later one once.

        Args:
            found: The listed tools.

        Returns:
            Their fingerprints, by the server's names.
        """
        now = {definition.name: fingerprint(definition) for definition in found}
        if self.fingerprints is None:
            self.fingerprints = now
        for definition in found:
            name, found_one = definition.name, now[definition.name]
            is_logged = (name, found_one) in self._logged or len(self._logged) >= _MAX_LOGGED
            if self.has_changed(name, found_one) and not is_logged:
                self._logged.add((name, found_one))
                logger.warning(
                    "the MCP server %r %s%s; its description now: %r",
                    self.server,
                    self._what(name),
                    "" if self.on_change == "warn" else ", which is refused",
                    printable((definition.description or "")[:_SHOWN]),
                )
        return now

    def has_changed(self, name: str, now: str | None) -> bool:
        """Return whether a selected tool differs from its approved description, or is new.

        Args:
            name: The server's name of the tool.
            now: Its current fingerprint; None if the server does not list it.
        """
        if self.fingerprints is None or now is None or not (self.selected is None or name in self.selected):
            return False
        return self.fingerprints.get(name) != now

    def check(self, name: str, now: str | None) -> tuple[str, ...]:
        """Return the notes for the result of a call.

        Args:
            name: The server's name of the tool.
            now: Its current fingerprint; None if the server does not list it.

        Raises:
            ChangedTool: If the tool has changed, and changes are refused.
        """
        if not self.has_changed(name, now):
            return ()
        what = f"the MCP server {self.server!r} {self._what(name)}"
        if self.on_change == "refuse":
            raise ChangedTool(f"{what}, and on_change='refuse': it was not called")
        return (what,)

    def refuses(self, definition: mcp_types.Tool) -> bool:
        """Return whether a tool has changed, and changes are refused."""
        return self.on_change == "refuse" and self.has_changed(definition.name, fingerprint(definition))

    def check_pinned(self, found: Sequence[mcp_types.Tool]) -> None:
        """Check the listed tools against the given fingerprints.

        Args:
            found: The listed tools.

        Raises:
            ValueError: If a tool differs, and changes are refused.
        """
        if not self.is_pinned or self.on_change != "refuse":
            return
        for definition in found:
            name, one = definition.name, fingerprint(definition)
            if name in (self.fingerprints or ()) and self.has_changed(name, one):
                raise ValueError(
                    f"the MCP server {self.server!r} describes its tool {name[:_SHOWN]!r} differently than "
                    f"fingerprints= expects: if you approve its current description, pass {one!r}"
                )

    def _what(self, name: str) -> str:
        is_new = name not in (self.fingerprints or ())
        return (
            f"has {'added' if is_new else 'changed'} its tool {name[:_SHOWN]!r} since its tools were approved"
        )
