"""`TurnTransform`: the TensorDict border of a stage: read the rows, run the stage, write the columns."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Transform

from torchrl_agentic.trajectory.episode import OpenTurn, Stage
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.episode_rows import append_messages, run_stage
from torchrl_agentic.transforms.pipeline import within

if TYPE_CHECKING:
    from torchrl_agentic.transforms.compose import ToolCompose
    from torchrl_agentic.transforms.episode_rows import EpisodeRows


class TurnTransform(Transform):
    """A transform whose rule is a stage, which an environment and an `AgentCollector` apply alike.

    Put it behind `ToolCompose`. In an environment it acts on all rows of a step at once: it reads messages
    and flags of the rows, runs the stage, and writes what the stage did: messages, "done", "terminated",
    "truncated" and the reason, "reward", and its columns under "agentic". A collector runs the same stage.

    Args:
        stage: The rule.

    Attributes:
        reads_messages: Whether the stage reads or adds messages; reading them takes time.
    """

    reads_messages: ClassVar[bool] = True

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    @property
    def compose(self) -> ToolCompose:
        """The `ToolCompose` of the environment.

        Raises:
            RuntimeError: If the environment has no `ToolCompose`.
        """
        from torchrl_agentic.transforms.compose import ToolCompose

        env: Any = self.container
        while env is not None:  # one that another environment contains may have it
            found = next(within(getattr(env, "transform", None), ToolCompose), None)
            if found is not None:
                return found
            env = env.base_env if isinstance(env, TransformedEnv) else None
        raise RuntimeError(
            f"{self.stage.name} reads what ToolCompose writes: put it behind one, if need be ToolCompose([])"
        )

    @property
    def rows(self) -> EpisodeRows:
        """The trajectories of the rows."""
        return self.compose.rows

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        turns = self.rows.open_turns(tensordict, next_tensordict, self.stage.name)
        rows = border.prompts(next_tensordict) if self.reads_messages else []
        see(turns, next_tensordict, rows)
        self._act(turns)
        if rows and append_messages(rows, turns, self.stage):
            border.set_prompts(next_tensordict, rows)
        self._write(next_tensordict, turns)
        self.rows.settle(turns, next_tensordict)
        return next_tensordict

    def _act(self, turns: Sequence[OpenTurn]) -> None:
        """Run the stage for the turns that it has not seen."""
        run_stage(self.stage, turns)

    def _write(self, next_tensordict: TensorDictBase, turns: Sequence[OpenTurn]) -> None:
        """Write columns, ends and rewards."""
        if self.stage.columns:
            specs.write_columns(next_tensordict, self.stage.columns, self.rows.episodes, turns)
        specs.write_ends(next_tensordict, turns, self.stage)
        if self.stage.gives_rewards:
            specs.write_rewards(next_tensordict, turns, self.stage)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if self.stage.columns:
            specs.write_columns(tensordict_reset, self.stage.columns, self.rows.episodes)
        return specs.with_truncated(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the columns of the stage."""
        if self.stage.columns:
            if specs.KEY not in observation_spec.keys():
                shape, device = observation_spec.shape, observation_spec.device
                observation_spec[specs.KEY] = Composite(shape=shape, device=device)
            told = observation_spec[specs.KEY]
            for name, spec in specs.column_specs(self.stage.columns, told.shape, told.device).items():
                told[name] = spec
        return observation_spec

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return specs.spec_with_truncated(done_spec)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the reward, if the stage gives one."""
        return specs.with_reward(reward_spec) if self.stage.gives_rewards else reward_spec


def see(
    turns: Sequence[OpenTurn], next_tensordict: TensorDictBase, rows: Sequence[border.Conversation] = ()
) -> None:
    """Set in open turns what other transforms may have changed.

    Args:
        turns: The turns.
        next_tensordict: The "next" of a step, [*B].
        rows: Conversations of all rows; empty if the stage reads none.
    """
    done = next_tensordict.get("done").reshape(-1).tolist()
    for turn in turns:
        row = turn.episode.row
        turn.is_over = done[row]
        if rows:
            turn.injected = list(rows[row].messages[len(turn.earlier) + 1 :])
