"""`TokenChat`: an engine that takes tokens, used with messages: a judge on your own vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.engines.duck_typed_engine import EngineWrapper, ensure_engine
from torchrl_agentic.messages import Message
from torchrl_agentic.parsers.base import escape_control_tokens
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.tokens.writer import ChatEncoder


class TokenChat(EngineWrapper, ChatEngine):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `ChatEngine` over an `Engine` and the tokenizer of its model.

    Control tokens in messages are escaped, so that a text cannot end its message and begin another one.

    Args:
        engine: Samples the answers.
        tokenizer: Tokenizer of its model, with a chat template.
        options: Further arguments of `ChatEncoder`, such as `template_kwargs` and `stop_token_ids`.

    Raises:
        TypeError: If the engine takes messages.
    """

    def __init__(self, engine: Engine, tokenizer: Any, **options: Any) -> None:
        found = ensure_engine(engine)
        if not isinstance(found, Engine):
            raise TypeError(
                f"TokenChat takes an engine of tokens; {found.describe()} answers messages already"
            )
        super().__init__(found)
        given: dict[str, Any] = {"use_inference_chat_template": True, **options}
        self._encoder = ChatEncoder(tokenizer, **given).with_stop_ids(found.stop_token_ids)
        self._markers = tuple(control_tokens_of(tokenizer).values())

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model; see `ChatEngine.chat`.

        Raises:
            ValueError: If there are tools: pass them to the constructor, as `tools=`.
        """
        if tools:
            raise ValueError("TokenChat shows the tools of its constructor: TokenChat(..., tools=tools)")
        safe = [
            {**one, "content": escape_control_tokens(str(one["content"]), self._markers)} for one in messages
        ]
        writer = self._encoder.begin(safe)
        requests = Requests(self.target, stop_ids=self._encoder.stop_token_ids, retries=0)
        ids, _ = await requests.sample(writer, max_tokens=max_tokens, key=key)
        return self._encoder.read_answer(ids)
