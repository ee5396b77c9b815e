"""The contract of every chat engine."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.engines.base import ChatEngine
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import Message
from torchrl_agentic.testing.contracts.engine_contract import check_members, check_usage


class ChatEngineContract:
    """Tests of a `ChatEngine`.

    Attributes:
        messages: The first messages of a conversation, which the engine answers, and whose continuation by
            `follow_up` it answers too, whatever the name of the trajectory.
        tools: Descriptions of the tools.
        max_tokens: Upper bound on the tokens of an answer.
        patience_s: Time limit for an event that must happen, in seconds.
    """

    messages: ClassVar[Sequence[Mapping[str, Any]]] = ({"role": "user", "content": "How much is 2 + 3?"},)
    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    max_tokens: ClassVar[int] = 64
    patience_s: ClassVar[float] = 60.0

    async def make(self) -> ChatEngine:
        """Return a fresh engine, made on the running event loop."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def engine(self) -> AsyncGenerator[ChatEngine]:
        """Yield a fresh engine, and close it."""
        engine = ensure_engine(await self.make())
        assert isinstance(engine, ChatEngine)
        try:
            yield engine
        finally:
            await engine.close()

    async def ask(
        self, engine: ChatEngine, key: str, messages: Sequence[Mapping[str, Any]] | None = None
    ) -> Message:
        """Return an answer within the time limit, and check its form.

        Args:
            engine: The engine.
            key: Name of the trajectory.
            messages: The conversation; None: `messages` of the contract.
        """
        asked = self.messages if messages is None else messages
        async with asyncio.timeout(self.patience_s):
            found = await engine.chat(asked, tools=self.tools, max_tokens=self.max_tokens, key=key)
        assert isinstance(found, Message)
        assert found.role == "assistant"
        assert found.content is None or isinstance(found.content, str | list)
        assert found.content is not None or found.tool_calls
        return found

    def follow_up(self, answer: Message) -> list[Mapping[str, Any]]:
        """Return the conversation after an answer: a result for each of its calls, or another question."""
        calls = list(answer.tool_calls)
        said = {"role": "assistant", "content": answer.content, **({"tool_calls": calls} if calls else {})}
        results = [{"role": "tool", "tool_call_id": str(call["id"]), "content": "5"} for call in calls]
        return [*self.messages, said, *(results or [{"role": "user", "content": "Are you sure?"}])]

    @pytest.mark.asyncio
    async def test_it_has_the_members_of_a_chat_engine(self, engine: ChatEngine) -> None:
        check_members(engine)
        json.dumps(dict(engine.sampling), allow_nan=False)

    @pytest.mark.asyncio
    async def test_requests_are_counted_in_all_and_by_trajectory_or_not_at_all(
        self, engine: ChatEngine
    ) -> None:
        before = engine.usage
        await self.ask(engine, "task/0")
        check_usage(engine, before, "task/0")

    @pytest.mark.asyncio
    async def test_the_tokens_of_a_conversation_are_a_number_or_never_known(self, engine: ChatEngine) -> None:
        await self.ask(engine, "task/0")
        found, of_none = engine.conversation_tokens("task/0"), engine.conversation_tokens("task/1")
        assert found is None if of_none is None else found is not None and found >= of_none == 0

    @pytest.mark.asyncio
    async def test_an_engine_answers_after_it_was_seeded(self, engine: ChatEngine) -> None:
        engine.set_seed(7)
        await self.ask(engine, "task/0")

    @pytest.mark.asyncio
    async def test_it_answers_a_question_and_what_follows_the_answer(self, engine: ChatEngine) -> None:
        first = await self.ask(engine, "task/0")
        second = await self.ask(engine, "task/0", self.follow_up(first))
        ids = [call.get("id") for call in (*first.tool_calls, *second.tool_calls)]
        assert all(isinstance(call_id, str) and call_id for call_id in ids)
        assert len(set(ids)) == len(ids)

    @pytest.mark.asyncio
    async def test_a_request_changes_neither_the_messages_nor_the_tools(self, engine: ChatEngine) -> None:
        messages, tools = copy.deepcopy(list(self.messages)), copy.deepcopy(list(self.tools))
        async with asyncio.timeout(self.patience_s):
            await engine.chat(messages, tools=tools, max_tokens=self.max_tokens, key="task/0")
        assert messages == list(self.messages)
        assert tools == list(self.tools)

    @pytest.mark.asyncio
    async def test_many_requests_at_once_are_all_answered(self, engine: ChatEngine) -> None:
        count = min(2 * engine.max_concurrent + 1, 40)
        found = await asyncio.gather(*(self.ask(engine, f"task/{number}") for number in range(count)))
        assert len(found) == count

    @pytest.mark.asyncio
    async def test_cancelled_requests_harm_no_other_and_free_their_places(self, engine: ChatEngine) -> None:
        count = min(2 * engine.max_concurrent, 32)
        doomed = [asyncio.create_task(self.ask(engine, f"doomed/{number}")) for number in range(count)]
        others = [asyncio.create_task(self.ask(engine, f"task/{number}")) for number in range(4)]
        for _ in range(8):  # some begin, and some wait
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        ended = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(one, Message | asyncio.CancelledError) for one in ended), ended
        await asyncio.gather(*others)
        await asyncio.gather(*(self.ask(engine, f"again/{number}") for number in range(count)))

    @pytest.mark.asyncio
    async def test_an_update_raises_the_version_by_one(self, engine: ChatEngine) -> None:
        before = engine.version
        assert await engine.update(None) == before + 1
        assert engine.version == before + 1
        await self.ask(engine, "task/0")

    @pytest.mark.asyncio
    async def test_closing_twice_is_closing_once_and_ends_what_runs(self) -> None:
        engine = await self.make()
        tasks = [asyncio.create_task(self.ask(engine, f"task/{number}")) for number in range(8)]
        await asyncio.sleep(0)
        async with asyncio.timeout(self.patience_s):
            await engine.close()
            await engine.close()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, Message | InfrastructureError) for one in ended), ended
        with pytest.raises(InfrastructureError):
            await self.ask(engine, "late")
