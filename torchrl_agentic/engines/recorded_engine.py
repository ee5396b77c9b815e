"""`RecordedEngine`: answers with the messages of recorded conversations, to run their tool calls again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.engines.base import ChatEngine
from torchrl_agentic.engines.request_checks import closed_error
from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import Message


class RecordedEngine(ChatEngine):
    """An engine that answers each trajectory with the messages of its record, one after the other, unchanged.

    Args:
        answers: Messages of the model by name of the trajectory or of its task ("task" for "task/0"); read at
            each request, so that conversations may be added and removed at any time.
        max_concurrent: Number of requests that a collector may make at once.

    Attributes:
        version: Number of updates so far.
        max_concurrent: Number of requests that a collector may make at once.
    """

    def __init__(self, answers: Mapping[str, Sequence[Message]], *, max_concurrent: int = 256) -> None:
        check_count("max_concurrent", max_concurrent, optional=False)
        self.version = 0
        self.max_concurrent = max_concurrent
        self._answers = answers
        self._turns: dict[str, int] = {}
        self._is_closed = False

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next recorded message of a trajectory.

        Args:
            messages: Ignored.
            tools: Ignored.
            max_tokens: Ignored.
            key: Name of the trajectory.

        Raises:
            InfrastructureError: If the engine is closed.
            ValueError: If there is no such record, or no message is left in it.
        """
        if self._is_closed:
            raise closed_error(self)
        name = key
        while name not in self._answers and "/" in name:
            name = name.rpartition("/")[0]
        if name not in self._answers:
            raise ValueError(f"no recorded conversation is named {key!r}")
        recorded, turn = self._answers[name], self._turns.get(key, 0)
        if turn >= len(recorded):
            raise ValueError(
                f"the record of {key!r} ends after {turn} messages of the model: bound the trajectory by "
                "Task(max_turns=...)"
            )
        self._turns[key] = turn + 1
        return recorded[turn]

    async def update(self, weights: Any) -> int:
        """Count an update.

        Args:
            weights: Ignored.
        """
        self.version += 1
        return self.version

    async def close(self) -> None:
        """Refuse all later requests."""
        self._is_closed = True
