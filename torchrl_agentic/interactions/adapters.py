"""Interactions made of what people bring: functions, and the interaction classes of verl."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from torchrl_agentic.interactions.base import Interaction, Reply, default_name, in_thread
from torchrl_agentic.messages import Message
from torchrl_agentic.records import message_to_json
from torchrl_agentic.tools.signatures import AsyncCallable, is_async, keywords_of
from torchrl_agentic.tools.verl.graders import same_number


class FunctionUser(Interaction):
    """A user that is a function of the conversation; a blocking one runs on a thread.

    function: takes the messages and returns a `Reply`, a text, or None to leave. Of a row's
    `interaction_kwargs` it gets those that it names as parameters, or all if it takes `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        own = getattr(function, "__name__", type(function).__name__)
        self.name = name or ("user" if own == "<lambda>" else own)
        self._kwargs: Mapping[str, Any] = {}

    @asynccontextmanager
    async def session(self, trajectory: str, **kwargs: Any) -> AsyncGenerator[Interaction]:
        """Bind what the row says to the function."""
        del trajectory
        bound = FunctionUser(self.function, name=self.name)
        taken = keywords_of(self.function)
        bound._kwargs = {key: value for key, value in kwargs.items() if key in taken}
        yield bound

    async def respond(self, messages: Sequence[Message]) -> Reply | str | None:
        """Call the function."""
        return await _call(self.function, messages, **self._kwargs)


class VerlInteraction(Interaction):
    """An object with the methods of verl's `BaseInteraction`, up to 0.7, asynchronous or blocking ones.

    Each trajectory has an instance id of its own, which no clone and no worker process uses too. It is
    finalised once for each start that did not fail. A `calculate_score` that is not the base class's own
    judges the conversation at its end.
    """

    def __init__(self, target: Any, *, name: str | None = None) -> None:
        self.target = target
        self.name = name or getattr(target, "name", None) or default_name(type(target).__name__)
        self._instance = ""
        self._kwargs: Mapping[str, Any] = {}

    @asynccontextmanager
    async def session(self, trajectory: str, **kwargs: Any) -> AsyncGenerator[Interaction]:
        """Start an instance, and finalise it at the end."""
        live = VerlInteraction(self.target, name=self.name)
        live._instance = f"{trajectory}-{uuid.uuid4().hex}"
        # As there, the name is among the arguments.
        own = {"name": self.name} if "name" in keywords_of(self.target.start_interaction) else {}
        live._kwargs = {**own, **kwargs}
        try:
            given = await _call(self.target.start_interaction, live._instance, **live._kwargs)
        except asyncio.CancelledError:  # it may have begun
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
        said: Any = await _call(
            self.target.generate_response,
            self._instance,
            [_as_dict(message) for message in messages],
            **self._kwargs,
        )
        if not isinstance(said, tuple) or len(cast("tuple[Any, ...]", said)) != 4:
            raise TypeError(
                "generate_response returns (should_terminate, text, score, metadata); "
                f"{type(self.target).__name__}'s returned {said!r}"
            )
        is_over, text, score, metadata = cast("tuple[Any, Any, Any, Any]", said)
        return Reply("" if text is None else text, score, bool(is_over), dict(metadata or {}))

    async def score(self, messages: Sequence[Message]) -> float | None:
        """Call `calculate_score`, where the class has one of its own."""
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
    """Make an `Interaction` of whatever people bring: one, a function, an object in verl's shape.

    Raises:
        TypeError: it is none of these; the message says what to write instead.
    """
    kind = type(item).__name__
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; an interaction is an object: {item.__name__}(...)")
    if isinstance(item, Interaction):
        if not is_async(item.respond):
            raise TypeError(
                f"{kind}.respond is no coroutine function: write 'async def respond', and "
                "'await in_thread(...)' inside"
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


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await AsyncCallable(function)(in_thread, *args, **kwargs)


def _as_dict(message: Message) -> dict[str, Any]:
    made = message_to_json(message)
    made.pop("is_complete", None)  # ours: no API knows it
    return made


class ScriptedUser(Interaction):
    """A user who gives the same replies, in order, in every conversation, and leaves when there are no more.

    A row's `interaction_kwargs` may bring replies of its own: `{"replies": ["…", "…"]}`.
    """

    def __init__(self, replies: Sequence[Reply | str] = (), *, name: str = "") -> None:
        if isinstance(replies, str):
            raise TypeError("replies is a list: ScriptedUser(['first reply', 'second reply'])")
        self.replies = tuple(map(Reply.of, replies))
        self.name = name
        self._said = 0

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, replies: Sequence[Reply | str] | None = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Begin the script."""
        del trajectory, kwargs
        yield ScriptedUser(self.replies if replies is None else replies, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Give the next reply, whatever was said."""
        del messages
        self._said += 1
        return self.replies[self._said - 1] if self._said <= len(self.replies) else None


RIGHT = "Your answer is right."
WRONG = "Your answer is wrong. Look for the mistake, and answer again."


class Gsm8kInteraction(Interaction):
    """A user who compares the last number of each message with the right answer, until it is right.

    YAML files may also name it `verl.interactions.gsm8k_interaction.Gsm8kInteraction`. A row's
    `interaction_kwargs` hold the right answer: `{"name": "gsm8k", "ground_truth": "72"}`. A reply scores 1.0
    where the answer is right, which ends the conversation, and 0.0 where it is not.

    Args:
        ground_truth: The right answer, where a row does not say it.
        name: What rows call it.
    """

    def __init__(self, *, ground_truth: Any = None, name: str = "") -> None:
        self.ground_truth = ground_truth
        self.name = name

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, ground_truth: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Open a user who knows the right answer of this trajectory.

        Raises:
            ValueError: If the row has none.
        """
        truth = self.ground_truth if ground_truth is None else ground_truth
        if truth is None:
            raise ValueError(
                "Gsm8kInteraction needs the right answer: give the data set's rows "
                'interaction_kwargs: {"name": "gsm8k", "ground_truth": …}'
            )
        yield Gsm8kInteraction(ground_truth=truth, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Judge the last message of the model."""
        said = next((message.text for message in reversed(messages) if message.role == "assistant"), "")
        if same_number(said, str(self.ground_truth)):
            return Reply(RIGHT, 1.0, is_over=True)
        return Reply(WRONG, 0.0)

    async def score(self, messages: Sequence[Message]) -> float:
        """Return 1.0 if the last answer is right, else 0.0: what earlier replies scored does not add up."""
        return (await self.respond(messages)).score or 0.0
