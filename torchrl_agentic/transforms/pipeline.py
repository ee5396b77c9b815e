"""Find the other transforms of an environment, and the rows that a reset names."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.episode import Stage

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


def tokenizer_of(env: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the tokenizer of the policy and the options of its chat template; None and {} if unknown.

    That is the tokenizer of a `TurnTokenizer`, or of the `ChatEnv`. Other transforms, such as judges and
    rewards, may have one of another model.
    """
    from torchrl_agentic.trajectory.prompting import EncodingStage  # it loads what renders templates

    for stage in stages_of(getattr(env, "transform", None)):
        if isinstance(stage, EncodingStage):
            return stage.encoder.tokenizer, stage.encoder.template.template_kwargs
    tokenizer = getattr(getattr(env, "base_env", None), "tokenizer", None)
    return (tokenizer if hasattr(tokenizer, "added_tokens_decoder") else None), {}


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
