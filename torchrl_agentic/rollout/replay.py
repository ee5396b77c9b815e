"""Replaying conversations: the model's turns from the record, the tools for real."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message, Status, Turn
from torchrl_agentic.records import Recorders, TrajectoryHook, TrajectoryRecord, as_hook
from torchrl_agentic.records.json_dump import REDACTED
from torchrl_agentic.rollout.scripted import ScriptedPolicy, message_fields
from torchrl_agentic.tokens.media import as_text
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.transforms import ToolCompose
from torchrl_agentic.transforms.history import as_history


@dataclass(frozen=True, slots=True)
class Answered:
    """How a call was answered. status: None where that was not recorded."""

    text: str
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded conversation.

    What it began with, what the model said, what the tools answered after each turn.
    expected: per turn the results that were recorded, in the order of the calls; None: not compared.
    """

    name: str
    prompt: tuple[Message, ...]
    turns: tuple[Message, ...]
    expected: tuple[tuple[Answered, ...] | None, ...]

    @classmethod
    def of(cls, name: str, messages: Sequence[Message]) -> Conversation:
        """Split a list of messages; turns without any result are not compared.

        Raises:
            ValueError: nothing precedes the model's first turn, it says nothing, or somebody else than a tool
                answers.
        """
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        if first == 0 or first == len(messages):
            raise ValueError("a conversation is a prompt, then at least one turn of the assistant")
        turns: list[Message] = []
        expected: list[list[Answered]] = []
        for message in messages[first:]:
            if message.role == "assistant":
                turns.append(message)
                expected.append([])
            elif message.role == "tool":
                expected[-1].append(Answered(as_text(message.content)))
            else:
                raise ValueError(f"only tools can answer in a replay; got a message of role {message.role!r}")
        return cls(name, tuple(messages[:first]), tuple(turns), tuple(tuple(e) or None for e in expected))

    @classmethod
    def of_record(cls, record: TrajectoryRecord) -> Conversation:
        """Take a trajectory of a dump: its calls are compared by status and text.

        Messages of others between its turns are left out: tools do not see them.

        Raises:
            ValueError: it cannot be replayed, as the message says: it holds only texts, not all of its turns,
                nothing to begin with, or secrets that were not written down.
        """
        if any(turn.message.role == "output" for turn in record.turns):
            raise ValueError("it holds texts only, no turns and calls")
        if not record.turns or not record.prompt:
            raise ValueError("it has no turns" if not record.turns else "it does not say what it began with")
        if [turn.index for turn in record.turns] != list(range(len(record.turns))):
            raise ValueError("some of its turns are missing")
        if _is_redacted(record):
            raise ValueError(f"it holds secrets that were not written down ({REDACTED})")
        return cls(
            record.trajectory or record.request_id,
            record.prompt,
            tuple(turn.message for turn in record.turns),
            tuple(answers(turn) for turn in record.turns),
        )


def answers(turn: Turn) -> tuple[Answered, ...]:
    """Say how the calls of a turn were answered."""
    return tuple(Answered(result.text, result.status) for result in turn.outcome.results)


def _is_redacted(record: TrajectoryRecord) -> bool:
    """Whether what a call was made of, or answered with, is not all there."""
    return any(
        REDACTED in turn.message.text
        or REDACTED in str(turn.message.tool_calls)
        or any(REDACTED in result.text for result in turn.outcome.results)
        for turn in record.turns
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A call that was answered otherwise than recorded. turn, call: from 0.

    recorded, now: None where there is no such call.
    """

    conversation: str
    turn: int
    call: int
    tool: str
    recorded: Answered | None
    now: Answered | None

    @property
    def is_status(self) -> bool:
        """Whether it is more than another text: another status, or a call that only one of them has."""
        if self.recorded is None or self.now is None:
            return True
        return self.recorded.status is not None and self.recorded.status is not self.now.status


def differences(
    conversation: str, turn: Turn, recorded: Sequence[Answered], ignore: Sequence[re.Pattern[str]] = ()
) -> Iterator[Difference]:
    """Compare the calls of a turn with what was recorded. ignore: what does not count in texts."""

    def told(one: Answered | None) -> str:
        text = one.text if one is not None else ""
        for pattern in ignore:
            text = pattern.sub("", text)
        return text

    pairs = itertools.zip_longest(recorded, answers(turn))
    for index, (before, now) in enumerate(pairs):
        tool = turn.outcome.calls[index].tool if now is not None else ""
        found = Difference(conversation, turn.index, index, tool, before, now)
        if found.is_status or told(before) != told(now):
            yield found


def replay(
    conversations: Iterable[Conversation],
    tools: Sequence[Any],
    *,
    parser: str = "hermes",
    rows: int = 64,
    ignore: Sequence[re.Pattern[str]] = (),
    toolsets: Sequence[Toolset] = (),
    rate_limits: Mapping[str, Limiter] | None = None,
    per_call_timeout: float | None = 30.0,
    per_turn_timeout: float | None = None,
    max_calls_per_turn: int | None = None,
    recorder: Recorders = None,
) -> list[Difference]:
    """Run conversations as the rows of a batch, and say which calls are answered otherwise now.

    rows: how many run side by side; conversations are taken as they are needed. ignore: what they match in
    results is left out of both before they are compared, such as times and paths. recorder: as for
    `ToolCompose`; trajectories have the names of the conversations.
    """
    waiting = iter(conversations)
    batch = list(itertools.islice(waiting, rows))
    if not batch:
        return []
    size = len(batch)
    stage = _Stage(as_hook(recorder) or TrajectoryHook(), ignore)
    compose = ToolCompose(
        tools,
        parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=stage.record,
    ).with_toolsets(toolsets)
    env = TransformedEnv(ChatEnv(batch_size=(size,)), compose)
    try:
        while batch:
            stage.begin(batch)
            empty = [Conversation("", batch[0].prompt, (), ())] * (size - len(batch))
            filled = [*batch, *empty]  # rows without a conversation say nothing
            policy = ScriptedPolicy([conversation.turns for conversation in filled])
            chats = [[message_fields(message) for message in one.prompt] for one in filled]
            td = env.reset(TensorDict({}, batch_size=[size]).set("query", as_history(chats)))
            for _ in range(max(len(conversation.turns) for conversation in batch)):
                td = env.step_mdp(env.step(policy(td)))
            batch = list(itertools.islice(waiting, size))
    finally:
        env.close()
    return stage.differences


class _Stage:
    """The conversations that run at the moment, one a row, and what was found so far."""

    def __init__(self, hook: TrajectoryHook, ignore: Sequence[re.Pattern[str]]) -> None:
        self.differences: list[Difference] = []
        self._hook, self._ignore = hook, ignore

    def begin(self, conversations: Sequence[Conversation]) -> None:
        """Begin with other conversations."""
        self._conversations = conversations
        self._recordings = [self._hook.begin(item.name, row) for row, item in enumerate(conversations)]
        self._running = set(range(len(conversations)))

    def record(self, turn: Turn) -> None:
        """Compare a turn, and record it."""
        if turn.row not in self._running:
            return  # this row waits for the longer ones
        conversation, recording = self._conversations[turn.row], self._recordings[turn.row]
        expected = conversation.expected[turn.index]
        if expected is not None:
            self.differences += differences(conversation.name, turn, expected, self._ignore)
        recording.record_turn(turn)
        if turn.outcome.stop_requested or turn.index == len(conversation.turns) - 1:
            self._running.remove(turn.row)
            self.differences += _unreached(conversation, turn.index)
            recording.finish(_reason(turn))


def _unreached(conversation: Conversation, last: int) -> Iterator[Difference]:
    """Give the recorded calls behind a turn with which it now ends."""
    for index, expected in enumerate(conversation.expected[last + 1 :], last + 1):
        for call, recorded in enumerate(expected or ()):
            yield Difference(conversation.name, index, call, "", recorded, None)


def _reason(last: Turn) -> str:
    """Say why a conversation ends with a turn."""
    if last.outcome.stop_requested:
        return "stop_tool"
    return "truncated" if last.outcome.calls else "no_calls"
