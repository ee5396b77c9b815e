"""A trajectory continues from the state that another run of it had between two turns."""

import dataclasses
import pickle

import pytest
from helpers.collector_worlds import CountedTool, call, encoded, tokenizer

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import Task
from torchrl_agentic.collectors.agent import Agent
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.trajectory import TrajectoryRun
from torchrl_agentic.engines import ScriptedEngine

TASK = Task("t", [{"role": "user", "content": "q"}])
SAID = [call("count", number=number) for number in range(3)] + ["done"]


class States:
    """Keeps the state of a run whenever it asks the engine."""

    def __init__(self):
        self.run, self.found = None, []

    def doing(self, name, cause, detail=""):
        if cause == "engine":
            self.found.append(self.run.state())

    def started_early(self, name, count):
        pass

    def add(self, span):
        pass


def counting():
    """Return a tool without a session, and what it was called with."""
    called = []

    @tool
    def count(number: int) -> str:
        """Count.

        Args:
            number: A number.
        """
        called.append(number)
        return f"{number} counted"

    return count, called


def run_of(tools, *, begin=0, said=SAID, name="t", **options):
    """Return a run whose engine says the script from one turn on."""
    agent = Agent(ToolCompose(tools, parser="hermes"), tokenizer(), max_turns=8)
    engine = ScriptedEngine([[encoded(text) for text in said[begin:]]], log_prob=-1.0)
    return TrajectoryRun(agent, Requests(engine), TASK, name=name, **options)


def bare(trajectory):
    """Return a trajectory without its times."""
    turns = [
        dataclasses.replace(
            turn,
            outcome=dataclasses.replace(
                turn.outcome,
                results=tuple(dataclasses.replace(one, timing=None) for one in turn.outcome.results),
            ),
        )
        for turn in trajectory.turns
    ]
    return dataclasses.replace(trajectory, turns=tuple(turns), seconds=0.0, spans=())


async def test_it_continues_from_each_turn_as_if_nothing_had_happened():
    count, called = counting()
    states = States()
    states.run = run_of([count], observer=states)
    whole = await states.run.run()
    assert states.found[0] is None
    assert called == [0, 1, 2]
    for turn in range(1, 4):
        count, called = counting()
        state = pickle.loads(pickle.dumps(states.found[turn]))
        assert not state.is_open
        again = await run_of([count], begin=turn, state=state).run()
        assert called == list(range(turn, 3))
        assert bare(again) == bare(whole)
        assert again.ledger.versions == whole.ledger.versions


async def test_a_trajectory_that_had_ended_only_gets_its_reward():
    count, called = counting()
    first = run_of([count])
    whole = await first.run()
    assert called == [0, 1, 2]

    async def reward(trajectory):
        return float(len(trajectory.turns))

    again = await run_of([count], begin=4, state=first.state(), reward=reward).run()
    assert called == [0, 1, 2]
    assert bare(again) == dataclasses.replace(bare(whole), reward=4.0, score=4.0)


async def test_what_a_tool_held_open_does_not_continue():
    states = States()
    states.run = run_of([CountedTool()], said=[call("look", key="a"), "done"], observer=states)
    await states.run.run()
    assert states.found[1].is_open
    with pytest.raises(ValueError, match="held something open"):
        await run_of([CountedTool()], state=states.found[1]).run()
