"""Interactions from functions, from verl's interaction classes, and ready-made ones."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from torchrl_agentic.interactions.base import Interaction, Reply, default_name, in_thread
from torchrl_agentic.messages import Message
from torchrl_agentic.records import message_to_json
from torchrl_agentic.tools.base import AsyncCallable
from torchrl_agentic.tools.signatures import is_async, keywords_of
from torchrl_agentic.tools.verl.graders import same_number


class FunctionUser(Interaction):
    """A user that is a function of the conversation.

    Args:
        function: Takes the messages, and returns a `Reply`, a text, or None to leave. It also gets the row's
            `interaction_kwargs` that it has parameters for, or all if it has `**kwargs`, and `worlds` if it
            has such a parameter; see `Interaction.session`. A function that is not a coroutine function runs
            on a thread.
        name: Name by which rows choose it; None: the name of the function.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        own = getattr(function, "__name__", type(function).__name__)
        self.name = name or ("user" if own == "<lambda>" else own)
        self._kwargs: Mapping[str, Any] = {}

    @property
    def takes_worlds(self) -> bool:
        """True if the function takes the worlds of the trajectory."""
        return "worlds" in keywords_of(self.function).names

    @asynccontextmanager
    async def session(self, trajectory: str, **kwargs: Any) -> AsyncGenerator[Interaction]:
        """Bind the row's arguments to the function."""
        del trajectory
        bound = FunctionUser(self.function, name=self.name)
        taken = keywords_of(self.function)
        bound._kwargs = {key: value for key, value in kwargs.items() if key in taken}
        yield bound

    async def respond(self, messages: Sequence[Message]) -> Reply | str | None:
        """Call the function."""
        return await _call(self.function, messages, **self._kwargs)


class VerlInteraction(Interaction):
    """An object with the methods of verl's `BaseInteraction`, up to 0.7, asynchronous or blocking.

    Each trajectory has its own instance id, unique among clones and worker processes.
    `finalize_interaction` runs once for each `start_interaction` that did not fail. A `calculate_score` that
    overrides that of the base class scores the conversation at its end.

    Args:
        target: The object.
        name: Name by which rows choose it; None: its `name`, or else that of its class.
    """

    def __init__(self, target: Any, *, name: str | None = None) -> None:
        self.target = target
        self.name = name or getattr(target, "name", None) or default_name(type(target).__name__)
        self._instance = ""
        self._kwargs: Mapping[str, Any] = {}

    @asynccontextmanager
    async def session(self, trajectory: str, **kwargs: Any) -> AsyncGenerator[Interaction]:
        """Start an instance, and finalize it at the end."""
        live = VerlInteraction(self.target, name=self.name)
        live._instance = f"{trajectory}-{uuid.uuid4().hex}"
        # As in verl, the name is among the arguments.
        own = {"name": self.name} if "name" in keywords_of(self.target.start_interaction) else {}
        live._kwargs = {**own, **kwargs}
        try:
            given = await _call(self.target.start_interaction, live._instance, **live._kwargs)
        except asyncio.CancelledError:  # the instance may have started
            await live._finalize()
            raise
        if isinstance(given, str) and given:
            live._instance = given
        try:
            yield live
        finally:
            await live._finalize()

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Call `generate_response`."""
        returned: Any = await _call(
            self.target.generate_response,
            self._instance,
            [_as_dict(message) for message in messages],
            **self._kwargs,
        )
        if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != 4:
            raise TypeError(
                f"expected (should_terminate, text, score, metadata) from {type(self.target).__name__}"
                f".generate_response; got {returned!r}"
            )
        is_over, text, score, metadata = cast("tuple[Any, Any, Any, Any]", returned)
        return Reply("" if text is None else text, score, bool(is_over), dict(metadata or {}))

    async def score(self, messages: Sequence[Message]) -> float | None:
        """Call `calculate_score` if the class overrides it."""
        del messages
        owner = next((kind for kind in type(self.target).__mro__ if "calculate_score" in vars(kind)), None)
        if owner is None or owner.__name__ == "BaseInteraction":
            return None
        return await _call(self.target.calculate_score, self._instance)

    async def _finalize(self) -> None:
        finalize = getattr(self.target, "finalize_interaction", None)
        if finalize is not None:
            await _call(finalize, self._instance)


def as_interaction(item: Any, *, name: str | None = None) -> Interaction:
    """Return an `Interaction` for an Interaction, a function or an object with verl's methods.

    Args:
        item: The object.
        name: Name by which rows choose it, for a function or an object with verl's methods; None: its own.

    Raises:
        TypeError: For any other object; the message tells what to write instead.
    """
    kind = type(item).__name__
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; an interaction is an object: {item.__name__}(...)")
    if isinstance(item, Interaction):
        if not is_async(item.respond):
            raise TypeError(
                f"{kind}.respond is not a coroutine function: write 'async def respond', and call "
                "blocking functions with 'await in_thread(...)'"
            )
        return item
    if callable(getattr(item, "generate_response", None)):
        return VerlInteraction(item, name=name)
    if callable(item):
        return FunctionUser(item, name=name)
    raise TypeError(
        "an interaction is an Interaction, a function of the messages, or an object with start_interaction "
        f"and generate_response; got {kind}"
    )


def create_interaction(kind: Any, name: str, config: Mapping[str, Any]) -> Interaction:
    """Create an interaction of a class.

    Args:
        kind: A subclass of `Interaction`, or a class with verl's methods.
        name: Name by which rows choose it.
        config: Arguments of an `Interaction`; a class in verl's form gets them as one mapping, with the name.

    Raises:
        TypeError: If it is not such a class, or does not take these arguments.
    """
    if not isinstance(kind, type):
        raise TypeError(f"{getattr(kind, '__name__', kind)!r} is not a class")
    if issubclass(kind, Interaction):
        made = kind(**config)
    else:
        made = as_interaction(cast("Any", kind)(config={"name": name, **config}), name=name)
    made.name = name
    return made


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await AsyncCallable(function)(in_thread, *args, **kwargs)


def _as_dict(message: Message) -> dict[str, Any]:
    made = message_to_json(message)
    made.pop("is_complete", None)  # a key of ours that verl does not know
    return made


class ScriptedUser(Interaction):
    """A user who gives fixed replies in order, and leaves after the last one.

    Args:
        replies: The replies, unless the row's `interaction_kwargs` have others: `{"replies": ["…", "…"]}`.
        name: Name by which rows choose it.

    Raises:
        TypeError: If `replies` is a string.
    """

    def __init__(self, replies: Sequence[Reply | str] = (), *, name: str = "") -> None:
        if isinstance(replies, str):
            raise TypeError("expected a list of replies: ScriptedUser(['first reply', 'second reply'])")
        self.replies = tuple(map(Reply.of, replies))
        self.name = name
        self._said = 0

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, replies: Sequence[Reply | str] | None = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Open a user that begins with the first reply.

        Args:
            trajectory: Name of the trajectory.
            replies: Replies of the row; None: those of the constructor.
            kwargs: Other arguments of the row, which are ignored.
        """
        del trajectory, kwargs
        yield ScriptedUser(self.replies if replies is None else replies, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Return the next reply, or None after the last one."""
        del messages
        self._said += 1
        return self.replies[self._said - 1] if self._said <= len(self.replies) else None


RIGHT = "Your answer is right."
WRONG = "Your answer is wrong. Look for the mistake, and answer again."


class Gsm8kInteraction(Interaction):
    """A user who compares the last number of each message with the right answer, until it is right.

    YAML files may also name it `verl.interactions.gsm8k_interaction.Gsm8kInteraction`. A row's
    `interaction_kwargs` have the right answer: `{"name": "gsm8k", "ground_truth": "72"}`. A right answer
    scores 1.0 and ends the conversation; a wrong one scores 0.0.

    Args:
        ground_truth: The right answer for rows that have none.
        name: Name by which rows choose it.
    """

    def __init__(self, *, ground_truth: Any = None, name: str = "") -> None:
        self.ground_truth = ground_truth
        self.name = name

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, ground_truth: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Open a user who knows the right answer of this trajectory.

        Args:
            trajectory: Name of the trajectory.
            ground_truth: The right answer; None: that of the constructor.
            kwargs: Other arguments of the row, which are ignored.

        Raises:
            ValueError: If there is no right answer.
        """
        truth = self.ground_truth if ground_truth is None else ground_truth
        if truth is None:
            raise ValueError(
                "Gsm8kInteraction needs the right answer: add to the data set's rows "
                'interaction_kwargs: {"name": "gsm8k", "ground_truth": …}'
            )
        yield Gsm8kInteraction(ground_truth=truth, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Score the last message of the model."""
        answer = next((message.text for message in reversed(messages) if message.role == "assistant"), "")
        if same_number(answer, str(self.ground_truth)):
            return Reply(RIGHT, 1.0, is_over=True)
        return Reply(WRONG, 0.0)

    async def score(self, messages: Sequence[Message]) -> float:
        """Return 1.0 if the last answer is right, else 0.0, instead of the sum of the replies' scores."""
        return (await self.respond(messages)).score or 0.0
