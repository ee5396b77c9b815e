"""What follows from the order of wrappers, as the docstring of the package says it."""

import pytest
from helpers.wrapper_tools import Notes, Scripted, add, ask, by_hand, transparent
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import ImagePart, ParsedCall, Status, TextPart, ToolResult
from torchrl_agentic.tools import (
    Approved,
    Budgeted,
    Cached,
    Faulty,
    Recorded,
    Renamed,
    Replayed,
    Retrying,
    Truncated,
)

OWN_METRICS = {"calls_left"}
INFRA = InfrastructureError("429")
OUTCOMES = [
    "text", {"a": [1, None]}, ("value", 0.5, {"m": 1}), ToolError("wrong", {"k": 1}), StopSignal("enough"),
    ToolResult((TextPart("a"), ImagePart(b"png")), reward=1.0, meta={"k": 1}, notes=("n",)),
    ToolResult.from_text("no", status=Status.SKIPPED, stop=True), RuntimeError("a bug"),
]  # fmt: skip


def at_once(seconds, callback):
    """Time that does not pass."""
    callback()


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory):
    return transparent(tmp_path_factory.mktemp("laws") / "cassette.jsonl")


names = st.lists(st.sampled_from(sorted(transparent("unused"))), max_size=6)


@given(stack=names, outcome=st.sampled_from(OUTCOMES))
async def test_no_stack_of_transparent_wrappers_changes_a_result(wrappers, stack, outcome):
    """A crash is reported under the name of the call, so that both have the same."""
    bare, wrapped = Renamed(Scripted(outcome), "other"), Scripted(outcome)
    for name in [*stack, "Renamed"]:
        wrapped = wrappers[name](wrapped)
    (expected,), (found,) = await ask(bare, {"q": 1}), await ask(wrapped, {"q": 1})
    left = {key: value for key, value in (found.metrics or {}).items() if key not in OWN_METRICS}
    assert (found.parts, found.status, found.stop, found.reward, found.notes, found.meta) == (
        expected.parts, expected.status, expected.stop, expected.reward, expected.notes, expected.meta,
    )  # fmt: skip
    assert left == (expected.metrics or {})


@given(stack=names.map(lambda found: [name for name in found if name != "Cached"]))
async def test_no_stack_opens_or_closes_a_session_more_than_once(wrappers, stack):
    notes = tool = Notes()
    for name in stack:
        tool = wrappers[name](tool)
    results = await ask(tool, {"text": "a"}, {"text": "b"})
    assert [result.text for result in results] == ["a", "a b"]
    assert notes.diary == ["setup", "open t", "close t", "teardown"]


async def test_the_outermost_wrapper_sees_a_call_first_and_its_result_last():
    seen = []

    def policy(label):
        return lambda name, args, ctx: seen.append(label) or True

    result = await by_hand(Truncated(Approved(Approved(Scripted("x" * 40), policy(1)), policy(2)), 20), q=1)
    assert seen == [2, 1]
    assert len(result.text) == 20


async def test_a_cache_around_retries_keeps_how_many_there_were():
    kept = Cached(Retrying(Scripted(INFRA, "x"), call_later=at_once))
    assert [(await by_hand(kept, q=1)).metrics for _ in range(2)] == [{"retries": 1}] * 2
    looked = Retrying(Cached(Scripted(INFRA, "x")), call_later=at_once)
    assert [(await by_hand(looked, q=1)).metrics for _ in range(2)] == [{"retries": 1}, None]


async def test_a_budget_around_a_cache_counts_hits_and_one_inside_does_not():
    outside = await ask(Budgeted(Cached(add), calls=5, tell=False), *[{"a": 1}] * 3)
    inside = await ask(Cached(Budgeted(add, calls=5, tell=False)), *[{"a": 1}] * 3)
    assert [result.metrics["calls_left"] for result in outside] == [4, 3, 2]
    assert [result.metrics["calls_left"] for result in inside] == [4, 4, 4]


async def test_result_truncated_outside_a_cache_is_complete_inside():
    cut, whole = Truncated(Cached(Scripted("x" * 40)), 20), Cached(Truncated(Scripted("x" * 40), 20))
    for _ in range(2):
        assert len((await by_hand(cut)).text) == len((await by_hand(whole)).text) == 20
    assert len((await by_hand(cut.tool)).text) == 40


async def test_the_line_about_a_budget_is_behind_the_cut_or_within_it():
    within = await by_hand(Truncated(Budgeted(Scripted("x" * 40), calls=5), 30, "right"))
    behind = await by_hand(Budgeted(Truncated(Scripted("x" * 40), 30, "right"), calls=5))
    assert "budget" not in within.text
    assert behind.text == "x" * 16 + "...(truncated)\n[budget left: 4 of 5 calls]"


async def test_retries_around_a_budget_pay_for_each_timeout():
    async def left(tool):
        return (await by_hand(tool)).metrics["calls_left"]

    def late():
        return Scripted(TimeoutError(), TimeoutError(), "x")

    assert await left(Budgeted(Retrying(late(), call_later=at_once), calls=5, tell=False)) == 4
    assert await left(Retrying(Budgeted(late(), calls=5, tell=False), call_later=at_once)) == 2


async def test_outermost_recorder_records_the_results_of_the_model(tmp_path):
    """The outer replay runs nothing inside; the inner one runs everything around it again."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    recorded = Recorded(Truncated(Recorded(Scripted("x" * 40), inner), 20), outer)
    seen = await by_hand(recorded, q=1)
    asked = []

    def policy(name, args, ctx):
        return asked.append(name) or True

    whole = Approved(Scripted("never"), policy)
    assert (await by_hand(Replayed(Truncated(whole, 20), outer), q=1)).text == seen.text
    assert not asked
    assert (await by_hand(Truncated(Approved(Replayed(whole, inner), policy), 20), q=1)).text == seen.text
    assert asked == ["scripted"]


async def test_a_policy_around_a_cache_is_asked_for_hits_too():
    asked = []
    tool = Approved(Cached(add), lambda *_: asked.append(1) or True)
    await ask(tool, {"a": 1}, {"a": 1})
    assert len(asked) == 2


async def test_call_refused_by_a_policy_does_not_reach_the_inner_recorder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    await ask(Approved(Recorded(add, inside), lambda *_: False), {"a": 1})
    await ask(Recorded(Approved(add, lambda *_: False), outside), {"a": 1})
    assert not inside.exists()
    assert (await by_hand(Replayed(add, outside), a=1)).status is Status.SKIPPED


async def test_a_new_name_outermost_leaves_the_old_one_to_those_inside(tmp_path):
    await by_hand(Renamed(Recorded(add, tmp_path / "c"), "plus"), a=1)
    assert (await by_hand(Renamed(Replayed(add, tmp_path / "c"), "sum"), a=1)).text == "1"


async def test_faults_inside_retries_pass():
    tool = Retrying(Faulty(add, 1, overloads=0.3, timeouts=0.3), attempts=50, call_later=at_once)
    assert {result.status for result in await ask(tool, *[{"a": n} for n in range(20)])} == {Status.OK}


async def test_the_stack_of_the_docstring_is_a_tool():
    tool = Budgeted(Truncated(Cached(Retrying(add))), calls=5)
    dispatcher = Dispatcher([tool])
    session = dispatcher.session("t")
    (result,) = await session.run([ParsedCall("add", {"a": 1}, "c")])
    assert result.text == "1\n[budget left: 4 of 5 calls]"
    await dispatcher.close()
