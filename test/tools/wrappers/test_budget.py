"""A trajectory never exceeds its budget, even with overlapping calls."""

import asyncio
import pickle

import pytest
from helpers.wrapper_tools import Gated, Scripted, add, ask, by_hand, shout
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.messages import ParsedCall, Status, ToolResult
from torchrl_agentic.testing import VirtualClock
from torchrl_agentic.tools import Budget, Budgeted, Cached


async def test_calls_over_the_budget_are_skipped_with_the_reason():
    results = await ask(Budgeted(add, calls=2), *[{"a": n} for n in range(3)])
    assert [r.status for r in results] == [Status.OK, Status.OK, Status.SKIPPED]
    assert results[1].text == "1\n[budget left: 0 of 2 calls]"
    assert results[2].text == (
        "Error: this call was not run: the budget of 2 calls is used up; answer with what you have"
    )
    assert [r.metrics for r in results] == [{"calls_left": 1}, {"calls_left": 0}, {"calls_left": 0}]


@given(calls=st.integers(0, 6), asked=st.lists(st.integers(1, 4), max_size=4))
async def test_calls_that_overlap_never_spend_more_than_there_is(calls, asked):
    inner = Scripted("x")
    dispatcher = Dispatcher([Budgeted(inner, calls=calls)])
    session = dispatcher.session("t")
    for turn, number in enumerate(asked):
        await session.run([ParsedCall("scripted", {}, f"{turn}.{n}") for n in range(number)])
    assert len(inner.seen) == min(calls, sum(asked))
    await dispatcher.close()


async def test_each_trajectory_has_a_fresh_budget():
    tool = Budgeted(add, calls=1)
    dispatcher = Dispatcher([tool])
    for trajectory in ("a", "b", "a"):
        async with dispatcher.session(trajectory) as session:
            (result,) = await session.run([ParsedCall("add", {"a": 1}, "c")])
            assert result.status is Status.OK
    await dispatcher.close()
    assert tool.budget.by_hand["calls"] == 0


async def test_trajectories_of_one_name_do_not_share():
    """Two environments may use one name at the same time."""
    dispatchers = [Dispatcher([tool]) for tool in [Budgeted(add, calls=1)] for _ in range(2)]
    sessions = [dispatcher.session("0.0") for dispatcher in dispatchers]
    found = [(await session.run([ParsedCall("add", {"a": 1}, "c")]))[0].status for session in sessions]
    assert found == [Status.OK, Status.OK]
    for dispatcher in dispatchers:
        await dispatcher.close()


async def test_tools_that_share_a_budget_share_the_purse_of_each_trajectory():
    budget = Budget(calls=3)
    dispatcher = Dispatcher([Budgeted(add, budget=budget), Budgeted(shout, budget=budget)])
    calls = [ParsedCall("add", {"a": 1}, "1"), ParsedCall("shout", {"text": "x"}, "2")]
    for trajectory in ("a", "b"):
        async with dispatcher.session(trajectory) as session:
            first, second = await session.run(calls), await session.run(calls)
            assert [r.status for r in (*first, *second)] == [Status.OK] * 3 + [Status.SKIPPED]
    await dispatcher.close()
    assert len(budget.by_trajectory) == 0


async def test_branch_has_the_spent_budget_of_its_source():
    budget = Budget(calls=3)
    dispatcher = Dispatcher([Budgeted(add, budget=budget), Budgeted(shout, budget=budget)])
    source, branch = dispatcher.session("source"), dispatcher.session("branch")
    calls = [ParsedCall("add", {"a": 1}, "1"), ParsedCall("shout", {"text": "x"}, "2")]
    await source.run(calls)
    await source.branch([branch])
    for session in (source, branch):
        assert [r.status for r in await session.run(calls)] == [Status.OK, Status.SKIPPED]
    await dispatcher.close()


async def test_infra_call_is_not_counted():
    lost = ToolResult.from_text("lost", status=Status.INFRA)
    tool = Budgeted(Scripted(InfrastructureError("x"), lost, ToolError("wrong"), "x"), calls=1)
    dispatcher = Dispatcher([tool])
    session = dispatcher.session("t")
    found = [(await session.run([ParsedCall("scripted", {}, "c")]))[0].status for _ in range(4)]
    assert found == [Status.INFRA, Status.INFRA, Status.ERROR, Status.SKIPPED]
    await dispatcher.close()


async def test_a_call_that_was_stopped_is_counted():
    tool = Budgeted(Gated(), calls=1)
    call = asyncio.create_task(by_hand(tool))
    await tool.begun.acquire()
    call.cancel()
    await asyncio.wait([call])
    assert (await by_hand(tool)).status is Status.SKIPPED


async def test_error_result_shows_the_remaining_budget_too():
    result = await by_hand(Budgeted(Scripted(ToolError("wrong")), calls=5))
    assert result.text == "Error: wrong\n[budget left: 4 of 5 calls]"
    assert result.metrics == {"calls_left": 4}


async def test_time_is_spent_inside_the_tool_only():
    clock = VirtualClock()

    async def work(seconds: float) -> str:
        """Work."""
        clock.advance(seconds)
        return "x"

    tool = Budgeted(work, seconds=10, clock=clock)
    assert (await by_hand(tool, seconds=9)).metrics == {"seconds_left": 1}
    clock.advance(1000)
    assert (await by_hand(tool, seconds=9)).metrics == {"seconds_left": 0}
    assert "the budget of 10 seconds is used up" in (await by_hand(tool, seconds=9)).text


async def test_cost_is_read_from_the_result():
    tool = Budgeted(Scripted("four", "nine chars"), cost=lambda result: len(result.text), max_cost=10)
    first, second, third = [await by_hand(tool) for _ in range(3)]
    assert first.text == "four\n[budget left: 6 of 10 cost]"
    assert (second.metrics, third.status) == ({"cost_left": 0}, Status.SKIPPED)


@given(calls=st.integers(1, 3000) | st.integers(1, 10**18), used=st.integers(0, 2999), others=st.booleans())
def test_budget_line_shows_the_rest_of_each_bound(calls, used, others):
    budget = Budget(calls, max_cost=2.5 if others else None)
    more = ", 2.5 of 2.5 cost" if others else ""
    expected = f"[budget left: {max(0, calls - used):.4g} of {calls:g} calls{more}]"
    assert budget.line(budget.left({"calls": used, "seconds": 0.0, "cost": 0.0})) == expected


async def test_tools_that_share_a_budget_share_it_when_they_are_used_by_hand():
    budget = Budget(calls=1)
    first, second = Budgeted(add, budget=budget), Budgeted(shout, budget=budget)
    assert (await by_hand(first, a=1)).status is Status.OK
    assert (await by_hand(second, text="x")).status is Status.SKIPPED


async def test_failed_call_is_charged_but_not_counted():
    lost = ToolResult.from_text("lost", status=Status.INFRA)
    tool = Budgeted(Scripted(lost), calls=2, cost=lambda _: 4, max_cost=10)
    assert (await by_hand(tool)).metrics == {"calls_left": 2, "cost_left": 6}


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
async def test_invalid_cost_is_a_crash(cost):
    with pytest.raises(ValueError, match="the cost of a result"):
        await by_hand(Budgeted(add, cost=lambda _: cost, max_cost=1), a=1)


async def test_budget_line_can_be_disabled():
    result = await by_hand(Budgeted(add, calls=2, tell=False), a=1)
    assert (result.text, result.metrics) == ("1", {"calls_left": 1})


async def test_hits_of_a_cache_inside_count_and_of_one_outside_do_not():
    async def left(tool):
        dispatcher = Dispatcher([tool])
        session = dispatcher.session("t")
        found = [(await session.run([ParsedCall("add", {"a": 1}, "c")]))[0].status for _ in range(3)]
        await dispatcher.close()
        return found.count(Status.OK)

    assert await left(Budgeted(Cached(add), calls=2)) == 2
    assert await left(Cached(Budgeted(add, calls=2, tell=False))) == 3


def test_tools_that_share_a_budget_share_it_where_they_arrive():
    budget = Budget(calls=3)
    first, second = pickle.loads(pickle.dumps([Budgeted(add, budget=budget), Budgeted(shout, budget=budget)]))
    assert first.budget is second.budget
    assert (first.budget.calls, first.spent["calls"]) == (3, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"calls": -1},
        {"seconds": float("nan")},
        {"max_cost": 1},
        {"calls": 1, "cost": len},
        {"calls": 1, "budget": Budget(1)},
        {"budget": Budget(1), "cost": len},
    ],
    ids=str,
)
def test_invalid_budget_is_rejected(options):
    with pytest.raises(ValueError, match=r"budget|cost|a bound must be"):
        Budgeted(add, **options)
