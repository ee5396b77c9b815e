"""What an environment is made of: the transforms of a kind, wherever they are nested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torchrl.envs.transforms import Compose

T = TypeVar("T")


def within(transform: object, kind: type[T]) -> Iterator[T]:
    """Give the transforms of a kind in an environment's transform: itself, or those inside it."""
    if isinstance(transform, kind):
        yield transform
    elif isinstance(transform, Compose):
        for inner in transform.transforms:
            yield from within(inner, kind)
