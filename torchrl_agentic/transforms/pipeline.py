"""Find the other transforms of an environment and the rows that take part in a step, and run a stage."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.episode import OpenTurn
from torchrl_agentic.trajectory.stage import Stage, act
from torchrl_agentic.transforms.conversation import Conversation
from torchrl_agentic.transforms.specs import ENDED_BY

T = TypeVar("T")


def within(transform: object, kind: type[T]) -> Iterator[T]:
    """Yield the transforms of a class: the transform itself, or those nested inside it.

    Args:
        transform: The transform of an environment, or None.
        kind: The class.
    """
    if isinstance(transform, kind):
        yield transform
    elif isinstance(transform, Compose):
        for inner in transform.transforms:
            yield from within(inner, kind)


def beside(transform: Transform, kind: type[T]) -> Iterator[T]:
    """Yield the transforms of a class in the environment that a transform belongs to.

    Args:
        transform: Any transform of the environment.
        kind: The class.
    """
    return within(getattr(transform.container, "transform", None), kind)


def stages_of(transform: object) -> list[Stage]:
    """Return the stages of the transforms of an environment, in order.

    Args:
        transform: The transform of an environment, or None.
    """
    found = (getattr(item, "stage", None) for item in leaves(transform))
    return [stage for stage in found if isinstance(stage, Stage)]


def run_stage(stage: Stage, turns: Sequence[OpenTurn]) -> None:
    """Run a stage for the turns that it has not seen; if it fails, it sees them again in a repeated step.

    Args:
        stage: The stage.
        turns: The turns.
    """
    new = [turn for turn in turns if stage not in turn.effects]
    try:
        rest = act(stage, new)
        if rest is not None:
            run(rest)
    except BaseException:  # Ctrl-C, too
        for turn in new:
            turn.effects.pop(stage, None)
        raise


def append_messages(rows: list[Conversation], turns: Iterable[OpenTurn], stage: Stage) -> bool:
    """Append the messages of a stage to the conversations, and return True if there are any.

    Args:
        rows: Conversations of all rows; changed.
        turns: The turns.
        stage: The stage, which has acted on them.
    """
    longer = [turn for turn in turns if turn.effects[stage].messages]
    for turn in longer:
        rows[turn.episode.row] = rows[turn.episode.row].extended(turn.effects[stage].messages)
    return bool(longer)


def tokenizer_of(env: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the tokenizer of the policy and the options of its chat template; None and {} if unknown.

    That is the tokenizer of a `TurnTokenizer`, or of the `ChatEnv`. Other transforms, such as judges and
    rewards, may have one of another model.
    """
    from torchrl_agentic.transforms.turn_tokenizer import TurnTokenizer  # it imports this module

    writers = within(getattr(env, "transform", None), TurnTokenizer)
    for owner in (*writers, getattr(env, "base_env", None)):
        tokenizer = getattr(owner, "tokenizer", None)
        if hasattr(tokenizer, "added_tokens_decoder"):
            return tokenizer, owner.template.template_kwargs if isinstance(owner, TurnTokenizer) else {}
    return None, {}


def stepped(tensordict: TensorDictBase) -> list[bool]:
    """Return for each row of a batch whether it takes part in a step.

    A row stays out of a step if "_step" leaves it out, or if its trajectory is over already: "done" of the
    root is true until the row is reset.

    Args:
        tensordict: The root of the step, [*B].
    """
    stepping, done = tensordict.get("_step", None), tensordict.get("done", None)
    active = [True] * tensordict.batch_size.numel() if stepping is None else stepping.reshape(-1).tolist()
    if done is None:
        return active
    return [is_in and not is_over for is_in, is_over in zip(active, done.reshape(-1).tolist(), strict=True)]


class KnowsResetRows:
    """Base of transforms that act on the rows of a reset: those that "_reset" names, or all without it.

    A `DataLoadingPrimer` creates a new TensorDict for the reset, without "_reset".
    """

    _reset_mask: torch.Tensor | None = None

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Keep "_reset" before a `DataLoadingPrimer` drops it."""
        self._reset_mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def rows_of_reset(self, tensordict: TensorDictBase, size: int) -> list[bool]:
        """Return for each row of a batch whether it is reset.

        Args:
            tensordict: Argument of the reset; its "_reset" counts if it is there.
            size: Number of rows.
        """
        mask, self._reset_mask = tensordict.get("_reset", self._reset_mask), None
        return [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()


def keep_ended(tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
    """Keep the flags, and the reason, of rows that had ended before a step.

    Args:
        tensordict: The root of the step, [*B].
        next_tensordict: Its "next", [*B].
    """
    done = tensordict.get("done", None)
    if done is not None and done.any():
        reason = tensordict.get(ENDED_BY, None)
        if reason is not None:
            next_tensordict.set(ENDED_BY, torch.where(reason != 0, reason, next_tensordict.get(ENDED_BY)))
        for key in ("done", "terminated", "truncated"):
            before, after = tensordict.get(key, None), next_tensordict.get(key, None)
            if before is not None:
                next_tensordict.set(key, before.clone() if after is None else after | before)
    return next_tensordict


def row_numbers(tensordict: TensorDictBase, key: str | tuple[str, str]) -> Sequence[Any]:
    """Return the numbers of a column of the flattened batch; None for each row if there is no such column.

    Args:
        tensordict: The batch, [*B].
        key: Key of the column, [*B, 1].
    """
    found = tensordict.get(key, None)
    if found is None:
        return [None] * tensordict.batch_size.numel()
    return torch.Tensor.tolist(found.reshape(-1))
