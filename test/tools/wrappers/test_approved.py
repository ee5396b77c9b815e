"""Only calls that a policy allows run, and the model gets the reason."""

import asyncio

import pytest
from helpers.wrapper_tools import Gated, Scripted, add, ask, by_hand

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import ParsedCall, Status, Timing, ToolResult
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools import Approved, Renamed


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("verdict", "status", "text"),
    [
        (True, Status.OK, "3"),
        (False, Status.SKIPPED, "Error: this call was not run: this call is not allowed"),
        ("not on Sundays", Status.SKIPPED, "Error: this call was not run: not on Sundays"),
        ("", Status.SKIPPED, "Error: this call was not run: this call is not allowed"),
        ({"a": 5, "b": 5}, Status.OK, "10"),
    ],
)
async def test_policy_verdict_is_applied(verdict, status, text, is_async):
    async def later(name, args, ctx):
        await asyncio.sleep(0)
        return verdict

    policy = later if is_async else lambda name, args, ctx: verdict
    (result,) = await ask(Approved(add, policy), {"a": 1, "b": 2})
    assert (result.status, result.text) == (status, text)
    assert result.notes == (("changed arguments",) if isinstance(verdict, dict) else ())


async def test_the_policy_knows_the_call():
    seen = []

    def policy(name, args, ctx):
        seen.append((name, dict(args), ctx.call_id, ctx.trajectory))
        return True

    await ask(Approved(Renamed(add, "plus"), policy), {"a": 1})
    assert seen == [("plus", {"a": 1}, "c0", "t")]


@pytest.mark.parametrize(
    ("verdict", "error"), [(None, TypeError), (1, TypeError), ({"a": "x"}, ValueError)], ids=str
)
async def test_invalid_verdict_blocks_the_call(verdict, error):
    """`return` forgotten, for one."""
    inner = Scripted("x")
    inner.input_schema = add.input_schema
    tool = Approved(inner, lambda name, args, ctx: verdict)
    with pytest.raises(error):
        await by_hand(tool, a=1)
    (result,) = await ask(tool, {"a": 1})
    assert result.status is Status.CRASH
    assert inner.seen == []


async def test_model_sees_the_error_of_a_policy():
    def policy(name, args, ctx):
        raise ToolError("ask for less")

    inner = Scripted("x")
    (result,) = await ask(Approved(inner, policy), {})
    assert (result.status, result.text, inner.seen) == (Status.ERROR, "Error: ask for less", [])


def test_a_human_being_may_take_longer_than_a_call():
    async def policy(name, args, ctx):
        await asyncio.sleep(50)
        return True

    async def main():
        dispatcher = Dispatcher([Approved(add, policy, wait_s=60)], per_call_timeout=1)
        (result,) = await dispatcher.session("t").run([ParsedCall("add", {"a": 1}, "c")])
        await dispatcher.close()
        return result

    result = run_skipping(main())
    assert (result.text, result.status) == ("1", Status.OK)
    assert result.timing.queue_s == pytest.approx(50)


async def test_nobody_there_is_a_refusal():
    async def policy(name, args, ctx):
        await asyncio.Event().wait()

    (result,) = await ask(Approved(add, policy, wait_s=0.01), {"a": 1})
    assert (result.status, result.text) == (
        Status.SKIPPED, "Error: this call was not run: it was not approved within 0.01 s"
    )  # fmt: skip


async def test_the_tool_is_bounded_by_the_timeout_of_a_call_after_the_wait():
    dispatcher = Dispatcher([Approved(Gated(), lambda *_: True, wait_s=60)], per_call_timeout=0.01)
    (result,) = await dispatcher.session("t").run([ParsedCall("gated", {}, "c")])
    await dispatcher.close()
    assert result.status is Status.TIMEOUT


async def test_the_deadline_that_the_tool_knows_is_later_by_the_wait():
    seen = []

    class Looks(Scripted):
        async def run(self, args, ctx):
            seen.append(ctx.deadline)
            return ToolResult(timing=Timing(0, 5.0, 0))

    async def policy(name, args, ctx):
        seen.append(ctx.deadline)
        await asyncio.sleep(0.02)
        return True

    dispatcher = Dispatcher([Approved(Looks(), policy, wait_s=60)], per_call_timeout=50)
    await dispatcher.session("t").run([ParsedCall("scripted", {}, "c")])
    await dispatcher.close()
    assert seen[1] >= seen[0] + 0.02
    result = await by_hand(Approved(Looks(), policy, wait_s=60))
    assert seen[3] is None
    assert result.timing.queue_s >= 5.0


@pytest.mark.parametrize("wait_s", [0, float("nan"), -1])
def test_invalid_times_are_rejected(wait_s):
    with pytest.raises(ValueError, match="must be above 0"):
        Approved(add, lambda *_: True, wait_s=wait_s)
