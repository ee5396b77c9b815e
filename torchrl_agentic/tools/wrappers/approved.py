"""`Approved`, a tool whose calls need the approval of a policy."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torchrl_agentic.errors import SchemaValidationError, check_seconds
from torchrl_agentic.messages import JSON, Status, Timing, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.schema import Validator
from torchrl_agentic.tools.wrappers.base import Wrapped

Verdict: TypeAlias = bool | str | Mapping[str, JSON]
"""True: run the call. False or a text, the reason: refuse it. A mapping: run it with these arguments."""

Policy: TypeAlias = Callable[[str, Mapping[str, JSON], ToolContext], Verdict | Awaitable[Verdict]]
"""`policy(name, args, ctx)`; a function or a coroutine function."""


class Approved(Wrapped):
    """A tool whose calls run only if a policy allows them: a rule, a classifier, a human being.

    A refused call gets the status SKIPPED, and the model reads the reason. Arguments that the policy returns
    in place of the model's are checked against the schema, and the result has the note "changed arguments".
    If the policy raises or returns another type, the call does not run; the model reads the message of a
    `ToolError`. A policy that blocks should run on a thread: `await ctx.in_thread(...)`.

    Args:
        tool: The tool.
        policy: Decides about each call; see `Policy` and `Verdict`.
        wait_s: Seconds that the policy may take, for human beings: the wait counts as queueing, and a policy
            that takes longer refuses the call. None: the wait is part of the call and its
            `per_call_timeout`.

    Raises:
        TypeError: If `wait_s` is not a number.
        ValueError: If `wait_s` is not above 0.
    """

    def __init__(self, tool: Any, policy: Policy, *, wait_s: float | None = None) -> None:
        super().__init__(tool)
        check_seconds("wait_s", wait_s, none="a wait that is part of the call")
        self.policy, self.wait_s = policy, wait_s

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Ask the policy, then run the call or return the reason for the refusal."""
        if self.wait_s is not None:
            return await self._after_waiting(args, ctx, self.wait_s)
        verdict = await self._ask(args, ctx)
        return await self.tool.run(args, ctx) if verdict is True else await self._obey(verdict, ctx)

    async def _ask(self, args: Mapping[str, JSON], ctx: ToolContext) -> Verdict:
        verdict = self.policy(self.name, args, ctx)
        return await verdict if inspect.isawaitable(verdict) else verdict

    async def _obey(self, verdict: Verdict, ctx: ToolContext) -> ToolResult:
        if isinstance(verdict, Mapping):
            try:
                changed, _ = Validator(self.input_schema).accept(verdict)
            except SchemaValidationError as error:  # of the approver, not of the model
                raise ValueError(f"the arguments of the verdict do not fit the schema: {error}") from None
            result = await self.result(changed, ctx)
            return replace(result, notes=(*result.notes, "changed arguments"))
        if verdict is not False and not isinstance(verdict, str):
            raise TypeError(
                f"expected True, False, a reason or arguments from {self.name!r}'s policy; got {verdict!r}"
            )
        reason = verdict or "this call is not allowed"
        return ToolResult.from_text(f"Error: this call was not run: {reason}", status=Status.SKIPPED)

    async def _after_waiting(self, args: Mapping[str, JSON], ctx: ToolContext, wait_s: float) -> ToolResult:
        clock = asyncio.get_running_loop().time
        began = clock()
        verdict, ctx = await ctx.queue(self._within(wait_s, args, ctx))
        waited = clock() - began
        result = await (self.result(args, ctx) if verdict is True else self._obey(verdict, ctx))
        queue_s = waited + (result.timing.queue_s if result.timing else 0.0)
        return replace(result, timing=Timing(0.0, queue_s, clock() - began - queue_s))

    async def _within(self, wait_s: float, args: Mapping[str, JSON], ctx: ToolContext) -> Verdict:
        try:
            async with asyncio.timeout(wait_s):
                return await self._ask(args, ctx)
        except TimeoutError:
            return f"it was not approved within {wait_s:g} s"
