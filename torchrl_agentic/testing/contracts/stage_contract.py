"""The contract of every transform with a stage."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from torch.utils.data import DataLoader
from torchrl.envs import Compose
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic.collectors.agent_collector import AgentCollector
from torchrl_agentic.engines.scripted_engine import ScriptedEngine
from torchrl_agentic.messages import Turn
from torchrl_agentic.records import Recording, TrajectoryHook
from torchrl_agentic.rollout.scripted import ScriptedPolicy
from torchrl_agentic.rollout.tiny_model import load_tiny
from torchrl_agentic.trajectory.columns import Column, folded
from torchrl_agentic.trajectory.episode import OpenTurn, Stage
from torchrl_agentic.transforms import EndTrajectory, ToolCompose, collate_rows
from torchrl_agentic.transforms import history as border


class StageContract:
    """Tests of a transform with a `Stage`: it does the same in an environment and in a collector.

    Attributes:
        scripts: Answers of the model in several trajectories. Let the stage act in some of them; its rewards
            must be finite. `EndTrajectory` ends a trajectory after the number of answers of the longest.
        row: Columns of the data set's row.
    """

    scripts: ClassVar[Sequence[Sequence[str]]]
    row: ClassVar[Mapping[str, Any]] = {"query": "Go on."}

    def make(self) -> Any:
        """Return a fresh transform to test."""
        raise NotImplementedError

    def tools(self) -> Sequence[Any]:
        """Return the tools that the answers call."""
        return ()

    def in_front(self) -> Sequence[Any]:
        """Return the transforms between `ToolCompose` and the one to test."""
        return ()

    def test_in_front_of_tool_compose_it_is_refused_with_the_order_that_works(self) -> None:
        order = f"Compose(ToolCompose(...), {self.make().stage.name}(...))"
        with pytest.raises(ValueError, match="stands in front") as in_environment:
            _in_environment(Compose(self.make(), ToolCompose(self.tools()), *self.in_front()), self, [["x"]])
        with pytest.raises(ValueError, match="stands in front") as in_collector:
            _in_collector(Compose(self.make(), ToolCompose(self.tools()), *self.in_front()), self, [["x"]])
        assert order in str(in_environment.value)
        assert order in str(in_collector.value)

    def test_both_borders_report_the_same(self) -> None:
        """Messages, columns, reasons, flags and rewards, of trajectories that run side by side."""
        seen, others = self._environment(), self._collector()
        assert [one.failure for one in others] == [""] * len(others)
        assert [_differences(one, other) for one, other in zip(seen, others, strict=True)] == [{}] * len(seen)

    def test_a_repeated_step_is_not_acted_on_again_and_writes_the_same(self) -> None:
        made, once = self.make(), self._environment()
        passed: list[OpenTurn] = []
        _before_each_run(made.stage, passed.extend)
        again = self._environment(made, n_steps=2)
        assert len(passed) == len(set(map(id, passed))) == sum(one.n_turns for one in again)
        assert [_differences(one, other) for one, other in zip(once, again, strict=True)] == [{}] * len(once)

    def test_trajectories_do_not_see_each_other(self) -> None:
        """They run side by side, and one after another in the same row."""
        alone = [self._environment(scripts=[script])[0] for script in self.scripts]
        hook = _Reasons()
        made = self.transforms(self.make(), hook)
        together = _in_environment(made, self, self.scripts, hook=hook, n_rounds=2)
        found = [_differences(one, other) for one, other in zip(alone * 2, together, strict=True)]
        assert found == [{}] * len(found)

    def test_its_error_ends_a_step_and_costs_a_collector_one_trajectory(self) -> None:
        error = ArithmeticError("a bug of the stage")

        def fail_once(turns: Sequence[OpenTurn]) -> None:
            if not failed:
                failed.append(turns)
                raise error

        failed: list[Any] = []
        made = self.make()
        _before_each_run(made.stage, fail_once)
        with pytest.raises(ArithmeticError, match="a bug of the stage"):
            self._environment(made)
        failed.clear()
        made = self.make()
        _before_each_run(made.stage, fail_once)
        scripts = [*self.scripts, *self.scripts]
        found = [one.failure for one in _in_collector(self.transforms(made), self, scripts)]
        assert sorted(found) == [*[""] * (len(scripts) - 1), "crash"]

    def test_stage_can_be_pickled_to_workers_before_and_after_use(self) -> None:
        made, seen = self.make(), self._environment()
        for _ in range(2):
            copy = pickle.loads(pickle.dumps(made))
            found = [_differences(*pair) for pair in zip(seen, self._environment(copy), strict=True)]
            assert found == [{}] * len(seen)
            self._environment(made)

    def test_a_clone_has_no_state_of_the_original(self) -> None:
        """As environments make them of their transforms."""
        made = self.make()
        seen = self._environment(made)
        found = [_differences(*pair) for pair in zip(seen, self._environment(made.clone()), strict=True)]
        assert found == [{}] * len(seen)

    def transforms(self, made: Any, hook: TrajectoryHook | None = None) -> Compose:
        """Return the transforms of an environment or of a collector.

        Args:
            made: The transform to test.
            hook: Receives the records.
        """
        end = EndTrajectory(max_turns=max(map(len, self.scripts)))
        return Compose(ToolCompose(self.tools(), recorder=hook), *self.in_front(), made, end)

    def _environment(
        self, made: Any = None, *, scripts: Sequence[Sequence[str]] | None = None, n_steps: int = 1
    ) -> list[_Seen]:
        hook = _Reasons()
        transforms = self.transforms(self.make() if made is None else made, hook)
        return _in_environment(transforms, self, scripts or self.scripts, hook=hook, n_steps=n_steps)

    def _collector(self) -> list[_Seen]:
        return _in_collector(self.transforms(self.make()), self, self.scripts)


@dataclass
class _Seen:
    """Report of a border on a trajectory."""

    messages: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    reward: float = 0.0
    n_turns: int = 0
    failure: str = ""


def _differences(one: _Seen, other: _Seen) -> dict[str, tuple[Any, Any]]:
    mine = {**vars(one), **one.columns}
    theirs = {**vars(other), **other.columns}
    del mine["columns"], theirs["columns"]
    return {
        name: (mine.get(name), theirs.get(name))
        for name in {*mine, *theirs}
        if not _is_alike(mine.get(name), theirs.get(name))
    }


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # float32 or not
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    return type(one) is type(other) and one == other


def _before_each_run(stage: Stage, act: Any) -> None:
    """Call a function with the turns before each run of a stage."""
    run = stage.run

    def wrapped(turns: Sequence[OpenTurn]) -> Any:
        act(turns)
        return run(turns)

    object.__setattr__(stage, "run", wrapped)


class _Reasons(TrajectoryHook):
    """Records the reasons of ended trajectories by row, in order."""

    def __init__(self) -> None:
        self.by_row: dict[int, list[str]] = {}

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        return _Reason(self.by_row.setdefault(row, []))


class _Reason(Recording):
    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons

    def record_turn(self, turn: Turn) -> None:
        del turn

    def finish(self, reason: str) -> None:
        self._reasons.append(reason)


def _columns(transforms: Compose) -> list[Column]:
    """Return the columns of the transforms after `ToolCompose`."""
    items: list[Any] = [item for item in transforms.transforms if not isinstance(item, ToolCompose)]
    return [column for item in items for column in item.stage.columns]


def _in_environment(
    transforms: Compose,
    contract: StageContract,
    scripts: Sequence[Sequence[str]],
    *,
    hook: _Reasons | None = None,
    n_steps: int = 1,
    n_rounds: int = 1,
) -> list[_Seen]:
    """Return what an environment reports of each row, round by round; each step is made `n_steps` times."""
    rows, columns = [dict(contract.row) for _ in scripts], _columns(transforms)
    data: Any = rows * n_rounds
    loader = DataLoader(data, collate_fn=collate_rows, batch_size=len(rows))
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(len(rows),))
    env.append_transform(transforms)
    longest = max(map(len, contract.scripts))
    policy = ScriptedPolicy([[*some, *[some[-1]] * longest] for some in scripts])
    found: list[_Seen] = []
    try:
        for _ in range(n_rounds):
            seen = [_Seen() for _ in rows]
            td = env.reset()
            while not td["done"].all():
                was_done, said = td["done"].reshape(-1).tolist(), policy(td)
                stepped = [env.step(said.clone()) for _ in range(n_steps)][-1]
                chats = border.prompts(stepped["next"])
                for index, leaf in enumerate(border.leaves(stepped)[1]):
                    if not was_done[index]:
                        _add_step(seen[index], leaf["next"], chats[index], columns)
                td = env.step_mdp(stepped)
            found += seen
    finally:
        env.close()
    if hook is not None:
        for index, one in enumerate(found):
            number, row = divmod(index, len(rows))
            one.reason = hook.by_row[row][number]
    return found


def _add_step(seen: _Seen, step: Any, chat: border.Conversation, columns: Sequence[Column]) -> None:
    seen.n_turns += 1
    seen.messages = [(message.role, message.text) for message in (one.read() for one in chat.messages)]
    seen.terminated, seen.truncated = bool(step["terminated"]), bool(step["truncated"])
    reward = step.get("reward", None)
    seen.reward += 0.0 if reward is None else float(reward)
    for column in columns:
        value = step.get(("agentic", column.name))
        new = value.tolist() if column.kind is list else value.item()
        known = seen.columns
        known[column.name] = folded(column, known[column.name], new) if column.name in known else new


def _in_collector(
    transforms: Compose, contract: StageContract, scripts: Sequence[Sequence[str]]
) -> list[_Seen]:
    """Return what a collector reports of each task."""
    columns = _columns(transforms)
    tasks = [{"name": str(index), **contract.row} for index in range(len(scripts))]

    def answer(key: str, turn: int, ids: Sequence[int]) -> str:
        script = scripts[int(key.partition("/")[0])]
        return script[min(turn, len(script) - 1)]

    _, tokenizer = load_tiny()
    failures: list[Any] = []
    collector = AgentCollector(
        transforms,
        engine=ScriptedEngine(answer, tokenizer),
        tokenizer=tokenizer,
        tasks=tasks,
        max_new_tokens=100_000,
        max_turns=1 + max(map(len, contract.scripts)),
        on_failure="drop",
        failure_hook=failures.append,
    )
    found: dict[str, _Seen] = {}
    with collector:
        for one in (trajectory for group in collector.trajectories() for trajectory in group):
            found[one.task.name] = _Seen(
                [(message.role, message.text) for message in one.messages],
                {column.name: one.columns[column.name] for column in columns},
                one.reason,
                one.terminated,
                one.truncated,
                one.reward,
                len(one.turns),
            )
    for failure in failures:
        found[failure.task.name] = _Seen(failure=failure.kind)
    return [found[task["name"]] for task in tasks]
