"""Faults follow from seed, trajectory, tool, call and try alone."""

import asyncio
import random
from collections import Counter

import pytest
from helpers.wrapper_tools import Scripted, add, ask, by_hand
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ImagePart, JsonPart, ParsedCall, Status, TextPart, ToolResult
from torchrl_agentic.testing import VirtualClock
from torchrl_agentic.tools import Faulty, Renamed, Retrying
from torchrl_agentic.tools.wrappers.faulty import pick_fault

MIXED = {"timeouts": 0.2, "overloads": 0.2, "truncations": 0.2, "garbage": 0.2}
TEXT = "all is well, and this is a sentence"


async def fates(tool, ids, trajectory="t"):
    dispatcher = Dispatcher([tool])
    session = dispatcher.session(trajectory)
    results = await session.run([ParsedCall(tool.name, {}, call_id) for call_id in ids])
    await dispatcher.close()
    return {call_id: (r.status, r.text, r.meta) for call_id, r in zip(ids, results, strict=True)}


async def test_the_same_calls_have_the_same_fate_in_any_order():
    ids = [f"c{n}" for n in range(60)]
    first = await fates(Faulty(Scripted(TEXT), 7, **MIXED), ids)
    shuffled = random.Random(0).sample(ids, len(ids))
    assert await fates(Faulty(Scripted(TEXT), 7, **MIXED), shuffled) == first
    assert {status for status, _, _ in first.values()} == {Status.OK, Status.INFRA, Status.TIMEOUT}


@pytest.mark.parametrize("other", [{"seed": 8}, {"trajectory": "u"}, {"name": "other"}], ids=str)
async def test_another_seed_trajectory_or_tool_has_another_fate(other):
    ids = [f"c{n}" for n in range(60)]
    inner = Renamed(Scripted(TEXT), other.get("name", "scripted"))
    first = await fates(Faulty(Scripted(TEXT), 7, **MIXED), ids)
    found = await fates(Faulty(inner, other.get("seed", 7), **MIXED), ids, other.get("trajectory", "t"))
    assert found != first


def test_a_fate_is_the_same_in_any_process_and_at_any_time():
    chances = {"a": 0.25, "b": 0.25, "c": 0.25}
    fates = [pick_fault(f"1/t/x/c{n}/1", chances) for n in range(8)]
    assert fates == [None, None, "c", "b", "b", "b", None, "a"]


@given(st.integers(0, 3))
def test_faults_come_as_often_as_they_should(seed):
    chances = {"timeout": 0.1, "overload": 0.3}
    found = Counter(pick_fault(f"{seed}/{n}", chances) for n in range(4000))
    assert 300 < found["timeout"] < 500
    assert 1050 < found["overload"] < 1350


async def test_tries_of_one_call_have_fates_of_their_own():
    tool = Retrying(Faulty(add, 3, overloads=0.5), attempts=40, call_later=lambda _, callback: callback())
    results = await ask(tool, *[{"a": n} for n in range(30)])
    assert {r.status for r in results} == {Status.OK}
    assert any(r.metrics for r in results)


async def test_injected_timeout_and_overload_do_not_run_the_tool():
    inner = Scripted("x")
    with pytest.raises(TimeoutError):
        await by_hand(Faulty(inner, 0, timeouts=1))
    with pytest.raises(InfrastructureError, match="429"):
        await by_hand(Faulty(inner, 0, overloads=1))
    assert inner.seen == []


async def test_truncated_text_is_a_prefix_and_garbage_is_not():
    parts = ToolResult((TextPart(TEXT), ImagePart(b"png"), JsonPart({"a": 1})), reward=1.0)
    cut = await by_hand(Faulty(Scripted(parts), 0, truncations=1))
    first, image, second = cut.parts
    assert TEXT.startswith(first.text)
    assert '{"a": 1}'.startswith(second.text)
    assert len(first.text) < len(TEXT)
    assert (image, cut.meta, cut.reward) == (ImagePart(b"png"), {"injected": "truncation"}, 1.0)
    spoiled = await by_hand(Faulty(Scripted(parts), 0, garbage=1))
    assert len(spoiled.parts[0].text) == len(TEXT)
    assert spoiled.parts[0].text != TEXT


async def test_nothing_can_be_cut_off_no_text():
    assert (await by_hand(Faulty(Scripted(""), 0, truncations=1))).text == ""
    assert len((await by_hand(Faulty(Scripted(""), 0, garbage=1))).text) == 1


async def test_latency_passes_on_the_clock_that_was_given():
    clock = VirtualClock()
    inner = Scripted("x")
    tool = Faulty(inner, 0, latency=lambda rng: 10 + rng.random(), call_later=clock.call_later)
    calls = [asyncio.create_task(by_hand(tool, f"c{n}")) for n in range(3)]
    while len(clock.due) < 3:
        await asyncio.sleep(0)
    clock.advance(10)
    await asyncio.sleep(0)
    assert not inner.seen
    clock.advance(1)
    assert [result.text for result in await asyncio.gather(*calls)] == ["x"] * 3


@pytest.mark.parametrize(
    "options",
    [{"timeouts": -0.1}, {"garbage": 1.1}, {"overloads": float("nan")}, {"timeouts": 0.6, "garbage": 0.6}],
)
def test_invalid_probabilities_are_rejected(options):
    with pytest.raises(ValueError, match="expected probabilities"):
        Faulty(add, 0, **options)
