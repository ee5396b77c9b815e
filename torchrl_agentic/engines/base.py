"""`Engine`: prompt token ids in, sampled token ids out; `ChatEngine`: messages in, a message out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import ContextExceeded as ContextExceeded
from torchrl_agentic.errors import Interface
from torchrl_agentic.messages import JSON, Message

Finish: TypeAlias = Literal["stop", "length", "aborted"]
OnIds: TypeAlias = Callable[[Sequence[int]], None]


class EngineUnusable(RuntimeError):
    """An engine refuses every request: a wrong key, an unknown model, no credit left.

    No retry helps, so a collector ends with it instead of replacing trajectories; the message names what to
    check.
    """


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that an engine sampled for one request.

    Attributes:
        ids: Sampled token ids, [R], a stop token included.
        log_probs: Log-probability of each id under the weights that sampled it, in nats, [R]; None: unknown.
        finish: "stop" after a stop token; "length" after `max_tokens`; "aborted" if the weights changed or
            the engine was lost, in which case sampling may resume after `ids`.
        version: Policy version of the weights; None: `Engine.version` when the request was made.
    """

    ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    finish: Finish = "stop"
    version: int | None = None


@dataclass(frozen=True, slots=True)
class EnginePressure:
    """How full an engine is, by its own report.

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


class BaseEngine(metaclass=Interface):
    """Members of both `Engine` and `ChatEngine`. Every one but `update` and `close` has a default.

    Many coroutines make requests at the same time. A cancelled request ends in the engine too.

    Attributes:
        version: Policy version: number of weight updates so far.
        max_concurrent: Number of requests that the engine works on at once; others wait in it.
        can_resume: Whether sampling may continue after an aborted answer. If not, as with constrained
            decoding, updates wait for the requests that run.
        usage: Requests, tokens and cost so far; None: the engine does not count them.
        may_know_cost: Whether `usage` may have costs; False: its `cost` says nothing.
    """

    version: int = 0
    max_concurrent: int = 256
    can_resume: bool = True
    usage: Usage | None = None
    may_know_cost: bool = True

    @abstractmethod
    async def update(self, weights: Any) -> int:
        """Load new weights; requests that run may end with the finish "aborted".

        Args:
            weights: The weights, in the form that the engine takes; or None, which keeps the weights and
                counts an update.

        Returns:
            The new policy version.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all requests and free what the engine holds; may be called again."""

    def usage_of(self, key: str) -> Usage | None:
        """Return the usage of one trajectory, an empty one if it is unknown.

        Args:
            key: Name of the trajectory.

        Returns:
            None, the default, if the engine does not count by trajectory.
        """
        return None

    def set_seed(self, seed: int) -> None:
        """Seed the sampling. By default, nothing happens.

        Args:
            seed: The seed.
        """

    def describe(self) -> str:
        """Return the class of the engine, and its model if it knows it, for messages and evaluations."""
        return type(self).__name__


class Engine(BaseEngine, members=("version", "sample", "update", "close")):
    """Samples from token ids: vLLM, SGLang, transformers, a TorchRL policy. `EngineContract` tests one.

    A subclass defines `sample`, `update` and `close`, and the members that differ from the defaults. An
    object of another class with `version` and these methods is an instance too; `ensure_engine` adapts it
    where a collector, pool, judge or evaluation gets it.

    Attributes:
        context_length: Number of tokens that it takes, prompt and answer together; None: unknown, so that
            only the engine itself refuses longer prompts, with ValueError.
        stop_token_ids: Ids that end an answer besides the tokenizer's `eos_token_id`; collectors take them
            over.
        takes_media: Whether `sample` takes `media=`, a mapping from "image" and "video" to lists in the order
            of their placeholders. It is passed if the conversation holds any.
        sampling: The distribution that it samples from, by which collectors warn of losses that would be
            biased; None: unknown.
    """

    context_length: int | None = None
    stop_token_ids: Sequence[int] = ()
    takes_media: bool = False
    sampling: Sampling | None = None

    @abstractmethod
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

    async def pressure(self) -> EnginePressure | None:
        """Return how full the engine is, which `max_in_flight="auto"` of a collector follows.

        Returns:
            None, the default, if it is never known; it is not called again then.

        Raises:
            InfrastructureError: If it cannot tell now.
        """
        return None

    async def check(self) -> None:
        """Check that the engine works; an `EnginePool` does so before a lost engine serves again.

        By default, nothing is checked, and the pool tries the engine by one request.

        Raises:
            InfrastructureError: If it does not work.
        """

    @property
    def has_check(self) -> bool:
        """True if the class overrides `check`."""
        return type(self).check is not Engine.check


class ChatEngine(BaseEngine, members=("version", "chat", "update", "close")):
    """Answers messages with a message: a model behind an API, a recorded conversation.

    Trajectories over it have no tokens, so that no loss can use them. `ChatEngineContract` tests one. A
    subclass defines `chat`, `update` and `close`; look-alikes are accepted as those of `Engine` are.

    Attributes:
        sampling: The options that it samples with, as JSON; evaluations are resumed with the same only.
    """

    sampling: Mapping[str, JSON] = MappingProxyType({})

    @abstractmethod
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

    def conversation_tokens(self, key: str) -> int | None:
        """Return the number of tokens of a conversation, prompt and answer, as of its latest response.

        Args:
            key: Name of the trajectory; 0 if it is unknown.

        Returns:
            None, the default, if the engine never knows; `max_trajectory_tokens` needs a number.
        """
        return None
