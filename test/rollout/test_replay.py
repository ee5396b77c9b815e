"""A replay runs the recorded turns with the tools of today, and finds each call answered otherwise."""

import json
import re
from dataclasses import replace

import pytest

from torchrl_agentic import ToolError, tool
from torchrl_agentic.messages import Message, Status
from torchrl_agentic.records import Recorder, TrajectoryRecord, read_records
from torchrl_agentic.rollout import Conversation, replay


def call(name, **args):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>"


def chat(name, *said):
    """A conversation in which nothing is expected yet."""
    turns = tuple(Message("assistant", text) for text in said)
    return Conversation(name, (Message("user", "q"),), turns, (None,) * len(turns))


class Counter:
    """Counts its calls of each trajectory."""

    def __init__(self, start=0):
        self.name, self.description = "count", "Count."
        self.input_schema = {"type": "object", "properties": {}}
        self.start = start

    def session(self, trajectory):
        import contextlib

        @contextlib.asynccontextmanager
        async def opened():
            yield Counter(self.start)

        return opened()

    async def run(self, args, ctx):
        from torchrl_agentic import ToolResult

        self.start += 1
        return ToolResult.from_text(f"{self.start} calls")


@tool
def half(n: int) -> str:
    """Halve a number."""
    if n % 2:
        raise ToolError(f"{n} is odd")
    return f"{n // 2} after 3.5 s"


CHATS = [
    chat("a", call("half", n=4) + call("half", n=3), "done"),
    chat("b", call("count"), call("count") + call("half", n=2), "done"),
    chat("c", "nothing to do"),
    chat("d", call("count"), call("gone"), "<tool_call>\n{oops\n</tool_call>", "done"),
    chat("e", call("count")),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[TrajectoryRecord]:
    path = tmp_path_factory.mktemp("replay") / "dump.jsonl"
    with Recorder(path) as recorder:
        replay(CHATS, [half, Counter()], recorder=recorder)
    found = {
        record.trajectory: record for record in read_records(path) if isinstance(record, TrajectoryRecord)
    }
    return [found[conversation.name] for conversation in CHATS]


def conversations(records):
    return [Conversation.of_record(record) for record in records]


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_equal_results_do_not_differ_for_any_number_of_rows(recorded, rows):
    """State is fresh in each trajectory: otherwise the counter would continue."""
    assert replay(conversations(recorded), [half, Counter()], rows=rows) == []


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_each_call_that_is_answered_otherwise_is_named_with_its_place(recorded, rows):
    found = replay(conversations(recorded), [half, Counter(start=1)], rows=rows)
    places = {(one.conversation, one.turn, one.call, one.tool) for one in found}
    assert places == {("b", 0, 0, "count"), ("b", 1, 0, "count"), ("d", 0, 0, "count"), ("e", 0, 0, "count")}
    first = next(one for one in found if one.conversation == "b")
    assert first.recorded is not None
    assert first.now is not None
    assert (first.recorded.text, first.now.text, first.is_status) == ("1 calls", "2 calls", False)


def test_different_status_is_distinguished_from_different_text(recorded):
    def altered(record, **changes):
        (first, *others) = record.turns
        results = (replace(first.outcome.results[0], **changes), *first.outcome.results[1:])
        return replace(
            record, turns=(replace(first, outcome=replace(first.outcome, results=results)), *others)
        )

    record = altered(recorded[0], status=Status.TIMEOUT)
    (found,) = replay(conversations([record]), [half, Counter()])
    assert (found.is_status, found.recorded.status, found.now.status) == (True, Status.TIMEOUT, Status.OK)
    assert found.recorded.text == found.now.text


def test_calls_that_were_not_read_then_or_are_not_now_differ(recorded):
    found = replay(conversations(recorded), [half, Counter()], parser="xml")
    assert {(one.turn, one.call) for one in found if one.conversation == "a"} == {(0, 0), (0, 1)}
    assert all(one.now is None and one.is_status for one in found)
    plain = replace(
        recorded[2], turns=(replace(recorded[2].turns[0], message=Message("assistant", call("count"))),)
    )
    (new,) = replay(conversations([plain]), [half, Counter()])
    assert (new.recorded, new.now.text, new.tool) == (None, "1 calls", "count")


def test_calls_behind_a_turn_with_which_it_now_ends_differ(recorded):
    @tool(name="half")
    def stopping(n: int) -> str:
        """Stop."""
        from torchrl_agentic import StopSignal

        raise StopSignal("enough")

    first = chat("s", call("half", n=4), call("count"), "done")
    record = replace(
        recorded[1], turns=(replace(recorded[0].turns[0], message=first.turns[0]), *recorded[1].turns[1:])
    )
    found = replay(conversations([record]), [stopping, Counter()])
    assert [(one.turn, one.call, one.now is None) for one in found][-2:] == [(1, 0, True), (1, 1, True)]


def test_ignored_text_does_not_differ_but_other_text_does(recorded):
    @tool(name="half")
    def slower(n: int) -> str:
        """Halve a number, and take another time."""
        if n % 2:
            raise ToolError(f"{n} is odd")
        return f"{n // 2} after 17.2 s"

    seconds = re.compile(r"[\d.]+ s\b")
    assert len(replay(conversations(recorded), [slower, Counter()])) == 2
    assert replay(conversations(recorded), [slower, Counter()], ignore=[seconds]) == []
    assert len(replay(conversations(recorded), [slower, Counter(1)], ignore=[seconds])) == 4


def test_replayed_records_equal_the_dump(recorded, tmp_path):
    with Recorder(tmp_path / "again.jsonl") as recorder:
        replay(conversations(recorded), [half, Counter()], rows=2, recorder=recorder)
    again = {record.trajectory: record for record in read_records(tmp_path / "again.jsonl")}
    assert set(again) == {"a", "b", "c", "d", "e"}
    for record in recorded:
        assert list(again[record.trajectory].messages) == list(record.messages)


def test_conversations_are_taken_as_they_are_needed(recorded):
    taken = []

    def reading():
        for record in recorded:
            taken.append(record.trajectory)
            yield Conversation.of_record(record)

    at_turn = []
    replay(reading(), [half, Counter()], rows=2, recorder=lambda turn: at_turn.append(len(taken)))
    assert at_turn[0] <= 2
    assert at_turn[-1] == 5


def test_empty_replay_has_no_differences():
    assert replay([], [half]) == []


def test_secrets_that_were_not_written_down_cannot_be_replayed(tmp_path):
    @tool
    def login(password: str) -> str:
        """Log in."""
        return f"welcome, {password}"

    with Recorder(tmp_path / "r.jsonl") as recorder:
        replay([chat("s", call("login", password="hunter2222"))], [login], recorder=recorder)
    (record,) = read_records(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"holds redacted secrets"):
        Conversation.of_record(record)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: replace(record, turns=()), "no turns"),
        (lambda record: replace(record, turns=record.turns[1:]), "no prompt"),
        (lambda record: replace(record, turns=(record.turns[0], record.turns[2])), "missing"),
    ],
)
def test_a_record_that_is_not_all_there_says_so(recorded, change, words):
    with pytest.raises(ValueError, match=words):
        Conversation.of_record(change(recorded[1]))


def test_a_dump_of_texts_cannot_be_replayed(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"input": "q", "output": "a"}\n')
    (record,) = read_records(tmp_path)
    with pytest.raises(ValueError, match="only texts"):
        Conversation.of_record(record)
