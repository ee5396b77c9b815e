"""A tool whose answers come from a cassette."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.tools.base import Tool, ToolContext, effects_of
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.wrap.base import CallLater, Wrapped, pause
from torchrl_agentic.tools.wrap.cassette import Cassette
from torchrl_agentic.tools.wrap.encoding import canonical
from torchrl_agentic.tools.wrap.entries import Entry
from torchrl_agentic.tools.wrap.recorded import Recorded


class CassetteMiss(InfrastructureError):
    """A call is not on the cassette; the message names what comes nearest."""

    is_transient = False


class Replayed(Wrapped):
    """A tool whose answers come from a cassette that `Recorded` has made of it, in the same place.

    A call is found by its trajectory, its tool, its arguments and its id; where no id fits, the calls with
    these arguments come in the order in which they were recorded. Each trajectory begins at the start of it.

    Args:
        tool: the tool; with strict, it is only asked for its description, and may be given as that: a dict
            of the shape that chat templates take, as `Tool.spec` gives it.
        cassette: or the path of its file.
        strict: a call that is not on the cassette fails, with INFRA. Otherwise it runs, and is recorded. A
            tool that changes things runs, from then on, only in trajectories of which nothing was replayed:
            it does not have what the replayed calls would have left behind.
        latency: whether calls take the time that they took, or how many times that.
        call_later: where that time comes from, for tests; None: the event loop.

    Raises:
        FileNotFoundError: strict, and there is no such file.
        TypeError: not strict, and the tool is only described.
        ValueError: the latency is below 0 or NaN.
    """

    keeps_state = True

    def __init__(
        self,
        tool: Any,
        cassette: Cassette | str | Path,
        *,
        strict: bool = True,
        latency: bool | float = False,
        call_later: CallLater | None = None,
    ) -> None:
        self.cassette = cassette if isinstance(cassette, Cassette) else Cassette(cassette)
        if strict and not self.cassette.path.exists():
            raise FileNotFoundError(
                f"no cassette at {self.cassette.path}: record one with Recorded(tool, path)"
            )
        if isinstance(tool, Mapping) and not strict:
            raise TypeError("a tool that is only described cannot run: give the tool itself, or strict=True")
        if not float(latency) >= 0:
            raise ValueError(f"latency is True, False, or a factor of 0 or more; got {latency}")
        super().__init__(_Described(cast("Any", tool)) if strict else Recorded(tool, self.cassette))
        self.strict, self.latency, self.call_later = strict, float(latency), call_later
        effects = effects_of(self)
        self._remembers = effects.exclusive or bool(effects.writes)
        self.begin("", None)

    def begin(self, trajectory: str, source: Any) -> None:
        """Begin at the start; a branch is a trajectory of its own."""
        self._used: set[int] = set()
        self._replays, self._runs = (False, False) if source is None else (source._replays, source._runs)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Give what was recorded, or see to it that there is something."""
        where = (ctx.trajectory, self.name, ctx.call_id, args)
        number = self.cassette.find(*where, self._used)
        remembers = self._remembers
        if number is None or (remembers and self._runs):
            if self.strict or (remembers and self._replays):
                raise CassetteMiss(self._missed(args, ctx))
            self._runs = True
            try:
                return await self.tool.run(args, ctx)
            finally:  # what has just been recorded is no answer to a later call
                if (number := self.cassette.find(*where, self._used)) is not None:
                    self._used.add(number)
        self._used.add(number)
        self._replays = True
        entry = self.cassette[number]
        if self.latency:
            await pause(entry.seconds * self.latency, self.call_later)
        outcome = entry.outcome
        if isinstance(outcome, ToolResult):
            return outcome
        raise outcome

    def _missed(self, args: Mapping[str, JSON], ctx: ToolContext) -> str:
        found = self.cassette.nearest(ctx.trajectory, self.name, args)
        hint = "there is nothing on it" if found is None else f"nearest: {found}"
        call = Entry(ctx.trajectory, self.name, ctx.call_id, canonical(args), 0.0, {})
        return f"not on the cassette {self.cassette.path}: {call}; {hint}. Record it, or pass strict=False"


class _Described(Tool):
    """What is known of a tool that is never run."""

    def __init__(self, tool: Any) -> None:
        if isinstance(tool, Mapping):
            told = cast("Mapping[str, Any]", tool).get("function", tool)
            self.name = told["name"]
            self.description = told.get("description", "")
            self.input_schema = told.get("parameters", {"type": "object"})
            self._spec: dict[str, JSON] | None = None
        else:
            known = ensure_tool(tool)
            self.name, self.description = known.name, known.description
            self.input_schema, self.output_schema = known.input_schema, known.output_schema
            self.effects = effects_of(known)
            self._spec = known.spec()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Fail: there is nothing to run."""
        raise CassetteMiss(f"{self.name!r} is only described here")

    def spec(self) -> dict[str, JSON]:
        """Describe it as it did itself."""
        return super().spec() if self._spec is None else self._spec
