"""Replay recorded conversations: the model's turns from the record, the tools for real."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl.envs import Compose

from torchrl_agentic.collectors import Task
from torchrl_agentic.engines import ChatEngine
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message, Status, Turn
from torchrl_agentic.records import Recorders, Recording, TrajectoryRecord, as_hook
from torchrl_agentic.records.json_dump import REDACTED
from torchrl_agentic.rollout.evaluate import RenamedHook
from torchrl_agentic.rollout.generate import finished_trajectories
from torchrl_agentic.tokens.media import as_text
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.transforms import EndTrajectory, ToolCompose
from torchrl_agentic.transforms.conversation import StoredMessage


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a call.

    Attributes:
        text: Text of the result.
        status: Status of the result; None if it was not recorded.
    """

    text: str
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded conversation.

    Attributes:
        name: Name of the conversation.
        prompt: Messages before the model's first turn.
        turns: The model's messages.
        expected: Recorded results of each turn, in the order of the calls; None: not compared.
    """

    name: str
    prompt: tuple[Message, ...]
    turns: tuple[Message, ...]
    expected: tuple[tuple[Answered, ...] | None, ...]

    @classmethod
    def of(cls, name: str, messages: Sequence[Message]) -> Conversation:
        """Split a list of messages into turns; turns without any result are not compared.

        Args:
            name: Name of the conversation.
            messages: All messages.

        Raises:
            ValueError: If no message precedes the model's first turn, the model has no turn, or a message
                after it is neither the model's nor a tool's.
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
        """Return a trajectory of a dump; its calls are compared by status and text.

        Messages between its turns that are not tool results are omitted: tools do not see them.

        Raises:
            ValueError: If the record cannot be replayed, because it holds texts without turns, lacks turns or
                the prompt, or holds redacted secrets.
        """
        if any(turn.message.role == "output" for turn in record.turns):
            raise ValueError("it holds only texts, no turns and calls")
        if not record.turns or not record.prompt:
            raise ValueError("it has no turns" if not record.turns else "it has no prompt")
        if [turn.index for turn in record.turns] != list(range(len(record.turns))):
            raise ValueError("some of its turns are missing")
        if _is_redacted(record):
            raise ValueError(f"it holds redacted secrets ({REDACTED})")
        return cls(
            record.trajectory or record.request_id,
            record.prompt,
            tuple(turn.message for turn in record.turns),
            tuple(answers(turn) for turn in record.turns),
        )


def answers(turn: Turn) -> tuple[Answered, ...]:
    """Return the results of the calls of a turn."""
    return tuple(Answered(result.text, result.status) for result in turn.outcome.results)


def _is_redacted(record: TrajectoryRecord) -> bool:
    """Check whether secrets in calls or results were replaced when the record was written."""
    return any(
        REDACTED in turn.message.text
        or REDACTED in str(turn.message.tool_calls)
        or any(REDACTED in result.text for result in turn.outcome.results)
        for turn in record.turns
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A call whose result differs from the recorded one.

    Attributes:
        conversation: Name of the conversation.
        turn: Index of the turn, from 0.
        call: Index of the call in the turn, from 0.
        tool: Name of the tool; "" if the call was not made now.
        recorded: The recorded result; None if there was no such call.
        now: The result of the replay; None if there was no such call.
    """

    conversation: str
    turn: int
    call: int
    tool: str
    recorded: Answered | None
    now: Answered | None

    @property
    def is_status(self) -> bool:
        """Check whether more than the text differs: the status, or a call that only one of them has."""
        if self.recorded is None or self.now is None:
            return True
        return self.recorded.status is not None and self.recorded.status is not self.now.status


def differences(
    conversation: str, turn: Turn, recorded: Sequence[Answered], ignore: Sequence[re.Pattern[str]] = ()
) -> Iterator[Difference]:
    """Yield the calls of a turn whose results differ from the recorded ones.

    Args:
        conversation: Name of the conversation.
        turn: The turn of the replay.
        recorded: Recorded results, in the order of the calls.
        ignore: Patterns whose matches are removed from both texts before they are compared.
    """

    def compared(result: Answered | None) -> str:
        text = result.text if result is not None else ""
        for pattern in ignore:
            text = pattern.sub("", text)
        return text

    pairs = itertools.zip_longest(recorded, answers(turn))
    for index, (before, now) in enumerate(pairs):
        tool = turn.outcome.calls[index].tool if now is not None else ""
        found = Difference(conversation, turn.index, index, tool, before, now)
        if found.is_status or compared(before) != compared(now):
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
    """Run the tools of recorded conversations again, and return the calls whose results differ now.

    Args:
        conversations: The conversations, read as they are needed.
        tools: Tools that run the calls, as in `ToolCompose`.
        parser: Name of the format in which the model calls tools.
        rows: Number of conversations that run at the same time.
        ignore: Patterns whose matches are removed from results before they are compared, such as times and
            paths.
        toolsets: Toolsets whose tools run calls too.
        rate_limits: Limiter of each tool, by name.
        per_call_timeout: Time limit of a tool call in seconds; None: no limit.
        per_turn_timeout: Time limit of all calls of a turn in seconds; None: no limit.
        max_calls_per_turn: Upper bound on the tool calls that run in a turn; None: no bound.
        recorder: Records trajectories, as in `ToolCompose`, under the names of the conversations.
    """
    hook = as_hook(recorder)
    compose = ToolCompose(
        tools,
        parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=None if hook is None else _ReplayHook(hook),
    ).with_toolsets(toolsets)
    engine = _Recorded(rows)
    endless = 2**31  # the record ends each conversation
    transforms: list[Any] = [compose, EndTrajectory(max_turns=endless)]
    found: dict[int, list[Difference]] = {}
    try:
        for trajectory in finished_trajectories(
            Compose(*transforms),
            engine,
            None,
            engine.tasks(conversations),
            max_in_flight=rows,
            max_turns=endless,
        ):
            place, conversation = engine.pop(trajectory.name)
            found[place] = list(_compared(conversation, trajectory.turns, ignore))
    finally:
        compose.close()
    return [one for _, differences in sorted(found.items()) for one in differences]


class _Recorded(ChatEngine):
    """An engine that says the model's messages of recorded conversations.

    Args:
        max_concurrent: Number of conversations at the same time.
    """

    version = 0

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self._open: dict[int, Conversation] = {}
        self._turns: Counter[int] = Counter()

    def tasks(self, conversations: Iterable[Conversation]) -> Iterator[Task]:
        """Yield a task for each conversation, as they are needed."""
        for place, conversation in enumerate(conversations):
            self._open[place] = conversation
            messages = [StoredMessage.of(message) for message in conversation.prompt]
            yield Task(f"{place}:{conversation.name}", messages)

    def pop(self, key: str) -> tuple[int, Conversation]:
        """Return the place and the conversation of a trajectory that has ended, and forget it."""
        place = _place(key)
        del self._turns[place]
        return place, self._open.pop(place)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message | None:
        """Return the next recorded message of the model, or None after the last one."""
        del messages, tools, max_tokens
        place = _place(key)
        turns, turn = self._open[place].turns, self._turns[place]
        self._turns[place] += 1
        return turns[turn] if turn < len(turns) else None

    async def update(self, weights: Any) -> int:
        """Return 0: there are no weights."""
        del weights
        return self.version

    async def close(self) -> None:
        """Do nothing."""


def _place(key: str) -> int:
    """Return the place of a conversation, with which the names of its task and trajectory begin."""
    return int(key.partition(":")[0])


class _ReplayHook(RenamedHook):
    """Records trajectories under the names of their conversations, with the reasons of a replay."""

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin a record."""
        return _ReplayRecording(super().begin(trajectory, row))


class _ReplayRecording(Recording):
    """Passes the turns on, and replaces the reason by why the conversation ends there."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._last: Turn | None = None

    def record_turn(self, turn: Turn) -> None:
        """Record a turn."""
        self._last = turn
        self._recording.record_turn(turn)

    def finish(self, reason: str) -> None:
        """End the recording."""
        self._recording.finish(reason if self._last is None else _reason(self._last))


def _compared(
    conversation: Conversation, turns: Sequence[Turn], ignore: Sequence[re.Pattern[str]]
) -> Iterator[Difference]:
    """Yield the differences of a conversation, those behind an early end included."""
    for turn, expected in zip(turns, conversation.expected, strict=False):
        if expected is not None:
            yield from differences(conversation.name, turn, expected, ignore)
    yield from _unreached(conversation, len(turns) - 1)


def _unreached(conversation: Conversation, last: int) -> Iterator[Difference]:
    """Yield the recorded calls after the turn that now ends the conversation."""
    for index, expected in enumerate(conversation.expected[last + 1 :], last + 1):
        for call, recorded in enumerate(expected or ()):
            yield Difference(conversation.name, index, call, "", recorded, None)


def _reason(last: Turn) -> str:
    """Return why a conversation ends with a turn, as records name it."""
    if last.outcome.stop_requested:
        return "stop_tool"
    return "truncated" if last.outcome.calls else "no_calls"
