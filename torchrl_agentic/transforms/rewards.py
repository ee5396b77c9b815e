"""Rewards from tools (`ToolRewardTransform`), simulated users and right answers."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Unbounded

from torchrl_agentic.errors import check_reward
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.tools.signatures import is_async
from torchrl_agentic.tools.verl.graders import same_number
from torchrl_agentic.trajectory.episode import OpenTurn
from torchrl_agentic.trajectory.reward_stages import (
    AnswerRewardStage,
    Place,
    ToolRewardStage,
    UserRewardStage,
)
from torchrl_agentic.transforms.token_rows import TokenRow, read_rows, write_rows
from torchrl_agentic.transforms.turn_transform import TurnTransform

ON_TOKENS = ("ledger", "rewards")


class ToolRewardTransform(TurnTransform):
    """Write "reward", float32, [*B, 1, 1]: the rewards of calls, and at the end the final rewards of tools.

    The shape is that of TorchRL's rewards for language models, which `MCAdvantage` and `GRPOLoss` expect. Put
    the transform behind `ToolCompose` and behind all that ends trajectories: at `done` it closes the
    sessions, and tools return their final rewards. It adds to a "reward" that is there already. A final
    reward without a verdict, and a reward of a call that is not finite, make it NaN, and ("agentic",
    "no_verdict") true.

    Args:
        place: "turn": each turn has its own reward. "end": the last turn has the sum of all, the others 0.
            "tokens": as "turn", and ("ledger", "rewards"), float32, as long as ("tokens", "prompt"), has the
            reward at the last token that was sampled in the turn and 0 elsewhere; behind `TurnTokenizer`
            only.
        calls: Weight of the rewards of calls.
        trajectories: Weight of the final rewards.

    Raises:
        ValueError: If `place` is another text.
    """

    stage: ToolRewardStage
    reads_messages = False

    def __init__(self, *, place: Place = "turn", calls: float = 1.0, trajectories: float = 1.0) -> None:
        if place not in ("turn", "end", "tokens"):
            raise ValueError(f"place is 'turn', 'end' or 'tokens'; got {place!r}")
        super().__init__(ToolRewardStage(place=place, calls=calls, trajectories=trajectories))

    @property
    def place(self) -> Place:
        """Where the rewards are written."""
        return self.stage.place

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Write zeros."""
        if self.place == "tokens":
            ledgers = self._ledgers(tensordict_reset)
            zeros = [torch.zeros_like(row.tensors["mask"], dtype=torch.float32) for row in ledgers]
            self._write_ledgers(tensordict_reset, ledgers, zeros)
        return super()._reset(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Close the rows that are done, and write the rewards."""
        next_tensordict = super()._step(tensordict, next_tensordict)
        return self._on_tokens(tensordict, next_tensordict) if self.place == "tokens" else next_tensordict

    def _on_tokens(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward of each turn at the last token that was sampled in it."""
        turns = self.rows.open_turns(tensordict, next_tensordict, self.stage.name)
        given = {turn.episode.row: turn.effects[self.stage].reward for turn in turns}
        ledgers, written = self._ledgers(next_tensordict), list[torch.Tensor]()
        for place, (root, row) in enumerate(zip(self._ledgers(tensordict), ledgers, strict=True)):
            rewards = torch.zeros_like(row.tensors["mask"], dtype=torch.float32)
            before = root.tensors[ON_TOKENS[1]]
            rewards[: len(before)] = before
            sampled = row.tensors["mask"][len(before) :].nonzero()
            if len(sampled):
                rewards[len(before) + int(sampled[-1])] = given.get(place, 0.0)
            written.append(rewards)
        return self._write_ledgers(next_tensordict, ledgers, written)

    @staticmethod
    def _write_ledgers(
        td: TensorDictBase, ledgers: Sequence[TokenRow], rewards: Sequence[torch.Tensor]
    ) -> TensorDictBase:
        rows = zip(ledgers, rewards, strict=True)
        write_rows(td, "ledger", [row.merged(TokenRow({ON_TOKENS[1]: new})) for row, new in rows])
        return td

    @staticmethod
    def _ledgers(td: TensorDictBase) -> list[TokenRow]:
        ledgers = read_rows(td, "ledger")
        if ledgers is None or any("mask" not in row.tensors for row in ledgers):
            raise RuntimeError('place="tokens" needs a TurnTokenizer before this transform')
        return ledgers

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the entries that are carried from turn to turn."""
        observation_spec = super().transform_observation_spec(observation_spec)
        if self.place == "tokens":
            shape, device = observation_spec.shape, observation_spec.device
            ragged = torch.Size((*shape, -1))
            observation_spec[ON_TOKENS] = Unbounded(shape=ragged, dtype=torch.float32, device=device)
        return observation_spec

    def __repr__(self) -> str:
        return f"ToolRewardTransform(place={self.place!r})"


class UserRewardTransform(TurnTransform):
    """Write "reward", float32, [*B, 1, 1]: the scores of a simulated user. Put it behind `UserSimulator`.

    It adds to a "reward" that is there already. The reward is NaN where the user failed.

    Args:
        replies: Weight of `Reply.score`, at the turn of the reply. The default final score contains it
            already.
        trajectories: Weight of the final score (`Interaction.score`), at the end of the trajectory.
    """

    stage: UserRewardStage
    reads_messages = False

    def __init__(self, *, replies: float = 0.0, trajectories: float = 1.0) -> None:
        super().__init__(UserRewardStage(replies=replies, trajectories=trajectories))

    def __repr__(self) -> str:
        return f"UserRewardTransform(replies={self.stage.replies}, trajectories={self.stage.trajectories})"


COLUMNS: tuple[NestedKey, ...] = RIGHT_ANSWERS
"""Columns of the right answer in common data sets; the first that a row has counts."""


class AnswerRewardTransform(TurnTransform):
    r"""Write "reward", float32, [*B, 1, 1]: at the end of a trajectory, whether its answer is right; else 0.

    The answer is the last message of the model, without its reasoning. Put the transform behind all that ends
    trajectories. It adds to a "reward" that is there already, so it combines with `ToolRewardTransform`. If a
    row has no right answer, or `is_right` raises, its reward is NaN and ("agentic", "no_verdict") true.

    Args:
        is_right: Function of (answer, right answer) that returns True if they agree. `same_number`, for
            GSM8K, compares the last numbers, those behind "####" if there are any; `same_mathematics`, for
            Geometry3K, compares the contents of \boxed{}; both are in `tools.verl.graders`.
        column: Column of the data set with the right answer; a tuple leads into another column. None: the
            first of `COLUMNS` that exists.
        right: Reward of a right answer.
        wrong: Reward of any other answer.

    Raises:
        TypeError: If `is_right` is a coroutine function.
        ValueError: If a reward is not finite in float32.
    """

    stage: AnswerRewardStage

    def __init__(
        self,
        is_right: Callable[[str, str], bool] = same_number,
        *,
        column: NestedKey | None = None,
        right: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        if is_async(is_right):
            raise TypeError("is_right is an ordinary function, which returns True or False; got an async one")
        check_reward("right", right)
        check_reward("wrong", wrong)
        sources = COLUMNS if column is None else (column,)
        super().__init__(AnswerRewardStage(is_right, sources, right=right, wrong=wrong))

    def _act(self, turns: Sequence[OpenTurn]) -> None:
        """Add the rewards.

        Raises:
            ValueError: If the data set has no column with a right answer.
        """
        sources = self.stage.sources
        for turn in turns:
            if turn.is_over and not turn.lookup(sources):
                raise ValueError(
                    f"row {turn.episode.row} of the data set has none of the columns "
                    f"{', '.join(map(repr, sources))}; name that of the right answer with column="
                )
        super()._act(turns)

    def __repr__(self) -> str:
        return f"AnswerRewardTransform({getattr(self.stage.is_right, '__name__', self.stage.is_right)})"
