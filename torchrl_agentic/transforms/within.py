"""What an environment is made of: the transforms of a kind, wherever they are nested; the rows that step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose, Transform

T = TypeVar("T")


def within(transform: object, kind: type[T]) -> Iterator[T]:
    """Give the transforms of a kind in an environment's transform: itself, or those inside it."""
    if isinstance(transform, kind):
        yield transform
    elif isinstance(transform, Compose):
        for inner in transform.transforms:
            yield from within(inner, kind)


def beside(transform: Transform, kind: type[T]) -> Iterator[T]:
    """Give the transforms of a kind in the environment that a transform is part of."""
    return within(getattr(transform.container, "transform", None), kind)


def stepped(tensordict: TensorDictBase) -> list[bool]:
    """Say which rows of a batch take part in a step: all, unless "_step" names some."""
    stepping = tensordict.get("_step", None)
    return [True] * tensordict.batch_size.numel() if stepping is None else stepping.reshape(-1).tolist()
