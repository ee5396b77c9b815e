"""`UserSimulator`: a simulated user that answers the messages of the model that call no tool."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs.transforms import Transform

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.interactions.user_tool import tool_name
from torchrl_agentic.limits import Limiter
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.end_trajectory import EndTrajectory
from torchrl_agentic.transforms.pipeline import beside, leaves, reset_rows, stepped
from torchrl_agentic.transforms.specs import mark_ended, spec_with_truncated, with_truncated
from torchrl_agentic.transforms.turn_tokenizer import TurnTokenizer
from torchrl_agentic.transforms.user_sessions import UserSessions, UserTurn, choice, named, said

ORDER = "Compose(ToolCompose(...), EndTrajectory(max_turns=...), UserSimulator(...), TurnTokenizer(...))"


def check_order(user: object, transform: object) -> None:
    """Check the order of an environment's transforms.

    Args:
        user: The user simulator.
        transform: The transform of the environment.

    Raises:
        ValueError: If another transform ends what the user would answer, or does not see its messages.
    """
    seen: list[object] = []
    for item in leaves(transform):
        if isinstance(item, EndTrajectory) and item.when_no_calls:
            raise ValueError(
                "EndTrajectory(when_no_calls=True) ends trajectories that UserSimulator continues: remove "
                "when_no_calls, and let the user or max_turns end them"
            )
        seen.append(item)
    behind = seen[seen.index(user) :] if user in seen else seen
    if any(isinstance(item, ToolCompose) for item in behind):
        raise ValueError(f"UserSimulator reads what ToolCompose writes: {ORDER}")
    if user in seen and any(isinstance(item, TurnTokenizer) for item in seen[: seen.index(user)]):
        raise ValueError(f"TurnTokenizer must see what UserSimulator writes: {ORDER}")


_DTYPES = {
    "user_turn": torch.int64,
    "user_score": torch.float32,
    "user_final_score": torch.float32,
    "user_error": torch.bool,
}


class UserSimulator(Transform):
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
        super().__init__()
        border.require_list_to_stack()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, or None for no limit; got {max_turns}")
        if per_reply_timeout is not None and not per_reply_timeout > 0:
            raise ValueError(
                f"per_reply_timeout must be above 0 seconds, or None for no limit; got {per_reply_timeout}"
            )
        self.interactions = named(interactions)
        limits = dict(rate_limits or {})
        if unknown := [name for name in limits if name not in self.interactions]:
            known = ", ".join(self.interactions)
            raise ValueError(
                f"rate_limits names {unknown[0]!r}, but no interaction has this name; known: {known}"
            )
        self.max_turns = max_turns
        self.role = role
        self.column = column
        options = {
            "per_call_timeout": per_reply_timeout,
            "rate_limits": {tool_name(name): limit for name, limit in limits.items()},
            "max_threads": max_threads,
            "validate_inputs": False,
        }
        self._users = UserSessions(self.interactions, role, options)
        self._mask: torch.Tensor | None = None

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher with these interactions, limiters and threads, and sessions of its own."""
        return self._users.new_dispatcher()

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        called = next_tensordict.get((specs.KEY, "any_tool_calls"), None)
        if called is None:
            raise RuntimeError(f"UserSimulator reads what ToolCompose writes: {ORDER}")
        rows = border.prompts(next_tensordict)
        escape = next(beside(self, ToolCompose)).parser.control_escaper.escape
        turns = self._turns(tensordict, next_tensordict, rows, called.reshape(-1).tolist())
        self._users.converse(turns)
        for turn in turns:
            if turn.reply is not None and (turn.reply.text or not turn.reply.is_over):
                message = {"role": self.role, "content": escape(turn.reply.text)}
                rows[turn.row] = rows[turn.row].extended([message])
        border.set_prompts(next_tensordict, rows)
        return self._report(next_tensordict, turns)

    def _turns(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        rows: Sequence[border.Conversation],
        called: Sequence[bool],
    ) -> list[UserTurn]:
        """Decide for each active row whether its user replies, and whether it is done."""
        done = next_tensordict.get("done").reshape(-1).tolist()
        unbegun = next_tensordict.get((specs.KEY, "not_begun")).reshape(-1).tolist()
        active = stepped(tensordict)
        spoken = self._users.turns
        compose = next(beside(self, ToolCompose))
        turns: list[UserTurn] = []
        for row, conversation in enumerate(rows):
            if not active[row]:
                continue
            if row not in self._users:  # columns passed to `reset` reach transforms only at the first step
                self._begin(row, said(tensordict, row, self.column))
            if unbegun[row] or not self._users.continue_row(row, compose.session(row)):
                continue
            is_answer = not (done[row] or called[row]) and _is_from_model(conversation)
            is_last = is_answer and self.max_turns is not None and spoken.get(row, 0) >= self.max_turns
            is_asked, is_done = is_answer and not is_last, done[row] or is_last
            read = conversation.messages if is_asked or is_done else ()
            turns.append(UserTurn(row, tuple(message.read() for message in read), is_asked, is_done))
        return turns

    def _report(self, next_tensordict: TensorDictBase, turns: Sequence[UserTurn]) -> TensorDictBase:
        """Write scores, flags and reasons, and end the rows that are over."""
        done = next_tensordict.get("done")
        had_ended = done.reshape(-1).tolist()
        values = _zeros(done.numel())
        for row, count in self._users.turns.items():
            values["user_turn"][row] = count
        ends = {reason: [False] * done.numel() for reason in ("user", "user_failed", "max_turns")}
        for turn in turns:
            values["user_score"][turn.row] = (turn.reply.score if turn.reply else None) or 0.0
            values["user_final_score"][turn.row] = turn.final
            values["user_error"][turn.row] = turn.has_failed
            if turn.is_done and not had_ended[turn.row]:
                reason = "user" if turn.is_left else "user_failed" if turn.has_failed else "max_turns"
                ends[reason][turn.row] = True
        _write(next_tensordict, values)
        for reason, flags in ends.items():
            added = torch.tensor(flags, device=done.device).reshape(done.shape)
            key = "terminated" if reason == "user" else "truncated"
            known = next_tensordict.get(key, None)
            next_tensordict.set(key, added if known is None else known | added)
            mark_ended(next_tensordict, added, reason)
            done = done | added
        next_tensordict.set("done", done)  # collectors look at "done" alone
        for compose in beside(self, ToolCompose):
            compose.is_user_due = False
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        return next_tensordict

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Keep the mask of the reset: a `DataLoadingPrimer` creates a new TensorDict without it."""
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new conversations in the rows of the mask; the others continue.

        Raises:
            ValueError: If a row names an unknown interaction, or the transforms are in the wrong order.
        """
        check_order(self, getattr(self.container, "transform", None))
        for compose in beside(self, ToolCompose):
            compose.has_user = True
        size = tensordict_reset.batch_size.numel()
        chosen, self._mask = reset_rows(tensordict, self._mask, size), None
        rows = [row for row in range(size) if chosen[row]]
        self._users.end(rows)
        for row in rows:
            told = said(tensordict_reset, row, self.column)
            if told is not None:
                self._begin(row, told)
        _write(tensordict_reset, _zeros(size))
        return with_truncated(tensordict_reset)

    def _begin(self, row: int, told: Any) -> None:
        self._users.begin(row, choice(self.interactions, row, self.column, told))

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Close the conversations of rows that other transforms have ended."""
        self._users.finish(tensordict.get(("next", "done")).reshape(-1).tolist())
        return tensordict, tensordict_

    def close(self) -> None:
        """End all conversations and tear the interactions down.

        May be called again; a later step sets them up again.
        """
        self._users.close()

    def clone(self) -> Self:
        """Return a transform with the same interactions, limiters and threads, and without conversations."""
        clone = self.__class__.__new__(self.__class__)
        Transform.__init__(clone)
        kept = ("interactions", "max_turns", "role", "column")
        clone.__dict__.update({name: self.__dict__[name] for name in kept}, _mask=None)
        clone._users = self._users.clone()
        return clone

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the scores and the flag."""
        if specs.KEY not in observation_spec.keys():
            shape, device = observation_spec.shape, observation_spec.device
            observation_spec[specs.KEY] = Composite(shape=shape, device=device)
        told = observation_spec[specs.KEY]
        each = torch.Size((*told.shape, 1))
        for name, dtype in _DTYPES.items():
            told[name] = (
                Binary(n=1, shape=each, dtype=dtype, device=told.device)
                if dtype is torch.bool
                else Unbounded(shape=each, dtype=dtype, device=told.device)
            )
        return observation_spec

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return spec_with_truncated(done_spec)

    def __repr__(self) -> str:
        return f"UserSimulator([{', '.join(self.interactions)}], max_turns={self.max_turns})"


def _is_from_model(conversation: border.Conversation) -> bool:
    """Return True if the last message is the model's."""
    return conversation.messages[-1].read().role == "assistant"


def _zeros(size: int) -> dict[str, list[float]]:
    return {name: [0] * size for name in _DTYPES}


def _write(tensordict: TensorDictBase, values: Mapping[str, Sequence[float]]) -> None:
    shape = torch.Size((*tensordict.batch_size, 1))
    for name, dtype in _DTYPES.items():
        made = torch.tensor(values[name], dtype=dtype, device=tensordict.device).reshape(shape)
        tensordict.set((specs.KEY, name), made)
