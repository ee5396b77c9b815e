"""Replaying conversations: the model's turns from the record, the tools for real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message, Turn
from torchrl_agentic.records import Recorders, TrajectoryHook, as_hook
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
    recorder: Recorders = None,
) -> list[Difference]:
    """Run conversations side by side as the rows of one batch, and say where the tools answer otherwise now.

    recorder: as for `ToolCompose`; trajectories have the names of the conversations.
    """
    differences: list[Difference] = []
    hook = as_hook(recorder) or TrajectoryHook()
    recordings = [hook.begin(item.name, row) for row, item in enumerate(conversations)]
    ended: set[int] = set()

    def record(turn: Turn) -> None:
        conversation = conversations[turn.row]
        if turn.row in ended:
            return  # this row waits for the longer ones
        expected = conversation.expected[turn.index]
        now = tuple(result.text for result in turn.outcome.results)
        if expected and expected != now:
            differences.append(Difference(conversation.name, turn.index, expected, now))
        recordings[turn.row].turn(turn)
        if turn.outcome.stop_requested or turn.index == len(conversation.turns) - 1:
            ended.add(turn.row)
            recordings[turn.row].finish(_reason(turn))

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


def _reason(last: Turn) -> str:
    """Say why a conversation ends with a turn."""
    if last.outcome.stop_requested:
        return "stop_tool"
    return "truncated" if last.outcome.calls else "no_calls"
