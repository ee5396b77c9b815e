"""Which interaction a row talks to, and what it is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_agentic.interactions.adapters import as_interaction
from torchrl_agentic.interactions.base import Interaction, name_of
from torchrl_agentic.transforms.columns import columns


@dataclass(frozen=True, slots=True)
class Choice:
    """An interaction by its name, and what the row says to it."""

    name: str
    kwargs: Mapping[str, Any]


def named(items: Any) -> dict[str, Interaction]:
    """Give interactions by name: those of a mapping, of a list, or one alone.

    Raises:
        TypeError: an item is no interaction.
        ValueError: there is none, or two have one name.
    """
    if isinstance(items, Mapping):
        made = [(name, as_interaction(item, name=name)) for name, item in items.items()]
    else:
        found = [as_interaction(item) for item in (items if isinstance(items, list | tuple) else [items])]
        made = [(name_of(item), item) for item in found]
    if not made:
        raise ValueError("at least one interaction is needed")
    by_name = dict(made)
    if len(by_name) < len(made):
        names = [name for name, _ in made]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two interactions are named {twice!r}; give them by name: {{'a': …, 'b': …}}")
    return by_name


def said(source: TensorDictBase, row: int, column: str) -> Any:
    """Give what a row says to its user, in the column or in that of "extra_info"; None: nothing."""
    found = columns(source, row, [column, ("extra_info", column)])
    own = found.get(column)
    return found.get(("extra_info", column)) if own is None else own


def choice(known: Mapping[str, Interaction], row: int, column: str, said: Any) -> Choice:
    """Find out which interaction a row wants.

    Raises:
        ValueError: it names none of those that there are, or none at all, and there are several.
    """
    kwargs = {} if said is None else said
    if not isinstance(kwargs, dict):
        raise ValueError(f"{column!r} of row {row} is a mapping: {{'name': …, …}}; got {kwargs!r}")
    name: Any = kwargs.get("name")
    if name is None and len(known) == 1:
        name = next(iter(known))
    if not isinstance(name, str) or name not in known:
        met = "names no interaction" if name is None else f"names the interaction {name!r}"
        raise ValueError(f"{column!r} of row {row} {met}; known: {', '.join(known)}")
    return Choice(name, {key: value for key, value in kwargs.items() if key != "name"})
