"""`UserSimulator`: a simulated user that answers the messages of the model that call no tool."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_agentic.dispatch import Dispatcher, SessionRows
from torchrl_agentic.interactions.user_tool import UserTool, tool_name
from torchrl_agentic.limits import Limiter
from torchrl_agentic.trajectory.columns import COLUMNS
from torchrl_agentic.trajectory.episode import Episode, OpenTurn
from torchrl_agentic.trajectory.user_side import UserSide, chosen, named
from torchrl_agentic.trajectory.users import UserStage
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.dataset_rows import columns
from torchrl_agentic.transforms.pipeline import KnowsResetRows
from torchrl_agentic.transforms.turn_transform import TurnTransform

logger = logging.getLogger(__name__)


class UserSimulator(KnowsResetRows, TurnTransform):
    """Lets a simulated user answer each message of the model that calls no tool.

    Put it behind `ToolCompose` and `EndTrajectory(max_turns=...)`, and in front of `TurnTokenizer`. The user
    is asked if the last message is the model's, calls no tool, and the row is not done. The users of all rows
    are asked concurrently. A reply becomes a message in ("history", "prompt"), with control tokens escaped. A
    user that ends the conversation sets `done` and `terminated` of its row. A user that fails or takes too
    long costs its own row only: the row is truncated with the reason "user_failed", flagged and logged.

    Writes under "agentic", on reset too, with shape [*B, 1]: `user_turn`, int64, the number of replies;
    `user_score`, float32, the score of this reply, or 0; `user_final_score`, float32, of the whole trajectory
    at its end, NaN if the user failed; `user_error`, bool, whether the reply or the final score failed.
    Trajectories that a transform behind this one ends get no final score. `UserRewardTransform` makes the
    scores a reward.

    Args:
        interactions: An interaction, or several by name or in a list; see `as_interaction` and
            `load_interactions`. If there are several, each row names its own.
        max_turns: Number of replies; the message that would be answered next truncates the row. None: no
            limit.
        role: Role of the user's messages.
        per_reply_timeout: Seconds that a reply may take, opening the session included, or None for no limit.
        rate_limits: Limiters by the names of interactions.
        max_threads: Number of blocking interactions that run at once.
        column: Column of the data set with {"name": "…", …}, the name of the interaction and the arguments of
            its session. It is looked for in "extra_info" too.

    Raises:
        TypeError: If an item is not an interaction.
        ValueError: If there is no interaction, two have one name, a limit names an unknown one, or a bound is
            below 1 or not above 0 seconds.
    """

    stage: UserStage

    def __init__(
        self,
        interactions: Any,
        *,
        max_turns: int | None = None,
        role: str = "user",
        per_reply_timeout: float | None = 60.0,
        rate_limits: Mapping[str, Limiter] | None = None,
        max_threads: int = 64,
        column: str = "interaction_kwargs",
    ) -> None:
        border.require_list_to_stack()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, or None for no limit; got {max_turns}")
        if per_reply_timeout is not None and not per_reply_timeout > 0:
            raise ValueError(
                f"per_reply_timeout must be above 0 seconds, or None for no limit; got {per_reply_timeout}"
            )
        users = named(interactions)
        super().__init__(UserStage(users, max_turns=max_turns, role=role, column=column))
        limits = dict(rate_limits or {})
        if unknown := [name for name in limits if name not in users]:
            raise ValueError(
                f"rate_limits names {unknown[0]!r}, but no interaction has this name; known: "
                f"{', '.join(users)}"
            )
        options = {
            "per_call_timeout": per_reply_timeout,
            "rate_limits": {tool_name(name): limit for name, limit in limits.items()},
            "max_threads": max_threads,
            "validate_inputs": False,
        }
        tools = [UserTool(item, tool_name(name)) for name, item in users.items()]
        self._users: SessionRows[None] = SessionRows(tools, options, _nothing)

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher with these interactions, limiters and threads, and sessions of its own."""
        return self._users.dispatcher.fork()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for turn in self.rows.open_turns(tensordict, next_tensordict, self.stage.name):
            if turn.episode.user is None and turn.has_begun:
                # Columns that are passed to `reset` reach transforms only at the first step.
                self._begin(turn.episode, tensordict)
        return super()._step(tensordict, next_tensordict)

    def _write(self, next_tensordict: TensorDictBase, turns: Sequence[OpenTurn]) -> None:
        """Write replies and scores, and that a row cannot begin if its first step has said so."""
        super()._write(next_tensordict, turns)
        if not all(turn.has_begun for turn in turns):
            specs.write_columns(next_tensordict, [COLUMNS["not_begun"]], self.rows.episodes, turns)

    def _begin(self, episode: Episode, tensordict: TensorDictBase) -> None:
        """Begin the user's side of a trajectory; one that names an unknown user cannot begin."""
        where, value = f"{self.stage.column!r} of row {episode.row}", self._wanted(tensordict, episode.row)
        try:
            name, kwargs = chosen(self.stage.interactions, where, value)
        except ValueError as error:
            logger.error("%s cannot begin: %s", episode.name, error)
            episode.session.begin_error = episode.session.begin_error or error
            return
        episode.user = UserSide(self._users.dispatcher, episode.session, name, kwargs)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new conversations in the rows of the mask; the others continue."""
        size = tensordict_reset.batch_size.numel()
        for row, is_new in enumerate(self.rows_of_reset(tensordict, size)):
            if is_new and self._wanted(tensordict_reset, row) is not None:
                self._begin(self.rows.episode(row), tensordict_reset)
        return super()._reset(tensordict, tensordict_reset)

    def _wanted(self, tensordict: TensorDictBase, row: int) -> Any:
        return self.stage.wanted(partial(columns, tensordict, row))

    def close(self) -> None:
        """End all conversations and tear the interactions down.

        May be called again; a later step sets them up again.
        """
        self._users.close()

    def clone(self) -> Self:
        """Return a transform with the same interactions, limiters and threads, and without conversations."""
        clone = self.__class__.__new__(self.__class__)
        Transform.__init__(clone)
        clone.stage = self.stage
        clone._users = self._users.clone()
        return clone

    def __repr__(self) -> str:
        return f"UserSimulator([{', '.join(self.stage.interactions)}], max_turns={self.stage.max_turns})"


def _nothing() -> None:
    return None
