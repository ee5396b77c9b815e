"""`ensure_engine`: adapt objects that behave like an engine; `EngineWrapper`: members of a wrapped one."""

# Members of the target may change, so that the adapters have properties in the place of attributes.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torchrl_agentic.engines.base import BaseEngine, ChatEngine, Engine, EnginePressure, OnIds, Sampled
from torchrl_agentic.engines.sampling import Sampling, sampling_of
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.messages import JSON, Message


class EngineWrapper(BaseEngine):
    """Delegates the members that all engines have to another engine.

    Args:
        target: The engine, or an object that behaves like one: its optional members are used if it has them.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    @property
    def version(self) -> int:
        """The same attribute of the engine."""
        return self.target.version

    @property
    def max_concurrent(self) -> int:
        """The same attribute of the engine."""
        return getattr(self.target, "max_concurrent", BaseEngine.max_concurrent)

    @property
    def can_resume(self) -> bool:
        """The same attribute of the engine."""
        return getattr(self.target, "can_resume", BaseEngine.can_resume)

    @property
    def usage(self) -> Usage | None:
        """Usage of the engine; None if it does not count it."""
        return getattr(self.target, "usage", None)

    @property
    def may_know_cost(self) -> bool:
        """The same attribute of the engine."""
        return getattr(self.target, "may_know_cost", BaseEngine.may_know_cost)

    async def update(self, weights: Any) -> int:
        """Update the engine."""
        return await self.target.update(weights)

    async def close(self) -> None:
        """Close the engine."""
        await self.target.close()

    def usage_of(self, key: str) -> Usage | None:
        """Return the usage of one trajectory."""
        return getattr(self.target, "usage_of", super().usage_of)(key)

    def set_seed(self, seed: int) -> None:
        """Seed the engine."""
        getattr(self.target, "set_seed", super().set_seed)(seed)

    def describe(self) -> str:
        """Return the description of the engine."""
        return getattr(self.target, "describe", lambda: type(self.target).__name__)()

    def __repr__(self) -> str:
        return repr(self.target)


class EngineAdapter(EngineWrapper, Engine):
    """Adapts an object that behaves like an engine to `Engine`; its optional members are used if it has them.

    Args:
        target: The object.
    """

    @property
    def context_length(self) -> int | None:
        """The same attribute of the object; None if it is unknown."""
        return getattr(self.target, "context_length", None)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The same attribute of the object."""
        return getattr(self.target, "stop_token_ids", ())

    @property
    def takes_media(self) -> bool:
        """The same attribute of the object."""
        return getattr(self.target, "takes_media", False)

    @property
    def sampling(self) -> Sampling | None:
        """The same attribute of the object; None if it is unknown."""
        return sampling_of(self.target)

    async def sample(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None = None,
        **media: Any,
    ) -> Sampled:
        """Sample one answer with the object."""
        return await self.target.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids, **media)

    async def pressure(self) -> EnginePressure | None:
        """Return how full the engine is; None if it is unknown."""
        return await getattr(self.target, "pressure", super().pressure)()

    async def check(self) -> None:
        """Check the object."""
        await getattr(self.target, "check", super().check)()

    @property
    def has_check(self) -> bool:
        """True if the object has a `check`."""
        return hasattr(self.target, "check")


class ChatEngineAdapter(EngineWrapper, ChatEngine):
    """Adapts an object that behaves like a chat engine to `ChatEngine`, as `EngineAdapter` does.

    Args:
        target: The object.
    """

    @property
    def sampling(self) -> Mapping[str, JSON]:
        """The same attribute of the object."""
        return getattr(self.target, "sampling", {})

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the object."""
        return await self.target.chat(messages, tools=tools, max_tokens=max_tokens, key=key)

    def conversation_tokens(self, key: str) -> int | None:
        """Return the number of tokens of a conversation; None if the object never knows it."""
        return getattr(self.target, "conversation_tokens", super().conversation_tokens)(key)


_adapted: WeakValueDictionary[int, EngineAdapter | ChatEngineAdapter] = WeakValueDictionary()
"""Adapters by the identity of the object: collectors over the same object share one, and so its updates."""


def ensure_engine(item: Any) -> Engine | ChatEngine:
    """Return an `Engine` or a `ChatEngine` for an object: the object itself, or an adapter.

    Args:
        item: An engine; or an object with `version`, the coroutine functions `update` and `close`, and
            `sample` or `chat`, with the same arguments as those of `Engine` and `ChatEngine`. An object with
            both takes tokens.

    Raises:
        TypeError: If it is neither. The message names the missing members.
    """
    if derives(item, Engine) or derives(item, ChatEngine):
        return item
    kind = ChatEngine if hasattr(item, "chat") and not hasattr(item, "sample") else Engine
    if missing := lacking(item, kind):
        what = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
        raise TypeError(
            f"engine is an Engine, such as VLLMEngine(AsyncLLM), or a ChatEngine; got {what}, which lacks "
            f"{', '.join(missing)}. For a TorchRL policy write LockStep(policy); derive your own engine from "
            "torchrl_agentic.engines.Engine"
        )
    adapter = _adapted.get(id(item))
    if adapter is None:
        adapter = EngineAdapter(item) if kind is Engine else ChatEngineAdapter(item)
        _adapted[id(item)] = adapter
    return adapter
