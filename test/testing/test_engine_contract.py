"""The contract of engines finds the mistakes that an engine can make."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchrl_agentic.engines import Engine, OnIds, Sampled, ScriptedEngine, Usage
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract

EOS = 0


def _scripted(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        lambda key, turn, ids: [*range(ids[0], ids[0] + 12), EOS],
        stop_token_ids=[EOS],
        log_prob=-0.5,
        **{"token_s": 1e-4, "piece_tokens": 2, "max_concurrent": 4, "context_length": 50, **options},
    )


class _Wrapped(Engine):
    """An engine around a right one."""

    def __init__(self) -> None:
        self.inner = _scripted()
        self.max_concurrent = self.inner.max_concurrent

    @property
    def version(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.version

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        return await self.inner.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

    async def update(self, weights: Any) -> int:
        return await self.inner.update(weights)

    async def close(self) -> None:
        await self.inner.close()


class _IgnoresTheBound(_Wrapped):
    async def sample(self, ids: Sequence[int], *, max_tokens: int, **options: Any) -> Sampled:
        return await self.inner.sample(ids, max_tokens=99, **options)


class _DropsTheStopToken(_Wrapped):
    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        found = await self.inner.sample(ids, **options)
        size = len(found.ids) - (found.finish == "stop")
        return replace(found, ids=found.ids[:size], log_probs=(found.log_probs or ())[:size])


class _LosesALogProb(_Wrapped):
    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        found = await self.inner.sample(ids, **options)
        return replace(found, log_probs=(found.log_probs or ())[1:])


class _HasProbabilities(_Wrapped):
    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        found = await self.inner.sample(ids, **options)
        return replace(found, log_probs=[0.5] * len(found.ids))


class _StreamsTheWholeEachTime(_Wrapped):
    async def sample(self, ids: Sequence[int], *, on_ids: OnIds | None = None, **options: Any) -> Sampled:
        seen: list[int] = []

        def whole(piece: Sequence[int]) -> None:
            seen.extend(piece)
            if on_ids is not None:
                on_ids(seen)

        return await self.inner.sample(ids, on_ids=whole, **options)


class _KeepsThePlaceOfACancelledRequest(_Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.places = asyncio.Semaphore(4)

    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        await self.places.acquire()
        try:
            found = await self.inner.sample(ids, **options)
        except (InfrastructureError, ValueError):
            self.places.release()
            raise
        self.places.release()
        return found


class _SharesACancellation(_Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[asyncio.Task[Sampled]] = []

    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        task = asyncio.create_task(self.inner.sample(ids, **options))
        self.tasks.append(task)
        try:
            return await task
        except asyncio.CancelledError:
            for each in self.tasks:
                each.cancel()
            raise


class _CallsAnAbortedAnswerWhole(_Wrapped):
    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        found = await self.inner.sample(ids, **options)
        return replace(found, finish="stop") if found.finish == "aborted" else found


class _RepeatsThePrefix(_Wrapped):
    """Answers from the beginning when sampling resumes."""

    async def sample(self, ids: Sequence[int], *, key: str, **options: Any) -> Sampled:
        return await self.inner.sample(ids[:2], key=f"{key}{len(ids)}", **options)


class _MarksAbortedTokensWithTheNewVersion(_Wrapped):
    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        found = await self.inner.sample(ids, **options)
        return replace(found, version=self.version)


class _CountsNoUpdates(_Wrapped):
    async def update(self, weights: Any) -> int:
        return self.version


class _CallsAModule(_Wrapped):
    async def update(self, weights: Any) -> int:
        if callable(weights):
            weights(self)
        return await self.inner.update(weights)


class _TakesLongPrompts(_Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _scripted(context_length=None)


class _WorksAfterItsEnd(_Wrapped):
    async def close(self) -> None: ...


class _ForgetsItsRequests(_Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        if self.is_closed:
            raise InfrastructureError("closed")
        try:
            return await self.inner.sample(ids, **options)
        except InfrastructureError:
            return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.is_closed = True
        await self.inner.close()


class _NamesOtherStopIds(_Wrapped):
    stop_token_ids = (EOS + 1,)


class _ForgetsToCount(_Wrapped):
    usage = Usage()


class _CountsTrajectoriesOnly(_Wrapped):
    def usage_of(self, key: str) -> Usage:
        return Usage(requests=key == "task/0")


class _IsWellAfterItsEnd(_Wrapped):
    async def check(self) -> None: ...


class _AbortsWhatCannotResume(_Wrapped):
    can_resume = False


class _TakesNoEmptyMedia(_Wrapped):
    takes_media = True


BROKEN = [
    _NamesOtherStopIds,
    _ForgetsToCount,
    _CountsTrajectoriesOnly,
    _IsWellAfterItsEnd,
    _AbortsWhatCannotResume,
    _TakesNoEmptyMedia,
    _IgnoresTheBound,
    _DropsTheStopToken,
    _LosesALogProb,
    _HasProbabilities,
    _StreamsTheWholeEachTime,
    _KeepsThePlaceOfACancelledRequest,
    _SharesACancellation,
    _CallsAnAbortedAnswerWhole,
    _RepeatsThePrefix,
    _MarksAbortedTokensWithTheNewVersion,
    _CountsNoUpdates,
    _CallsAModule,
    _TakesLongPrompts,
    _WorksAfterItsEnd,
    _ForgetsItsRequests,
]


async def _failures(kind: type[Engine], patience: float = 0.5) -> list[str]:
    """Return the names of the tests of the contract that an engine fails, with a patience in seconds."""

    class Contract(EngineContract):
        prompts = ([5, 6], [20, 21], [40, 41])
        stop_ids = (EOS,)
        min_tokens = 10
        too_long = (5,) * 60
        patience_s = patience
        other_weights = (torch.nn.Linear(1, 1), lambda engine: None)

        async def make(self) -> Engine:
            return kind()

    failed: list[str] = []
    for name, test in inspect.getmembers(Contract(), inspect.iscoroutinefunction):
        if not name.startswith("test_"):
            continue
        arguments = [kind()] if inspect.signature(test).parameters else []
        try:
            await test(*arguments)
        except (AssertionError, TypeError, TimeoutError, asyncio.CancelledError, pytest.fail.Exception):
            failed.append(name)
    return failed


async def test_a_right_engine_fails_nothing():
    assert await _failures(_Wrapped, patience=20) == []


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__.strip("_"))
async def test_a_wrong_engine_is_found(kind: type[Engine]):
    assert await _failures(kind)
