"""RecordedEngine: answers with recorded messages, unchanged."""

import asyncio

import pytest

from torchrl_agentic import Message
from torchrl_agentic.engines import ChatEngine, RecordedEngine

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SAID = (Message("assistant", "", (CALL,)), Message("assistant", "3", is_complete=False))


def ask(engine, *keys):
    async def main():
        return [await engine.chat([], tools=[], max_tokens=8, key=key) for key in keys]

    return asyncio.run(main())


def test_each_trajectory_gets_the_messages_of_its_task_unchanged_and_in_order():
    engine = RecordedEngine({"a/b": SAID, "c": SAID[1:]})
    assert isinstance(engine, ChatEngine)
    first, other, second, again = ask(engine, "a/b/0.0@c0", "c", "a/b/0.0@c0", "a/b/1.0@c0")
    assert first is SAID[0]
    assert second is other is SAID[1]
    assert again is SAID[0]


def test_what_is_not_in_the_record_is_an_error():
    engine = RecordedEngine({"a": SAID[:1]})
    with pytest.raises(ValueError, match="no recorded conversation is named 'b/0'"):
        ask(engine, "b/0")
    with pytest.raises(ValueError, match="ends after 1 messages"):
        ask(engine, "a", "a")


def test_updates_are_counted():
    engine = RecordedEngine({})
    assert asyncio.run(engine.update(None)) == engine.version == 1
    asyncio.run(engine.close())
