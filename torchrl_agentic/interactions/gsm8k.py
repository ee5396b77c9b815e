"""The user of verl's GSM8K example, who says whether an answer is right."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torchrl_agentic.interactions.base import Interaction, Reply
from torchrl_agentic.messages import Message
from torchrl_agentic.tools.answers import same_number

RIGHT = "Your answer is right."
WRONG = "Your answer is wrong. Look for the mistake, and answer again."


class Gsm8kInteraction(Interaction):
    """A user who compares the last number of each message with the right answer, until it is right.

    YAML files may also name it `verl.interactions.gsm8k_interaction.Gsm8kInteraction`. A row's
    `interaction_kwargs` hold the right answer: `{"name": "gsm8k", "ground_truth": "72"}`. A reply scores 1.0
    where the answer is right, which ends the conversation, and 0.0 where it is not.

    Args:
        ground_truth: The right answer, where a row does not say it.
        name: What rows call it.
    """

    def __init__(self, *, ground_truth: Any = None, name: str = "") -> None:
        self.ground_truth = ground_truth
        self.name = name

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, ground_truth: Any = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Open a user who knows the right answer of this trajectory.

        Raises:
            ValueError: If the row has none.
        """
        truth = self.ground_truth if ground_truth is None else ground_truth
        if truth is None:
            raise ValueError(
                "Gsm8kInteraction needs the right answer: give the data set's rows "
                'interaction_kwargs: {"name": "gsm8k", "ground_truth": …}'
            )
        yield Gsm8kInteraction(ground_truth=truth, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Judge the last message of the model."""
        said = next((message.text for message in reversed(messages) if message.role == "assistant"), "")
        if same_number(said, str(self.ground_truth)):
            return Reply(RIGHT, 1.0, is_over=True)
        return Reply(WRONG, 0.0)

    async def score(self, messages: Sequence[Message]) -> float:
        """Return 1.0 if the last answer is right, else 0.0: what earlier replies scored does not add up."""
        return (await self.respond(messages)).score or 0.0
