"""Replaying conversations: the model's turns from the record, the tools for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message, Turn
from torchrl_agentic.rollout.scripted import ScriptedPolicy, message_fields
from torchrl_agentic.tool import Toolset
from torchrl_agentic.transforms import ToolCompose
from torchrl_agentic.transforms.history import as_history
from torchrl_agentic.transforms.media import as_text


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded conversation.

    What it began with, what the model said, what the tools answered after each turn.
    expected: per turn the results that were recorded; a turn without any is not compared.
    """

    name: str
    prompt: tuple[Message, ...]
    turns: tuple[Message, ...]
    expected: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, name: str, messages: Sequence[Message]) -> Conversation:
        """Split a list of messages.

        Raises:
            ValueError: nothing precedes the model's first turn, it says nothing, or somebody else than a tool
                answers.
        """
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        if first == 0 or first == len(messages):
            raise ValueError("a conversation is a prompt, then at least one turn of the assistant")
        turns: list[Message] = []
        expected: list[list[str]] = []
        for message in messages[first:]:
            if message.role == "assistant":
                turns.append(message)
                expected.append([])
            elif message.role == "tool":
                expected[-1].append(as_text(message.content))
            else:
                raise ValueError(f"only tools can answer in a replay; got a message of role {message.role!r}")
        return cls(name, tuple(messages[:first]), tuple(turns), tuple(map(tuple, expected)))


@dataclass(frozen=True, slots=True)
class Difference:
    """A turn whose tools answered otherwise than recorded."""

    conversation: str
    turn: int
    recorded: tuple[str, ...]
    now: tuple[str, ...]


def replay(
    conversations: Sequence[Conversation],
    tools: Sequence[Any],
    *,
    parser: str = "hermes",
    toolsets: Sequence[Toolset] = (),
    rate_limits: Mapping[str, Limiter] | None = None,
    per_call_timeout: float | None = 30.0,
    per_turn_timeout: float | None = None,
    max_calls_per_turn: int | None = None,
    on_turn: Callable[[str, Turn], None] | None = None,
) -> list[Difference]:
    """Run conversations side by side as the rows of one batch, and say where the tools answer otherwise now.

    on_turn: called with the name of the conversation and each turn, as they come.
    """
    differences: list[Difference] = []
    stopped: set[int] = set()

    def record(turn: Turn) -> None:
        conversation = conversations[turn.row]
        if turn.index >= len(conversation.turns) or turn.row in stopped:
            return  # this row waits for the longer ones
        expected = conversation.expected[turn.index]
        now = tuple(result.text for result in turn.outcome.results)
        if expected and expected != now:
            differences.append(Difference(conversation.name, turn.index, expected, now))
        if turn.outcome.stop_requested:
            stopped.add(turn.row)
        if on_turn is not None:
            on_turn(conversation.name, turn)

    compose = ToolCompose(
        tools,
        parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=record,
    ).with_toolsets(toolsets)
    env = TransformedEnv(ChatEnv(batch_size=(len(conversations),)), compose)
    policy = ScriptedPolicy([conversation.turns for conversation in conversations])
    chats = [[message_fields(message) for message in conversation.prompt] for conversation in conversations]
    try:
        td = env.reset(TensorDict({}, batch_size=[len(conversations)]).set("query", as_history(chats)))
        for _ in range(max(len(conversation.turns) for conversation in conversations)):
            td = env.step_mdp(env.step(policy(td)))
    finally:
        env.close()
    return differences
