"""A rollout that is run again from a cassette is the same, in all conversations, with no tool at work."""

import asyncio

import pytest
from helpers.chat_envs import STOP, Counter, add, begin, call, chat_env, conversations, flags, step

from torchrl_agentic import StopTool, ToolCompose, ToolError, tool
from torchrl_agentic.tools import Cassette, Faulty, Recorded, Renamed, Replayed


@tool
async def flaky(n: int) -> list[int]:
    """Fail on odd numbers, and crash on 7."""
    if n == 7:
        raise KeyError(n)
    if n % 2:
        raise ToolError(f"{n} is odd")
    return list(range(n))


@tool
async def hang() -> None:
    """Never end."""
    await asyncio.Event().wait()


def tools():
    faulty = Faulty(flaky, 5, timeouts=0.15, overloads=0.15, truncations=0.15, garbage=0.15)
    return [Counter(), flaky, hang, Renamed(faulty, "faulty"), add, StopTool()]


def script(turn, row):
    calls = [call("count"), call("flaky", n=turn + row), call("flaky", n=7), call("count")]
    calls += [call("faulty", n=2 * n) for n in range(4)]
    calls += [call("add", a=turn, b="no number"), call("nothing"), call("add", a=turn, b=row)]
    if turn == 1 and row == 0:
        calls.append(call("hang"))
    if turn == 2 and row == 1:
        calls.append(STOP)
    return "I call. " + "".join(calls)


def rollout(compose, rows=3, trajectories=2, turns=3):
    """Step through several trajectories per row; give all conversations, and the flags of each step."""
    env = chat_env((rows,), compose)
    found = []
    try:
        for _ in range(trajectories):
            td = begin(env)
            for turn in range(turns):
                said = [script(turn, row) for row in range(rows)]
                stepped = step(env, td, *said)
                after = stepped["next"]
                found.append((conversations(after), flags(after, "n_errors"), flags(after, "n_infra")))
                td = env.step_mdp(stepped)
    finally:
        env.close()
    return found


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_rollout_is_the_same_when_it_is_replayed(tmp_path, rounds):
    """Replayed twice over, too: a cassette is not used up."""
    path = tmp_path / "cassette.jsonl"
    recorded = rollout(
        ToolCompose([Recorded(item, Cassette(path)) for item in tools()], per_call_timeout=0.5)
    )
    seen = str(recorded)
    for word in ("is odd", "crashed (KeyError)", "did not finish within 0.5 s", "429", "timed out", "[stop]"):
        assert word in seen
    cassette = Cassette(path)
    for _ in range(rounds):
        live = tools()
        replayed = rollout(ToolCompose([Replayed(item, cassette) for item in live], per_call_timeout=0.5))
        assert replayed == recorded
        assert live[0].diary == []


def test_a_rollout_that_goes_another_way_is_noticed(tmp_path):
    path = tmp_path / "cassette.jsonl"
    rollout(ToolCompose([Recorded(item, path) for item in tools()], per_call_timeout=0.2), turns=1)
    env = chat_env((1,), ToolCompose([Replayed(add, path)]))
    after = step(env, begin(env), call("add", a=40, b=2))["next"]
    assert flags(after, "n_infra") == [1]
    assert "nearest: add(" in conversations(after)[0][-1].content
    env.close()
