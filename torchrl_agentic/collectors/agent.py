"""`Agent`: the tools, rewards and bounds of an environment's transforms, without TensorDict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import check_count
from torchrl_agentic.interactions.base import Interaction
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.records import TrajectoryHook
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.trajectory.stage import check_order
from torchrl_agentic.transforms import (
    AnswerRewardTransform,
    EndTrajectory,
    RecordTransform,
    ToolCompose,
    ToolRewardTransform,
    TurnTokenizer,
    UserRewardTransform,
    UserSimulator,
)
from torchrl_agentic.transforms.pipeline import leaves
from torchrl_agentic.transforms.tool_list import parser_for

T = TypeVar("T")
_KNOWN = (
    ToolCompose,
    EndTrajectory,
    ToolRewardTransform,
    AnswerRewardTransform,
    UserRewardTransform,
    UserSimulator,
    RecordTransform,
    TurnTokenizer,
)


@dataclass(frozen=True, slots=True)
class Users:
    """The simulated users of a collector.

    Attributes:
        interactions: Interactions by name.
        dispatcher: Runs them, with their limits and deadlines.
        max_turns: Number of replies in a trajectory; None: no bound.
        role: Role of their messages.
        column: Column of the data set that chooses the interaction.
    """

    interactions: Mapping[str, Interaction]
    dispatcher: Dispatcher
    max_turns: int | None
    role: str
    column: str


class Agent:
    """Everything that all trajectories of a collector share.

    Args:
        transforms: A `ToolCompose`, or a `Compose` of it with `EndTrajectory`, `UserSimulator`, rewards,
            `TurnTokenizer` and `RecordTransform`: the transforms of a `TransformedEnv`.
        tokenizer: Tokenizer of the engine; None for an engine that takes messages.
        max_turns: Upper bound on the messages of the model in a trajectory.
        tokenizer_options: Further arguments of `ChatEncoder`; not with a `TurnTokenizer`, which has its own.
        stop_token_ids: Ids that end an answer of the engine.

    Attributes:
        dispatcher: Runs the tool calls.
        parser: Reads the calls of messages.
        encoder: Encodes prompts; None without a tokenizer.
        max_turns: Upper bound on the messages of the model in a trajectory.
        when_no_calls: Whether a message without calls ends a trajectory.
        users: The simulated users, or None.
        hook: Records trajectories, or None.

    Raises:
        TypeError: If there is no `ToolCompose`, or a transform works only on steps of an environment.
        ValueError: If two transforms contradict each other.
    """

    def __init__(
        self,
        transforms: Any,
        tokenizer: Any,
        *,
        max_turns: int,
        tokenizer_options: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        check_count("max_turns", max_turns, optional=False)
        found = list(leaves(transforms))
        compose = _only(found, ToolCompose)
        if compose is None:
            raise TypeError(
                "transforms is a ToolCompose, or the Compose of one with other transforms; "
                f"got {type(transforms).__name__}"
            )
        for item in found:
            if not isinstance(item, _KNOWN):
                raise TypeError(
                    f"{type(item).__name__} works on TensorDict steps of an environment, which the "
                    "trajectories of a collector do not have: use LLMCollector with a TransformedEnv, or do "
                    "its work in reward= or in a tool"
                )
        self.compose = compose
        self.dispatcher = compose.new_dispatcher()
        self.tool_role, self.media = compose.tool_role, compose.media
        self.eos_strings = compose.eos_strings
        self.passes_state = compose.passes_state
        self.hook: TrajectoryHook | None = compose.recordings.hook
        ends = list(_of(found, EndTrajectory))
        self.max_turns = min([max_turns, *(end.max_turns for end in ends if end.max_turns is not None)])
        self.users = self._users(transforms, _only(found, UserSimulator))
        self.when_no_calls = any(end.when_no_calls for end in ends) if ends else self.users is None
        writer = _only(found, TurnTokenizer)
        self.encoder = self._encoder(writer, tokenizer, tokenizer_options or {}, stop_token_ids)
        self.parser: ToolCallParser = compose.parser
        if self.encoder is not None and not compose.knows_tokenizer:
            kwargs = self.encoder.template.template_kwargs
            self.parser = parser_for(compose.parser, self.encoder.tokenizer, kwargs)
        self.tool_rewards = list(_of(found, ToolRewardTransform))
        if any(one.place == "tokens" for one in self.tool_rewards):
            raise ValueError('a collector has one reward per trajectory: ToolRewardTransform(place="turn")')
        self.answer_rewards = list(_of(found, AnswerRewardTransform))
        self.user_rewards = list(_of(found, UserRewardTransform))
        if self.user_rewards and self.users is None:
            raise ValueError("UserRewardTransform reads the scores of a UserSimulator, and there is none")
        self.record = _only(found, RecordTransform)
        if self.record is not None and self.hook is None:
            raise ValueError(
                "RecordTransform needs a ToolCompose with a recorder: ToolCompose(..., recorder=...)"
            )

    @property
    def has_rewards(self) -> bool:
        """True if a transform gives rewards."""
        return bool(self.tool_rewards or self.answer_rewards or self.user_rewards)

    def _users(self, transforms: Any, simulator: UserSimulator | None) -> Users | None:
        if simulator is None:
            return None
        check_order(simulator, transforms)
        return Users(
            simulator.interactions,
            simulator.new_dispatcher(),
            simulator.max_turns,
            simulator.role,
            simulator.column,
        )

    def _encoder(
        self,
        writer: TurnTokenizer | None,
        tokenizer: Any,
        options: Mapping[str, Any],
        stops: Sequence[int],
    ) -> ChatEncoder | None:
        if writer is not None:
            if tokenizer is not None and tokenizer is not writer.tokenizer:
                raise ValueError("tokenizer= and the TurnTokenizer's are not the same object")
            if options:
                raise ValueError(f"the TurnTokenizer decides {', '.join(sorted(options))}: set it there")
            return writer.chat_encoder.with_stop_ids(stops)
        if tokenizer is None:
            return None
        given: dict[str, Any] = {"tools": self.compose.tools, "tool_role": self.tool_role, **options}
        given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *stops)
        return ChatEncoder(tokenizer, **given)

    async def close(self) -> None:
        """Close the sessions of all trajectories; tools and interactions stay set up."""
        await self.dispatcher.close_sessions()
        if self.users is not None:
            await self.users.dispatcher.close_sessions()


def _of(items: list[Any], kind: type[T]) -> Iterator[T]:
    return (item for item in items if isinstance(item, kind))


def _only(items: list[Any], kind: type[T]) -> T | None:
    found = list(_of(items, kind))
    if len(found) > 1:
        raise ValueError(f"there are {len(found)} transforms of the class {kind.__name__}; one is enough")
    return found[0] if found else None
