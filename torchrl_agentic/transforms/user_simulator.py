"""In which order transforms must stand where a user takes part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.interactions.user_tool import tool_name
from torchrl_agentic.limits import Limiter
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.end_trajectory import EndTrajectory
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.specs import spec_with_truncated, with_truncated
from torchrl_agentic.transforms.turn_tokenizer import TurnTokenizer
from torchrl_agentic.transforms.user_sessions import Talks, UserTurn, choice, named, said

ORDER = "Compose(ToolCompose(...), EndTrajectory(max_turns=...), UserSimulator(...), TurnTokenizer(...))"


def check_order(user: object, transform: object) -> None:
    """Look at the transforms of an environment, among them a user simulator.

    Raises:
        ValueError: one of them would take the word from the user, or not hear it.
    """
    seen: list[object] = []
    for item in _leaves(transform):
        if isinstance(item, EndTrajectory) and item.when_no_calls:
            raise ValueError(
                "EndTrajectory(when_no_calls=True) ends what UserSimulator answers: leave when_no_calls out, "
                "and let the user end the conversation, or max_turns"
            )
        seen.append(item)
    behind = seen[seen.index(user) :] if user in seen else seen
    if any(isinstance(item, ToolCompose) for item in behind):
        raise ValueError(f"UserSimulator reads what ToolCompose writes: {ORDER}")
    if user in seen and any(isinstance(item, TurnTokenizer) for item in seen[: seen.index(user)]):
        raise ValueError(f"TurnTokenizer must see what UserSimulator writes: {ORDER}")


def _leaves(transform: object) -> Iterator[object]:
    if isinstance(transform, Compose) and not isinstance(transform, ToolCompose):
        for inner in transform.transforms:
            yield from _leaves(inner)
    else:
        yield transform


_DTYPES = {
    "user_turn": torch.int64,
    "user_score": torch.float32,
    "user_final_score": torch.float32,
    "user_error": torch.bool,
}


class UserSimulator(Transform):
    """Lets a simulated user answer each message of the model that calls no tool.

    Stands behind `ToolCompose` and `EndTrajectory(max_turns=...)`, and in front of `TurnTokenizer`. Where
    a message called tools, these have answered, and the user is silent; so it is where a row is done, or the
    last message is not the model's. The users of all rows are asked concurrently. What one says becomes a
    message in ("history", "prompt"), control tokens escaped; where it leaves, the row is `done` and
    `terminated`. A user that fails or takes too long costs its own row: that is truncated, flagged and
    logged.

    Writes, with the shape [*B, 1], on reset too: ("agentic", "user_turn") int64, how often the user has
    spoken; ("agentic", "user_score") float32, of this turn, 0 where it gave none; ("agentic",
    "user_final_score") float32, of the whole trajectory, at its end; ("agentic", "user_error") bool.

    What ends a trajectory behind this transform is not judged. `EndTrajectory(when_no_calls=True)` takes the
    word from the user, and is refused.

    Args:
        interactions: an interaction, or several by name or in a list; see `as_interaction` and
            `load_interactions`. Of several, each row names its own.
        max_turns: how often the user may speak; the message that would be answered next truncates the row.
            None: no bound.
        role: of the user's messages.
        per_reply_timeout: seconds that a reply may take, with the opening of the session before the first;
            None: no bound.
        rate_limits: name of an interaction → limiter, as in `ToolCompose`.
        max_threads: how many blocking interactions run at once.
        column: of the data set, with what a row says to its user: {"name": "…", …}, the name and what the
            session is opened with. It is looked for in "extra_info" too.

    Raises:
        TypeError: an item is no interaction.
        ValueError: none or two of one name, a limit for one that is not there, a bound below 1 or 0 seconds.
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
            raise ValueError(f"max_turns must be 1 or more, or None for no bound; got {max_turns}")
        if per_reply_timeout is not None and not per_reply_timeout > 0:
            raise ValueError(
                f"per_reply_timeout must be above 0 seconds, or None for no bound; got {per_reply_timeout}"
            )
        self.interactions = named(interactions)
        limits = dict(rate_limits or {})
        if unknown := [name for name in limits if name not in self.interactions]:
            known = ", ".join(self.interactions)
            raise ValueError(f"a rate limit for {unknown[0]!r}, but no such interaction; known: {known}")
        self.max_turns = max_turns
        self.role = role
        self.column = column
        options = {
            "per_call_timeout": per_reply_timeout,
            "rate_limits": {tool_name(name): limit for name, limit in limits.items()},
            "max_threads": max_threads,
            "validate_inputs": False,
        }
        self._talks = Talks(self.interactions, role, options)
        self._mask: torch.Tensor | None = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        called = next_tensordict.get((specs.KEY, "any_tool_calls"), None)
        if called is None:
            raise RuntimeError(f"UserSimulator reads what ToolCompose writes: {ORDER}")
        rows = border.prompts(next_tensordict)
        escape = next(beside(self, ToolCompose)).parser.control_escaper.escape
        turns = self._turns(tensordict, next_tensordict, rows, called.reshape(-1).tolist())
        self._talks.converse(turns)
        for turn in turns:
            if turn.reply is not None and (turn.reply.text or not turn.reply.is_over):
                message = border.write_message({"role": self.role, "content": escape(turn.reply.text)})
                rows[turn.row] = border.extended(rows[turn.row], [message])
        border.set_prompts(next_tensordict, rows)
        return self._report(next_tensordict, turns)

    def _turns(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        rows: Sequence[border.Conversation],
        called: Sequence[bool],
    ) -> list[UserTurn]:
        """Decide what is to become of each row that is stepped and was not over before."""
        done = next_tensordict.get("done").reshape(-1).tolist()
        active = stepped(tensordict)
        spoken = self._talks.turns
        compose = next(beside(self, ToolCompose))
        turns: list[UserTurn] = []
        for row, conversation in enumerate(rows):
            if not active[row]:
                continue
            if row not in self._talks:  # given to `reset` by hand, it does not reach transforms before a step
                self._begin(row, said(tensordict, row, self.column))
            if not self._talks.take_up(row, compose.trajectory(row)):
                continue
            is_answer = not (done[row] or called[row]) and _is_from_model(conversation)
            is_last = is_answer and self.max_turns is not None and spoken.get(row, 0) >= self.max_turns
            is_asked, is_done = is_answer and not is_last, done[row] or is_last
            read = border.messages(conversation) if is_asked or is_done else ()
            turns.append(UserTurn(row, tuple(map(border.read_message, read)), is_asked, is_done))
        return turns

    def _report(self, next_tensordict: TensorDictBase, turns: Sequence[UserTurn]) -> TensorDictBase:
        """Write scores and flags, and end the rows that are over."""
        done = next_tensordict.get("done")
        had_ended = done.reshape(-1).tolist()
        values = _zeros(done.numel())
        for row, count in self._talks.turns.items():
            values["user_turn"][row] = count
        left, cut = [False] * done.numel(), [False] * done.numel()
        for turn in turns:
            values["user_score"][turn.row] = (turn.reply.score if turn.reply else None) or 0.0
            values["user_final_score"][turn.row] = turn.final
            values["user_error"][turn.row] = turn.has_failed
            left[turn.row] = turn.is_left
            cut[turn.row] = turn.is_done and not turn.is_left and not had_ended[turn.row]
        _write(next_tensordict, values)
        for key, flags in (("terminated", left), ("truncated", cut)):
            added = torch.tensor(flags, device=done.device).reshape(done.shape)
            known = next_tensordict.get(key, None)
            next_tensordict.set(key, added if known is None else known | added)
            done = done | added
        next_tensordict.set("done", done)  # collectors look at "done" alone
        for compose in beside(self, ToolCompose):
            compose.recordings.because(left, "user")
            compose.recordings.because(cut, "max_turns")
            compose.end(done.reshape(-1).tolist(), next_tensordict)
        return next_tensordict

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take note of the mask: a `DataLoadingPrimer` makes a new TensorDict for the reset, without it."""
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new trajectories in the rows of the mask; the others go on as they are.

        Raises:
            ValueError: a row names no interaction that there is, or the transforms stand in a wrong order.
        """
        check_order(self, getattr(self.container, "transform", None))
        size = tensordict_reset.batch_size.numel()
        mask, self._mask = tensordict.get("_reset", self._mask), None
        chosen = [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()
        rows = [row for row in range(size) if chosen[row]]
        self._talks.end(rows)
        for row in rows:
            told = said(tensordict_reset, row, self.column)
            if told is not None:
                self._begin(row, told)
        _write(tensordict_reset, _zeros(size))
        return with_truncated(tensordict_reset)

    def _begin(self, row: int, told: Any) -> None:
        self._talks.begin(row, choice(self.interactions, row, self.column, told))

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Close the rows that transforms behind us have ended."""
        self._talks.finish(tensordict.get(("next", "done")).reshape(-1).tolist())
        return tensordict, tensordict_

    def close(self) -> None:
        """End all conversations and tear the interactions down.

        May be called again; a later step sets them up anew.
        """
        self._talks.close()

    def clone(self) -> Self:
        """Make a transform with the same interactions, limiters and threads, and conversations of its own."""
        clone = self.__class__.__new__(self.__class__)
        Transform.__init__(clone)
        kept = ("interactions", "max_turns", "role", "column")
        clone.__dict__.update({name: self.__dict__[name] for name in kept}, _mask=None)
        clone._talks = self._talks.clone()
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
    """Whether the last message is the model's."""
    return border.read_message(border.messages(conversation)[-1]).role == "assistant"


def _zeros(size: int) -> dict[str, list[float]]:
    return {name: [0] * size for name in _DTYPES}


def _write(tensordict: TensorDictBase, values: Mapping[str, Sequence[float]]) -> None:
    shape = torch.Size((*tensordict.batch_size, 1))
    for name, dtype in _DTYPES.items():
        made = torch.tensor(values[name], dtype=dtype, device=tensordict.device).reshape(shape)
        tensordict.set((specs.KEY, name), made)
