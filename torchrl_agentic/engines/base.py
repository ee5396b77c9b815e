"""`Engine` samples the token ids of an answer to those of a prompt; `ChatEngine` answers messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from torchrl_agentic.messages import Message

Finish: TypeAlias = Literal["stop", "length", "aborted"]
OnIds: TypeAlias = Callable[[Sequence[int]], None]


class EngineUnusable(RuntimeError):
    """An engine refuses every request: a wrong key, an unknown model, no credit left.

    No retry helps, so a collector ends with it instead of replacing trajectories; the message names what to
    check.
    """


class ContextExceeded(ValueError):
    """A conversation is longer than the model takes; raised by `ChatEngine.chat`, it ends a trajectory."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that an engine sampled for one request.

    Attributes:
        ids: Sampled token ids, [R], a stop token included.
        log_probs: Log-probability of each id under the weights that sampled it, in nats, [R]; None: unknown.
        finish: "stop" after a stop token; "length" after `max_tokens`; "aborted" if the weights changed or
            the engine was lost, in which case sampling may resume behind `ids`.
        version: Policy version of the weights; None: `Engine.version` when the request was made.
    """

    ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    finish: Finish = "stop"
    version: int | None = None


@dataclass(frozen=True, slots=True)
class EnginePressure:
    """How full an engine is, as it reports itself.

    Attributes:
        kv_use: Share of the KV cache that running requests hold, 0 to 1; what could be evicted is free.
        waiting: Number of requests that wait in the engine.
        running: Number of requests that the engine works on.
        preempted: Number of times since its start that a running request lost its place in the KV cache.
    """

    kv_use: float
    waiting: int
    running: int
    preempted: int


@runtime_checkable
class Engine(Protocol):
    """Samples from token ids: vLLM, SGLang, transformers, a TorchRL policy. `EngineContract` tests one.

    Many coroutines call `sample` at the same time. A cancelled `sample` ends its request.

    Five attributes are optional. `context_length`: number of tokens that it takes, prompt and answer
    together. `stop_token_ids`: ids that end an answer, which a collector takes over. `can_resume`: False if
    an aborted answer cannot go on, as with constrained decoding; updates then wait for running requests.
    `takes_media`: True if `sample` takes `media=`, a mapping from "image" and "video" to lists in the order
    of their placeholders, which is passed if the conversation holds any. `pressure`: a coroutine method
    without arguments that returns an `EnginePressure`, or None if the engine cannot report it;
    `max_in_flight="auto"` follows it. It may raise InfrastructureError. `sampling`: the `Sampling` that it
    samples from, by which collectors warn of losses that would be biased.

    Attributes:
        version: Policy version: number of weight updates so far.
        max_concurrent: Number of requests that the engine works on at once; further ones wait in it.
    """

    version: int
    max_concurrent: int

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer.

        Args:
            ids: Token ids of the prompt, [P].
            max_tokens: Upper bound on the number of sampled ids.
            key: Name of the trajectory; requests with the same key share a prefix.
            on_ids: Called on the event loop with each piece of sampled ids, in order. The pieces together are
                the `ids` of the result.

        Returns:
            The sampled ids. `finish` is "aborted" if `update` ended the request.

        Raises:
            InfrastructureError: If the engine is lost or overloaded; the request may be made again.
            ValueError: If the engine cannot take the prompt, such as one longer than its context.
        """
        ...

    async def update(self, weights: Any) -> int:
        """Load new weights; requests that run may end with the finish "aborted".

        Args:
            weights: The weights, in the form that the engine takes; or None, which keeps the weights and
                counts an update.

        Returns:
            The new policy version.
        """
        ...

    async def close(self) -> None:
        """End all requests and free what the engine holds; may be called again."""
        ...


@runtime_checkable
class ChatEngine(Protocol):
    """Answers messages with a message: a model behind an API, a recorded conversation.

    Trajectories over it have no tokens, so that no loss can use them. Many coroutines call `chat` at the same
    time; a cancelled `chat` ends its request. `ChatEngineContract` tests one.

    Attributes:
        version: Policy version: number of weight updates so far.
        max_concurrent: Number of requests that the engine works on at once.
    """

    version: int
    max_concurrent: int

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model.

        Args:
            messages: The conversation, in the form of chat templates.
            tools: Descriptions of the tools, in the form of OpenAI's API.
            max_tokens: Upper bound on the tokens of the message.
            key: Name of the trajectory.

        Raises:
            InfrastructureError: If the engine is lost or overloaded; the request may be made again.
            ContextExceeded: If the conversation is too long, which ends the trajectory as truncated.
            EngineUnusable: If the engine refuses every request, which ends the collector.
            ValueError: If the engine cannot take the messages.
        """
        ...

    async def update(self, weights: Any) -> int:
        """Load new weights, as `Engine.update` does."""
        ...

    async def close(self) -> None:
        """End all requests; may be called again."""
        ...
