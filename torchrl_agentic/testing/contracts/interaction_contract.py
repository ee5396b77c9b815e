"""The contract of every simulated user."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.interactions import Reply, as_interaction
from torchrl_agentic.interactions.user_tool import UserTool, final_score, reply, set_arguments, tool_name
from torchrl_agentic.messages import Message
from torchrl_agentic.testing.contracts.tool_contract import watch_sessions


class InteractionContract:
    """Tests of an `Interaction`, or of an object that `as_interaction` accepts.

    Attributes:
        kwargs: Arguments of the interaction in the data set's row.
        said: First message of the model; the user must answer it or end the conversation.
    """

    kwargs: ClassVar[Mapping[str, Any]] = {}
    said: ClassVar[str] = "Hello. What can I do for you?"

    def make(self) -> Any:
        """Return a fresh interaction to test."""
        raise NotImplementedError

    @property
    def messages(self) -> Sequence[Message]:
        """Return the conversation that the user answers."""
        return (Message("user", "Hi"), Message("assistant", self.said))

    @pytest_asyncio.fixture
    async def dispatcher(self) -> AsyncGenerator[Dispatcher]:
        """Yield a dispatcher that holds the interaction."""
        dispatcher = Dispatcher([UserTool(as_interaction(self.make()), "user:x")], validate_inputs=False)
        yield dispatcher
        await dispatcher.close()

    def session(self, dispatcher: Dispatcher, trajectory: str = "t") -> Session:
        """Begin a trajectory whose row holds `kwargs`.

        Args:
            dispatcher: The dispatcher that holds the interaction.
            trajectory: Name of the trajectory.
        """
        session = dispatcher.session(trajectory)
        set_arguments(session, self.kwargs)
        return session

    @pytest.mark.asyncio
    async def test_it_answers_or_leaves(self, dispatcher: Dispatcher) -> None:
        async with self.session(dispatcher) as session:
            said = await reply(session, "x", self.messages)
        assert isinstance(said, Reply)
        assert said.text or said.is_over

    @pytest.mark.asyncio
    async def test_trajectories_run_side_by_side_and_do_not_hear_each_other(
        self, dispatcher: Dispatcher
    ) -> None:
        """Each gets a first reply, also while the others are running."""
        sessions = [self.session(dispatcher, f"t{index}") for index in range(3)]
        said = await asyncio.gather(*(reply(session, "x", self.messages) for session in sessions))
        assert all(one.text or one.is_over for one in said)
        await asyncio.gather(*(session.close() for session in sessions))

    @pytest.mark.asyncio
    async def test_another_one_s_end_does_not_end_a_conversation(self, dispatcher: Dispatcher) -> None:
        first, second = self.session(dispatcher, "t0"), self.session(dispatcher, "t1")
        await reply(first, "x", self.messages)
        await reply(second, "x", self.messages)
        await first.close()
        await final_score(second, "x", self.messages)  # raises UserFailed if the conversation has ended
        await second.close()

    @pytest.mark.asyncio
    async def test_it_judges_a_conversation_that_it_took_no_part_in(self, dispatcher: Dispatcher) -> None:
        """A tool may end a trajectory before the user has spoken."""
        async with self.session(dispatcher) as session:
            score = await final_score(session, "x", self.messages)
        assert score is None or isinstance(score, float)

    @pytest.mark.asyncio
    async def test_a_session_closes_once_in_the_task_that_opened_it(self) -> None:
        interaction = as_interaction(self.make())
        seen = watch_sessions(interaction)
        dispatcher = Dispatcher([UserTool(interaction, tool_name("x"))], validate_inputs=False)
        session = self.session(dispatcher)
        await reply(session, "x", self.messages)
        await session.close()
        await session.close()
        await dispatcher.close()
        assert [event for event, _ in seen] == ["open", "close"]
        assert seen[0][1] is seen[1][1]

    def test_hook_can_be_pickled(self) -> None:
        made = as_interaction(self.make())
        copy = pickle.loads(pickle.dumps(made))
        assert (type(copy), copy.name) == (type(made), made.name)
