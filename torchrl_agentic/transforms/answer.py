"""AnswerRewardTransform: what the last message of a trajectory is worth, beside the data set's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from torchrl_agentic.tools.answers import same_number
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.columns import columns
from torchrl_agentic.transforms.reward import add_reward, with_reward
from torchrl_agentic.transforms.within import stepped

COLUMNS: tuple[NestedKey, ...] = (
    "ground_truth", ("reward_model", "ground_truth"), ("extra_info", "ground_truth"), "answer",
)  # fmt: skip
"""Where data sets keep the right answer; the first that a row has counts."""


class AnswerRewardTransform(Transform):
    r"""Write "reward", [*B, 1, 1] float32: at the end of a trajectory, whether its answer is right; else 0.

    The answer is the last message of the model, without its reasoning. Put it behind all that ends
    trajectories. What is in "reward" already stays, and is added to, so that it goes together with
    `ToolRewardTransform`.

    Args:
        is_right: answer, right answer → whether they are the same. `same_number`, for GSM8K, compares the
            last numbers, those behind "####" if there are any; `same_mathematics`, for Geometry3K, what is in
            \boxed{}; both are in `tools.answers`.
        column: of the data set, with the right answer; a tuple leads into another column. None: one of
            `COLUMNS`.
        right: what a right answer is worth.
        wrong: what any other one is.
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
        self.is_right, self.right, self.wrong = is_right, right, wrong
        self.columns = COLUMNS if column is None else (column,)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Judge the rows that are done."""
        done = next_tensordict.get("done")
        rows = zip(
            border.prompts(next_tensordict), done.reshape(-1).tolist(), stepped(tensordict), strict=True
        )
        values = [
            self._worth(conversation, self._truth(tensordict, row)) if over and active else 0.0
            for row, (conversation, over, active) in enumerate(rows)
        ]
        reward = torch.tensor(values, dtype=torch.float32, device=done.device).reshape(done.shape)
        return add_reward(next_tensordict, reward)

    def _worth(self, conversation: border.Conversation, truth: str) -> float:
        said = (border.read_message(message) for message in reversed(border.messages(conversation)))
        answer = next((message.text for message in said if message.role == "assistant"), "")
        return self.right if self.is_right(answer.rpartition("</think>")[2], truth) else self.wrong

    def _truth(self, tensordict: TensorDictBase, row: int) -> str:
        found = columns(tensordict, row, self.columns)
        known = [found[name] for name in self.columns if found.get(name) is not None]
        if not known:
            raise ValueError(
                f"row {row} of the data set has no right answer: it was looked for in "
                f"{', '.join(map(repr, self.columns))}; name its column with column="
            )
        return str(known[0])

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Say that there is a reward."""
        return with_reward(reward_spec)

    def __repr__(self) -> str:
        return f"AnswerRewardTransform({getattr(self.is_right, '__name__', self.is_right)})"
