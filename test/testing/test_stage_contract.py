"""The contract of stages finds the mistakes that a transform with a stage can make."""

import contextlib
import inspect
import pickle
from collections import Counter

import pytest
import torch
from helpers.chat_envs import call

from torchrl_agentic import Column, Stage, TurnTransform, tool
from torchrl_agentic.testing import StageContract
from torchrl_agentic.transforms import history as border


@tool
def work() -> str:
    """Work."""
    return "done"


class _Right(Stage):
    """Counts calls, adds a message, gives a reward, and ends a trajectory with its third call."""

    gives_rewards = True

    @property
    def columns(self):
        return (
            Column("n_all_calls", int, "last", of_episode=self.count),
            Column("share", float, "sum", lambda turn: 0.1 * len(turn.calls)),
            Column("texts", list, "join", lambda turn: [turn.message.text]),
        )

    def count(self, episode):
        return episode.state.get(self, Counter())["calls"]

    def run(self, turns):
        for turn in turns:
            turn.episode.state.setdefault(self, Counter())["calls"] += len(turn.calls)
            count = self.count(turn.episode)
            if turn.calls:
                turn.add([{"role": "user", "content": f"{count} calls"}])
            turn.give(0.25 * count)
            if count > 2:
                turn.end("many_calls", truncated=True)


class _Waits(_Right):
    async def run(self, turns):
        super().run(turns)


class _StateOfAll(_Right):
    """Has one count for all trajectories."""

    def __init__(self):
        self.counted = Counter()

    def count(self, episode):
        return self.counted["calls"]

    def run(self, turns):
        for turn in turns:
            turn.episode.state.setdefault(self, self.counted)
        super().run(turns)


class _StateByRow(_Right):
    """Keeps state by row, where the next trajectory finds it."""

    def __init__(self):
        self.counted = {}

    def run(self, turns):
        for turn in turns:
            turn.episode.state[self] = self.counted.setdefault(turn.episode.row, Counter())
        super().run(turns)


class _TellsNobodyOfItsRewards(_Right):
    gives_rewards = False


class _AppendsByItself(_Right):
    def run(self, turns):
        for turn in turns:
            turn.injected.append(turn.answer)
        super().run(turns)


class _SetsTheFlag(_Right):
    """Ends a trajectory without saying so."""

    def run(self, turns):
        for turn in turns:
            if turn.calls:
                turn.episode.terminated = turn.is_over = True


class _ReadsTheRow(_Right):
    """Acts on the place in the batch, which is 0 for each group of a collector."""

    def run(self, turns):
        for turn in turns:
            turn.add([{"role": "user", "content": f"row {turn.episode.row}"}])


class _Unpicklable(_Right):
    def __init__(self):
        self.is_call = lambda turn: bool(turn.calls)


class _InFront(_Right):
    opens_turns = True


class _ActsAgain(TurnTransform):
    def _act(self, turns):
        for turn in turns:
            turn.effects.pop(self.stage, None)
        super()._act(turns)


class _Swallows(TurnTransform):
    def _act(self, turns):
        with contextlib.suppress(ArithmeticError):
            super()._act(turns)


class _WritesByItself(TurnTransform):
    """Adds a message in an environment only."""

    def _step(self, tensordict, next_tensordict):
        super()._step(tensordict, next_tensordict)
        hint = {"role": "user", "content": "hint"}
        rows = [row.extended([hint]) for row in border.prompts(next_tensordict)]
        border.set_prompts(next_tensordict, rows)
        return next_tensordict


class _EndsByItself(TurnTransform):
    def _step(self, tensordict, next_tensordict):
        super()._step(tensordict, next_tensordict)
        done = torch.ones_like(next_tensordict["done"])
        return next_tensordict.set("done", done).set("terminated", done)


class Contract(StageContract):
    scripts = ([call("work"), call("work"), call("work") * 2, "never"], ["a", call("work") * 2], ["b"])

    def tools(self):
        return [work]


class TestRight(Contract):
    def make(self):
        return TurnTransform(_Right())


class TestWaits(Contract):
    def make(self):
        return TurnTransform(_Waits())


BROKEN = {
    "both_borders": [
        _TellsNobodyOfItsRewards, _AppendsByItself, _SetsTheFlag, _ReadsTheRow, _WritesByItself,
        _EndsByItself,
    ],
    "repeated_step": [_ActsAgain],
    "see_each_other": [_StateOfAll, _StateByRow],
    "its_error": [_Swallows],
    "pickled": [_Unpicklable],
    "clone": [_StateOfAll, _StateByRow],
    "in_front_of": [_InFront],
}  # fmt: skip


def test_each_test_of_the_contract_has_a_stage_that_fails_it():
    tests = [name for name, _ in inspect.getmembers(StageContract) if name.startswith("test_")]
    assert all(sum(part in name for part in BROKEN) == 1 for name in tests)
    assert len(tests) == len(BROKEN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "kind"),
    [(part, kind) for part, kinds in BROKEN.items() for kind in kinds],
    ids=lambda one: one if isinstance(one, str) else one.__name__.strip("_"),
)
def test_a_wrong_stage_is_found(part, kind):
    class Found(Contract):
        def make(self):
            return kind(_Right()) if issubclass(kind, TurnTransform) else TurnTransform(kind())

    (name,) = (name for name, _ in inspect.getmembers(StageContract) if part in name)
    errors = (
        AssertionError,
        pytest.fail.Exception,
        pickle.PicklingError,
        AttributeError,
        RuntimeError,
        KeyError,
    )
    with pytest.raises(errors):
        getattr(Found(), name)()
