"""Replay recorded conversations: take the model's messages from the record, and run the tools again."""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl.envs import Compose

from torchrl_agentic.engines.recorded_engine import RecordedEngine
from torchrl_agentic.errors import check_count
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message, Status, StoredMessage, Turn
from torchrl_agentic.records import (
    Origin,
    Recorders,
    Recording,
    TrajectoryHook,
    TrajectoryRecord,
    as_hook,
)
from torchrl_agentic.records.json_dump import REDACTED
from torchrl_agentic.rollout.generate import in_order
from torchrl_agentic.tokens.encoding import as_text
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.transforms import EndTrajectory, ToolCompose

MAX_TURNS = 1_000_000
"""Bound on turns where the record has its own."""


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
        """True if more than the text differs: the status, or whether there is such a call."""
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
    check_count("rows", rows, optional=False)
    hook = as_hook(recorder)
    compose = ToolCompose(
        tools,
        parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=None if hook is None else _ReplayRecords(hook),
    ).with_toolsets(toolsets)
    answers: dict[str, tuple[Message, ...]] = {}
    running: deque[Conversation] = deque()
    copies: Counter[str] = Counter()

    def tasks() -> Iterator[Task]:
        for conversation in conversations:
            copies[conversation.name] += 1
            number = copies[conversation.name]
            name = conversation.name if number == 1 else f"{conversation.name} ({number})"
            running.append(conversation)
            answers[name] = conversation.turns
            messages = [StoredMessage.of(message) for message in conversation.prompt]
            yield Task(name, messages, max_turns=len(conversation.turns))

    found: list[Difference] = []
    # A message without calls ends nothing: the record may go on.
    transforms: Any = Compose(compose, EndTrajectory(max_turns=MAX_TURNS))  # pyright: ignore[reportCallIssue]
    engine = RecordedEngine(answers)
    for trajectory in in_order(transforms, engine, None, tasks(), max_in_flight=rows, max_turns=MAX_TURNS):
        conversation = running.popleft()
        del answers[trajectory.task.name]
        for turn in trajectory.turns:
            expected = conversation.expected[turn.index]
            if expected is not None:
                found += differences(conversation.name, turn, expected, ignore)
        found += _unreached(conversation, len(trajectory.turns) - 1)
    return found


class _ReplayRecords(TrajectoryHook):
    """Records the trajectories of a collector under the names of their tasks."""

    def __init__(self, hook: TrajectoryHook) -> None:
        self._hook = hook

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        return _ReplayRecording(self._hook.begin(trajectory.rpartition("/")[0], row))


class _ReplayRecording(Recording):
    """Ends a recording with the reason of the conversation, not with the bound of its task."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._last: Turn | None = None

    def record_turn(self, turn: Turn) -> None:
        self._last = turn
        self._recording.record_turn(turn)

    def add_messages(self, messages: Sequence[Message]) -> None:
        self._recording.add_messages(messages)

    def annotate(self, **facts: Any) -> None:
        self._recording.annotate(**facts)

    def set_origin(self, origin: Origin) -> None:
        self._recording.set_origin(origin)

    def finish(self, reason: str) -> None:
        if self._last is not None and reason == "max_turns":
            reason = "truncated" if self._last.outcome.calls else "no_calls"
        self._recording.finish(reason)


def _unreached(conversation: Conversation, last: int) -> Iterator[Difference]:
    """Yield the recorded calls after the turn that now ends the conversation."""
    for index, expected in enumerate(conversation.expected[last + 1 :], last + 1):
        for call, recorded in enumerate(expected or ()):
            yield Difference(conversation.name, index, call, "", recorded, None)
