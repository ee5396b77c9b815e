"""`BoundedChat`: an engine of messages with a bound on the tokens of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.engines.base import ChatEngine, ContextExceeded
from torchrl_agentic.engines.duck_typed_engine import EngineWrapper
from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import Message


class BoundedChat(EngineWrapper, ChatEngine):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `ChatEngine` that ends a trajectory at a number of tokens, by the usage that responses report.

    The tokens of a message are known only by the next response. So a request is refused once the latest
    response has reached the bound, and an answer may take what the bound leaves; tool results between them
    may exceed it.

    Args:
        engine: A `ChatEngine` with `conversation_tokens`, such as `OpenAIEngine`.
        max_tokens: Upper bound on the tokens of a trajectory, prompt and answers together.
    """

    def __init__(self, engine: ChatEngine, max_tokens: int) -> None:
        check_count("max_trajectory_tokens", max_tokens, optional=False)
        super().__init__(engine)
        self._max_tokens = max_tokens

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model; see `ChatEngine.chat`.

        Raises:
            ContextExceeded: If the latest response of the trajectory has reached the bound.
        """
        left = self._max_tokens - (self.target.conversation_tokens(key) or 0)
        if left <= 0:
            raise ContextExceeded(f"{key} has reached max_trajectory_tokens={self._max_tokens}")
        bound = min(max_tokens, left)
        return await self.target.chat(messages, tools=tools, max_tokens=bound, key=key)
