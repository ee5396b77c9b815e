"""Rewards from tools (`ToolRewardTransform`), simulated users and right answers."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Unbounded
from torchrl.envs.transforms import Transform

from torchrl_agentic.errors import check_reward
from torchrl_agentic.messages import as_number
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.tools.signatures import is_async
from torchrl_agentic.tools.verl.graders import same_number
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.dataset_rows import columns
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.token_rows import TokenRow, read_rows, write_rows

logger = logging.getLogger(__name__)

Place = Literal["turn", "end", "tokens"]
SO_FAR = (specs.KEY, "tool_return")
ON_TOKENS = ("ledger", "rewards")


class ToolRewardTransform(Transform):
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

    def __init__(self, *, place: Place = "turn", calls: float = 1.0, trajectories: float = 1.0) -> None:
        if place not in ("turn", "end", "tokens"):
            raise ValueError(f"place is 'turn', 'end' or 'tokens'; got {place!r}")
        super().__init__()
        self.place: Place = place
        self.calls, self.trajectories = calls, trajectories

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Write zeros."""
        if self.place == "end":
            tensordict_reset.set(SO_FAR, torch.zeros_like(tensordict_reset.get(specs.FINAL_REWARD)))
        if self.place == "tokens":
            ledgers = self._ledgers(tensordict_reset)
            zeros = [torch.zeros_like(row.tensors["mask"], dtype=torch.float32) for row in ledgers]
            self._write(tensordict_reset, ledgers, zeros)
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Close the rows that are done, and write the rewards."""
        if specs.FINAL_REWARD not in next_tensordict.keys(True):
            raise RuntimeError("ToolRewardTransform reads what ToolCompose writes: put it behind it")
        done = next_tensordict.get("done")
        for compose in beside(self, ToolCompose):
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        reward = _weighted(next_tensordict, tool_reward=self.calls, trajectory_reward=self.trajectories)
        if self.place == "tokens":
            next_tensordict = self._on_tokens(tensordict, next_tensordict, reward)
        if self.place == "end":
            so_far = tensordict.get(SO_FAR) + reward
            next_tensordict.set(SO_FAR, so_far)
            reward = torch.where(done, so_far, torch.zeros_like(so_far))
        return add_reward(next_tensordict, reward)

    def _on_tokens(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, reward: torch.Tensor
    ) -> TensorDictBase:
        ledgers, written = self._ledgers(next_tensordict), []
        rows = zip(self._ledgers(tensordict), ledgers, reward.reshape(-1), strict=True)
        for root, row, value in rows:
            rewards = torch.zeros_like(row.tensors["mask"], dtype=torch.float32)
            before = root.tensors[ON_TOKENS[1]]
            rewards[: len(before)] = before
            sampled = row.tensors["mask"][len(before) :].nonzero()
            if len(sampled):
                rewards[len(before) + int(sampled[-1])] = value
            written.append(rewards)
        return self._write(next_tensordict, ledgers, written)

    @staticmethod
    def _write(
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

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the reward."""
        return with_reward(reward_spec)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the entries that are carried from turn to turn."""
        shape, device = observation_spec.shape, observation_spec.device
        if self.place == "end":
            each = torch.Size((*shape, 1))
            observation_spec[SO_FAR] = Unbounded(shape=each, dtype=torch.float32, device=device)
        if self.place == "tokens":
            ragged = torch.Size((*shape, -1))
            observation_spec[ON_TOKENS] = Unbounded(shape=ragged, dtype=torch.float32, device=device)
        return observation_spec

    def __repr__(self) -> str:
        return f"ToolRewardTransform(place={self.place!r})"


def _weighted(tensordict: TensorDictBase, **weights: float) -> torch.Tensor:
    """Return the weighted sum of entries under "agentic", [*B, 1]; a weight of 0 leaves out NaN, too."""
    total = torch.zeros_like(tensordict.get("done"), dtype=torch.float32)
    for name, weight in weights.items():
        if weight:
            total = total + weight * tensordict.get((specs.KEY, name))
    return total


def add_reward(tensordict: TensorDictBase, reward: torch.Tensor) -> TensorDictBase:
    """Write a reward as [*B, 1, 1], or add it to the one that is there.

    A reward that is not finite is unknown: it becomes NaN, and its row gets ("agentic", "no_verdict"). So is
    that of a trajectory that could not begin, or whose user failed.

    Args:
        tensordict: The "next" of a step, [*B].
        reward: One number per row, [*B, 1].
    """
    is_known = reward.isfinite()
    for name in ("not_begun", "user_error"):
        if (failed := tensordict.get((specs.KEY, name), None)) is not None:
            is_known = is_known & ~failed
    if not is_known.all():
        reward = reward.masked_fill(~is_known, math.nan)
        specs.mark_no_verdict(tensordict, ~is_known)
    reward = reward.unsqueeze(-1)
    known = tensordict.get("reward", None)
    return tensordict.set("reward", reward if known is None else known.reshape(reward.shape) + reward)


def with_reward(reward_spec: Any) -> Any:
    """Add the reward to a spec, [*B, 1, 1], also if another transform declared [*B, 1]."""
    shape = torch.Size((*reward_spec.shape, 1, 1))
    if "reward" not in reward_spec.keys():
        reward_spec["reward"] = Unbounded(shape=shape, dtype=torch.float32, device=reward_spec.device)
    elif reward_spec["reward"].shape != shape:
        reward_spec["reward"] = reward_spec["reward"].reshape(shape)
    return reward_spec


class UserRewardTransform(Transform):
    """Write "reward", float32, [*B, 1, 1]: the scores of a simulated user. Put it behind `UserSimulator`.

    It adds to a "reward" that is there already. The reward is NaN where the user failed.

    Args:
        replies: Weight of `Reply.score`, at the turn of the reply. The default final score contains it
            already.
        trajectories: Weight of the final score (`Interaction.score`), at the end of the trajectory.
    """

    def __init__(self, *, replies: float = 0.0, trajectories: float = 1.0) -> None:
        super().__init__()
        self.replies, self.trajectories = replies, trajectories

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Write the rewards."""
        if next_tensordict.get((specs.KEY, "user_score"), None) is None:
            raise RuntimeError("UserRewardTransform reads what UserSimulator writes: put it behind it")
        reward = _weighted(next_tensordict, user_score=self.replies, user_final_score=self.trajectories)
        return add_reward(next_tensordict, reward)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the reward."""
        return with_reward(reward_spec)

    def __repr__(self) -> str:
        return f"UserRewardTransform(replies={self.replies}, trajectories={self.trajectories})"


COLUMNS: tuple[NestedKey, ...] = RIGHT_ANSWERS
"""Columns of the right answer in common data sets; the first that a row has counts."""


class AnswerRewardTransform(Transform):
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

    def __init__(
        self,
        is_right: Callable[[str, str], bool] = same_number,
        *,
        column: NestedKey | None = None,
        right: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        super().__init__()
        if is_async(is_right):
            raise TypeError("is_right is an ordinary function, which returns True or False; got an async one")
        check_reward("right", right)
        check_reward("wrong", wrong)
        self.is_right, self.right, self.wrong = is_right, right, wrong
        self._has_warned = False
        self.columns = COLUMNS if column is None else (column,)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Write the rewards of the rows that are done."""
        done = next_tensordict.get("done")
        rows = zip(
            border.prompts(next_tensordict), done.reshape(-1).tolist(), stepped(tensordict), strict=True
        )
        values = [
            self._reward_of(conversation, tensordict, row) if over and active else 0.0
            for row, (conversation, over, active) in enumerate(rows)
        ]
        reward = torch.tensor(values, dtype=torch.float32, device=done.device).reshape(done.shape)
        return add_reward(next_tensordict, reward)

    def _reward_of(self, conversation: border.Conversation, tensordict: TensorDictBase, row: int) -> float:
        """Return the reward of a row; NaN if it has no right answer, or `is_right` raises."""
        said = (message.read() for message in reversed(conversation.messages))
        answer = next((message.text for message in said if message.role == "assistant"), "")
        truth = self._truth(tensordict, row)
        if truth is None:
            return self._unknown(f"row {row} of the data set has no right answer in {self._names}")
        try:
            return self.reward_of(answer, truth)
        except Exception as error:
            return self._unknown(f"{self} raised for row {row}", error)

    def _unknown(self, reason: str, error: Exception | None = None) -> float:
        """Log once why an answer has no verdict, and return NaN."""
        if not self._has_warned:
            self._has_warned = True
            logger.error("%s: the reward is NaN, here and in further such rows", reason, exc_info=error)
        return math.nan

    def reward_of(self, answer: str, truth: str) -> float:
        """Return the reward of an answer.

        Args:
            answer: The last message of the model; its reasoning does not count.
            truth: The right answer.

        Raises:
            TypeError: If `is_right` returns neither True nor False.
        """
        found = as_number(self.is_right(answer.rpartition("</think>")[2], truth), "the result of is_right")
        if found not in (0.0, 1.0):
            raise TypeError(f"is_right returns True or False; got {found}")
        return self.right if found else self.wrong

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self.columns))

    def _truth(self, tensordict: TensorDictBase, row: int) -> str | None:
        """Return the right answer of a row, or None.

        Raises:
            ValueError: If the data set has no such column.
        """
        found = columns(tensordict, row, self.columns)
        if not found:
            raise ValueError(
                f"row {row} of the data set has none of the columns {self._names}; name that of the right "
                "answer with column="
            )
        return next((str(found[name]) for name in self.columns if found.get(name) is not None), None)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the reward."""
        return with_reward(reward_spec)

    def __repr__(self) -> str:
        return f"AnswerRewardTransform({getattr(self.is_right, '__name__', self.is_right)})"
