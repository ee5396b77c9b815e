"""`UserSide`: the simulated user's part of a live trajectory; and the interactions that it chooses from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.dispatch.dispatcher import Dispatcher
from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.interactions.adapters import as_interaction
from torchrl_agentic.interactions.base import Interaction, name_of
from torchrl_agentic.interactions.user_tool import set_arguments
from torchrl_agentic.messages import fields_of

_closing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive


class UserSide:
    """The simulated user's part of a live trajectory.

    Args:
        dispatcher: Runs the interactions, with their limits and deadlines.
        tools: Session of the tools of the trajectory, on whose worlds the user may act.
        name: Name of the interaction.
        kwargs: Arguments that its session is opened with.

    Attributes:
        name: Name of the interaction.
        session: What the interaction holds open.
        n_replies: Number of its replies so far.
        total: Sum of the scores of its replies.
        is_over: Whether it has ended the conversation, or scored it, or failed.
    """

    def __init__(self, dispatcher: Dispatcher, tools: Session, name: str, kwargs: Mapping[str, Any]) -> None:
        self.name = name
        self.session = dispatcher.session(tools.trajectory, row=tools.row)
        set_arguments(self.session, kwargs, tools)
        self.n_replies, self.total, self.is_over = 0, 0.0, False

    async def close(self) -> None:
        """Close what it holds open; may be called again."""
        self.is_over = True
        await self.session.close()

    def close_later(self) -> None:
        """Close it without waiting: after a failure, its closing may hang too."""
        task = asyncio.create_task(self.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


def named(items: object) -> dict[str, Interaction]:
    """Return interactions by name, given a mapping, a list, or one interaction.

    Raises:
        TypeError: If an item is not an interaction.
        ValueError: If `items` is empty, or two interactions have one name.
    """
    if isinstance(items, Mapping):
        by_key = cast("Mapping[str, object]", items)
        made = [(name, as_interaction(item, name=name)) for name, item in by_key.items()]
    else:
        several = cast("Sequence[object]", items) if isinstance(items, list | tuple) else [items]
        found = [as_interaction(item) for item in several]
        made = [(name_of(item), item) for item in found]
    if not made:
        raise ValueError("at least one interaction is needed")
    by_name = dict(made)
    if len(by_name) < len(made):
        names = [name for name, _ in made]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two interactions are named {twice!r}; give them by name: {{'a': …, 'b': …}}")
    return by_name


def chosen(known: Mapping[str, Interaction], where: str, value: object) -> tuple[str, dict[str, Any]]:
    """Return the name of the interaction that a row asks for, and the arguments of its session.

    Args:
        known: Interactions by name.
        where: The column and the row, for messages.
        value: Value of the column: a mapping with "name" and arguments, or None.

    Raises:
        ValueError: If it names an unknown interaction, or none although there are several.
    """
    fields = None if value is None else fields_of(value)
    if value is not None and fields is None:
        raise ValueError(f"{where} is a mapping: {{'name': …, …}}; got {value!r}")
    kwargs = dict(fields or {})
    name: object = kwargs.pop("name", None)
    if name is None and len(known) == 1:
        name = next(iter(known))
    if not isinstance(name, str) or name not in known:
        met = "names no interaction" if name is None else f"names the interaction {name!r}"
        raise ValueError(f"{where} {met}; known: {', '.join(known)}")
    return name, kwargs
