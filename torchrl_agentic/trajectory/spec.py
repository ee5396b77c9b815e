"""`TrajectorySpec`: the stages of a collector's transforms, and what all of its trajectories share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import check_count
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.records import TrajectoryHook
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.trajectory.calls import BoundsStage, CallsStage, parser_for
from torchrl_agentic.trajectory.columns import Column
from torchrl_agentic.trajectory.episode import Stage, check_order
from torchrl_agentic.trajectory.prompting import EncodingStage
from torchrl_agentic.trajectory.recording import RecordStage
from torchrl_agentic.trajectory.reward_stages import ToolRewardStage
from torchrl_agentic.trajectory.users import UserStage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """Stages and services that all trajectories of a collector share.

    Attributes:
        compose: The `ToolCompose`.
        stages: The stages, in the order of the transforms, with those that a collector adds.
        calls: The stage that runs the calls.
        dispatcher: Runs the tool calls.
        users: Runs the interactions of the simulated users; None without one.
        hook: Receives records, or None.
        columns: Entries under "agentic" that the stages fill in.
    """

    compose: Any
    stages: tuple[Stage, ...]
    calls: CallsStage
    dispatcher: Dispatcher
    users: Dispatcher | None
    hook: TrajectoryHook | None
    columns: tuple[Column, ...]

    @classmethod
    def of(
        cls,
        items: Sequence[Any],
        tokenizer: Any,
        *,
        max_turns: int,
        tokenizer_options: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> TrajectorySpec:
        """Read the stages of transforms.

        Two stages are added: a bound on the turns, and without a `TurnTokenizer` the encoding of prompts.

        Args:
            items: Transforms with a `stage` each: a `ToolCompose`, and others of a `TransformedEnv`.
            tokenizer: Tokenizer of the engine; None for an engine that takes messages.
            max_turns: Upper bound on the messages of the model in a trajectory.
            tokenizer_options: Further arguments of `ChatEncoder`; not with a `TurnTokenizer`, which has its
                own.
            stop_token_ids: Ids that end an answer of the engine.

        Raises:
            TypeError: If there is no `ToolCompose`, or a transform has no stage.
            ValueError: If two transforms contradict each other, or a collector cannot honour an option.
        """
        check_count("max_turns", max_turns, optional=False)
        compose = _only(items, CallsStage)
        if compose is None:
            met = ", ".join(type(item).__name__ for item in items) or "none"
            raise TypeError(
                f"transforms is a ToolCompose, or the Compose of one with other transforms; got {met}"
            )
        for item in items:
            if not isinstance(getattr(item, "stage", None), Stage):
                raise TypeError(
                    f"{type(item).__name__} works on TensorDict steps of an environment, which the "
                    "trajectories of a collector do not have: derive it from TurnTransform, do its work in "
                    "reward= or in a tool, or use LLMCollector with a TransformedEnv"
                )
        stages = [item.stage for item in items]
        writer, simulator = _only(items, EncodingStage), _only(items, UserStage)
        encoder = _encoder(compose, writer, tokenizer, tokenizer_options or {}, stop_token_ids)
        stages[stages.index(compose.stage)] = calls = _calls(compose, encoder)
        ends = [stage for stage in stages if isinstance(stage, BoundsStage)]
        bound = BoundsStage(max_turns=max_turns, when_no_calls=not ends and simulator is None)
        stages.insert(stages.index(ends[-1] if ends else calls) + 1, bound)  # the first reason counts
        if encoder is not None:
            encoding = EncodingStage(encoder) if writer is None else copy.copy(writer.stage)
            encoding.encoder = encoder
            if writer is None:
                stages.insert(_end_of_turn(stages), encoding)
            else:
                stages[stages.index(writer.stage)] = encoding
        check_order(stages)
        if any(isinstance(stage, ToolRewardStage) and stage.place == "tokens" for stage in stages):
            raise ValueError('a collector has one reward per trajectory: ToolRewardTransform(place="turn")')
        if _only(items, RecordStage) is not None and compose.hook is None:
            raise ValueError(
                "RecordTransform needs a ToolCompose with a recorder: ToolCompose(..., recorder=...)"
            )
        return cls(
            compose,
            tuple(stages),
            calls,
            compose.new_dispatcher(),
            None if simulator is None else simulator.new_dispatcher(),
            compose.hook,
            tuple({column.name: column for stage in stages for column in stage.columns}.values()),
        )

    @property
    def parser(self) -> ToolCallParser:
        """Reads the calls of messages."""
        return self.calls.parser

    @property
    def encoder(self) -> ChatEncoder | None:
        """Encodes prompts; None without a tokenizer."""
        found = self.stage_of(EncodingStage)
        return None if found is None else found.encoder

    @property
    def has_rewards(self) -> bool:
        """True if a transform gives rewards."""
        return any(stage.gives_rewards for stage in self.stages)

    def stage_of(self, kind: type[T]) -> T | None:
        """Return the stage of a class, or None."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    async def close(self) -> None:
        """Close the sessions of all trajectories; tools and interactions stay set up."""
        await self.dispatcher.close_sessions()
        if self.users is not None:
            await self.users.close_sessions()


def _calls(compose: Any, encoder: ChatEncoder | None) -> CallsStage:
    """Return the stage of the calls, with a parser for the tokenizer of the prompts."""
    calls = copy.copy(compose.stage)
    if encoder is not None and not compose.knows_tokenizer:
        calls.parser = parser_for(calls.parser, encoder.tokenizer, encoder.template.template_kwargs)
    return calls


def _encoder(
    compose: Any, writer: Any, tokenizer: Any, options: Mapping[str, Any], stops: Sequence[int]
) -> ChatEncoder | None:
    if writer is not None:
        if tokenizer is not None and tokenizer is not writer.tokenizer:
            raise ValueError("tokenizer= and the TurnTokenizer's are not the same object")
        if options:
            raise ValueError(f"the TurnTokenizer decides {', '.join(sorted(options))}: set it there")
        return writer.stage.encoder.with_stop_ids(stops)
    if tokenizer is None:
        return None
    given: dict[str, Any] = {"tools": compose.tools, "tool_role": compose.stage.tool_role, **options}
    given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *stops)
    return ChatEncoder(tokenizer, **given)


def _end_of_turn(stages: Sequence[Stage]) -> int:
    """Return the place behind all stages that may add messages or end a trajectory."""
    last = max(
        place
        for place, stage in enumerate(stages)
        if not (stage.gives_rewards or isinstance(stage, RecordStage))
    )
    return last + 1


def _only(items: Sequence[Any], kind: type[Stage]) -> Any:
    """Return the transform whose stage is of a class; None without one."""
    found = [item for item in items if isinstance(getattr(item, "stage", None), kind)]
    if len(found) > 1:
        raise ValueError(f"there are {len(found)} transforms of the class {kind.name}; one is enough")
    return found[0] if found else None
