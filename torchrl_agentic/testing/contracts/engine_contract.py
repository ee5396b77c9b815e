"""The contract of every engine."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.engines.base import BaseEngine, Engine, EnginePressure, Sampled
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import InfrastructureError


def check_members(engine: BaseEngine) -> None:
    """Check the members that all engines have.

    Args:
        engine: The engine.
    """
    assert isinstance(engine.version, int)
    assert engine.version >= 0
    assert isinstance(engine.max_concurrent, int)
    assert engine.max_concurrent >= 1
    assert isinstance(engine.can_resume, bool)
    assert isinstance(engine.may_know_cost, bool)
    assert engine.describe()


def check_usage(engine: BaseEngine, before: Usage | None, key: str) -> None:
    """Check the usage of an engine after its first request.

    Args:
        engine: The engine.
        before: Its usage before.
        key: Name of the trajectory of the request.
    """
    own, of_none = engine.usage_of(key), engine.usage_of("a trajectory without requests")
    assert (own is None) == (of_none is None)
    if own is not None:
        assert (own.requests, of_none) == (1, Usage())
        assert engine.usage is not None, "what is counted by trajectory is counted in all"
    if before is not None:
        assert engine.usage is not None
        assert engine.usage.requests == before.requests + 1


class EngineContract:
    """Tests of an `Engine`.

    Attributes:
        prompts: Token ids of prompts, at least two of them. The engine ends its answer to each with a stop
            token within `max_tokens`, and samples at least `min_tokens` ids.
        stop_ids: Ids that end an answer.
        max_tokens: Upper bound on the tokens of an answer, large enough for whole answers to the prompts.
        min_tokens: Every answer has at least this many tokens, 2 or more.
        too_long: A prompt that the engine cannot take, or None if it takes all.
        has_log_probs: The engine returns log-probabilities.
        is_deterministic: The same prompt gets the same answer with any key, and an answer that is resumed
            after its first tokens ends like one that was sampled at once.
        weights: Argument of `Engine.update` that leaves the weights as they are.
        other_weights: Other such arguments, one of each kind that the engine takes, such as a module and a
            function of the model.
        patience_s: Time limit for an event that must happen, in seconds.
    """

    prompts: ClassVar[Sequence[Sequence[int]]]
    stop_ids: ClassVar[Collection[int]]
    max_tokens: ClassVar[int] = 64
    min_tokens: ClassVar[int] = 2
    too_long: ClassVar[Sequence[int] | None] = None
    has_log_probs: ClassVar[bool] = True
    is_deterministic: ClassVar[bool] = True
    weights: ClassVar[Any] = None
    other_weights: ClassVar[Sequence[Any]] = ()
    patience_s: ClassVar[float] = 60.0

    async def make(self) -> Engine:
        """Return a fresh engine, made on the running event loop."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def engine(self) -> AsyncGenerator[Engine]:
        """Yield a fresh engine, and close it."""
        engine = await self.made()
        try:
            yield engine
        finally:
            await engine.close()

    async def made(self) -> Engine:
        """Return a fresh engine, adapted if it is not an instance of `Engine`."""
        engine = ensure_engine(await self.make())
        assert isinstance(engine, Engine)
        return engine

    def prompt(self, number: int) -> Sequence[int]:
        """Return one of the prompts.

        Args:
            number: Any number; prompts repeat.
        """
        return self.prompts[number % len(self.prompts)]

    async def sample(
        self, engine: Engine, key: str, number: int = 0, max_tokens: int | None = None
    ) -> Sampled:
        """Sample an answer within the time limit, and check the form of the result.

        Args:
            engine: The engine.
            key: Name of the trajectory.
            number: Which prompt.
            max_tokens: Upper bound on the tokens of the answer; None: `max_tokens` of the contract.
        """
        bound = self.max_tokens if max_tokens is None else max_tokens
        async with asyncio.timeout(self.patience_s):
            found = await engine.sample(self.prompt(number), max_tokens=bound, key=key)
        self.check_form(found)
        return found

    def check_form(self, found: Sampled) -> None:
        """Check the properties of any result."""
        assert all(isinstance(token, int) for token in found.ids)
        assert found.finish in ("stop", "length", "aborted")
        assert (found.log_probs is not None) == self.has_log_probs
        if found.log_probs is not None:
            assert len(found.log_probs) == len(found.ids)
            assert all(math.isfinite(each) and each <= 0 for each in found.log_probs)
        assert not any(token in self.stop_ids for token in found.ids[:-1])
        assert (found.finish == "stop") == (len(found.ids) > 0 and found.ids[-1] in self.stop_ids)

    @pytest.mark.asyncio
    async def test_it_has_the_members_of_an_engine(self, engine: Engine) -> None:
        check_members(engine)
        assert isinstance(engine.takes_media, bool)
        assert engine.context_length is None or engine.context_length >= 1
        assert all(isinstance(token, int) for token in engine.stop_token_ids)
        assert isinstance(engine.sampling, Sampling | None)

    @pytest.mark.asyncio
    async def test_an_answer_ends_with_one_of_the_stop_ids_that_the_engine_names(
        self, engine: Engine
    ) -> None:
        found = await self.sample(engine, "task/0")
        assert not engine.stop_token_ids or found.ids[-1] in engine.stop_token_ids

    @pytest.mark.asyncio
    async def test_a_prompt_that_fills_the_context_is_a_value_error(self, engine: Engine) -> None:
        length = engine.context_length
        if length is not None:
            prompt = list(itertools.islice(itertools.cycle(self.prompt(0)), length))
            with pytest.raises(ValueError, match=str(length)):
                await engine.sample(prompt, max_tokens=1, key="task/0")

    @pytest.mark.asyncio
    async def test_an_engine_that_takes_media_takes_none_too(self, engine: Engine) -> None:
        if engine.takes_media:
            sees: Any = engine
            async with asyncio.timeout(self.patience_s):
                found = await sees.sample(self.prompt(0), max_tokens=self.max_tokens, key="task/0", media={})
            self.check_form(found)

    @pytest.mark.asyncio
    async def test_a_check_passes_while_the_engine_works_and_fails_once_it_is_closed(self) -> None:
        engine = await self.made()
        async with asyncio.timeout(self.patience_s):
            await engine.check()
            await engine.close()
            if engine.has_check:
                with pytest.raises(InfrastructureError):
                    await engine.check()

    @pytest.mark.asyncio
    async def test_an_engine_samples_after_it_was_seeded(self, engine: Engine) -> None:
        engine.set_seed(7)
        assert (await self.sample(engine, "task/0")).finish == "stop"

    @pytest.mark.asyncio
    async def test_requests_are_counted_in_all_and_by_trajectory_or_not_at_all(self, engine: Engine) -> None:
        before = engine.usage
        await self.sample(engine, "task/0")
        check_usage(engine, before, "task/0")

    @pytest.mark.asyncio
    async def test_the_pressure_is_a_share_and_counts_or_unknown(self, engine: Engine) -> None:
        await self.sample(engine, "task/0")
        found = await engine.pressure()
        if found is not None:
            assert isinstance(found, EnginePressure)
            assert 0 <= found.kv_use <= 1
            counts = (found.waiting, found.running, found.preempted)
            assert all(isinstance(count, int) and count >= 0 for count in counts)

    @pytest.mark.asyncio
    async def test_a_stop_token_ends_an_answer_and_is_its_last_id(self, engine: Engine) -> None:
        found = await self.sample(engine, "task/0")
        assert found.finish == "stop"
        assert found.ids[-1] in self.stop_ids
        assert self.min_tokens <= len(found.ids) <= self.max_tokens
        assert found.version in (None, engine.version)

    @pytest.mark.asyncio
    async def test_no_answer_is_longer_than_max_tokens(self, engine: Engine) -> None:
        bounds = range(1, self.min_tokens)
        for bound in bounds:
            found = await self.sample(engine, f"task/{bound}", max_tokens=bound)
            assert len(found.ids) == bound
            assert found.finish == "length"

    @pytest.mark.asyncio
    async def test_an_answer_that_just_fits_ends_with_its_stop_token(self, engine: Engine) -> None:
        if self.is_deterministic:
            whole = await self.sample(engine, "task/0")
            assert await self.sample(engine, "task/1", max_tokens=len(whole.ids)) == whole

    @pytest.mark.asyncio
    async def test_many_requests_at_once_are_all_answered(self, engine: Engine) -> None:
        count = min(2 * engine.max_concurrent + 1, 40)
        found = await asyncio.gather(
            *(self.sample(engine, f"task/{number}", number) for number in range(count))
        )
        assert [one.finish for one in found] == ["stop"] * count
        if self.is_deterministic:
            alone = [await self.sample(engine, f"alone/{n}", n) for n in range(len(self.prompts))]
            assert [list(one.ids) for one in found] == [
                list(one.ids) for one in itertools.islice(itertools.cycle(alone), count)
            ]

    @pytest.mark.asyncio
    async def test_requests_at_once_keep_their_own_bounds(self, engine: Engine) -> None:
        bounds = [bound % self.min_tokens or self.max_tokens for bound in range(8)]
        found = await asyncio.gather(
            *(self.sample(engine, f"task/{n}", n, bound) for n, bound in enumerate(bounds))
        )
        for one, bound in zip(found, bounds, strict=True):
            assert len(one.ids) <= bound
            assert one.finish == ("stop" if bound == self.max_tokens else "length")

    @pytest.mark.asyncio
    async def test_the_pieces_of_a_stream_are_the_ids_of_the_answer(self, engine: Engine) -> None:
        pieces: list[list[int]] = []
        loop, own = asyncio.get_running_loop(), set[bool]()

        def on_ids(ids: Sequence[int]) -> None:
            own.add(asyncio.get_running_loop() is loop)
            pieces.append(list(ids))

        async with asyncio.timeout(self.patience_s):
            found = await engine.sample(
                self.prompt(0), max_tokens=self.max_tokens, key="task/0", on_ids=on_ids
            )
        self.check_form(found)
        assert list(itertools.chain(*pieces)) == list(found.ids)
        assert all(pieces)
        assert own == {True}

    @pytest.mark.asyncio
    async def test_a_cancelled_request_harms_no_other_and_frees_its_place(self, engine: Engine) -> None:
        count = min(engine.max_concurrent, 16)
        began = asyncio.Event()
        doomed = [
            asyncio.create_task(
                engine.sample(
                    self.prompt(number),
                    max_tokens=self.max_tokens,
                    key=f"doomed/{number}",
                    on_ids=lambda _: began.set(),
                )
            )
            for number in range(count)
        ]
        others = [asyncio.create_task(self.sample(engine, f"task/{number}", number)) for number in range(4)]
        async with asyncio.timeout(self.patience_s):
            await began.wait()
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        assert [one.finish for one in await asyncio.gather(*others)] == ["stop"] * 4
        again = await asyncio.gather(*(self.sample(engine, f"again/{n}", n) for n in range(count)))
        assert [one.finish for one in again] == ["stop"] * count

    @pytest.mark.asyncio
    async def test_a_request_cancelled_before_it_begins_takes_no_place(self, engine: Engine) -> None:
        tasks = [
            asyncio.create_task(engine.sample(self.prompt(n), max_tokens=self.max_tokens, key=f"doomed/{n}"))
            for n in range(4)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        assert (await self.sample(engine, "task/0")).finish == "stop"

    @pytest.mark.asyncio
    async def test_an_update_raises_the_version_by_one(self, engine: Engine) -> None:
        before = engine.version
        assert await engine.update(self.weights) == before + 1
        assert engine.version == before + 1
        assert await engine.update(None) == before + 2
        assert (await self.sample(engine, "task/0")).version in (None, before + 2)

    @pytest.mark.asyncio
    async def test_weights_of_every_kind_are_loaded(self, engine: Engine) -> None:
        before = await self.sample(engine, "task/0")
        for number, weights in enumerate(self.other_weights, 1):
            version = engine.version
            assert await engine.update(weights) == version + 1
            found = await self.sample(engine, f"task/{number}")
            assert found.version in (None, version + 1)
            if self.is_deterministic:
                assert list(found.ids) == list(before.ids)

    @pytest.mark.asyncio
    async def test_requests_that_run_at_an_update_end_or_resume(self, engine: Engine) -> None:
        """An aborted request returns a prefix of its answer, of the weights that sampled it."""
        count = min(2 * engine.max_concurrent, 8)
        whole = [await self.sample(engine, f"alone/{number}", number) for number in range(count)]
        began = asyncio.Event()
        pieces: list[list[int]] = [[] for _ in range(count)]

        def on_ids(number: int, ids: Sequence[int]) -> None:
            pieces[number].extend(ids)
            began.set()

        before = engine.version
        tasks = [
            asyncio.create_task(
                engine.sample(
                    self.prompt(number),
                    max_tokens=self.max_tokens,
                    key=f"task/{number}",
                    on_ids=lambda ids, number=number: on_ids(number, ids),
                )
            )
            for number in range(count)
        ]
        async with asyncio.timeout(self.patience_s):
            await began.wait()
            assert await engine.update(self.weights) == before + 1
            found = await asyncio.gather(*tasks)
        for number, first in enumerate(found):
            self.check_form(first)
            assert pieces[number] == list(first.ids)
            assert first.version in (None, before, before + 1)
            if first.finish == "aborted":
                assert engine.can_resume
                assert not first.ids or first.version in (None, before)
            ids, last = list(first.ids), first
            if first.finish == "aborted":
                assert len(ids) < self.max_tokens
                async with asyncio.timeout(self.patience_s):
                    last = await engine.sample(
                        [*self.prompt(number), *ids],
                        max_tokens=self.max_tokens - len(ids),
                        key=f"task/{number}",
                    )
                self.check_form(last)
                assert last.version in (None, before + 1)
                ids += last.ids
            if self.is_deterministic:
                assert last.finish == "stop"
                assert ids == list(whole[number].ids)

    @pytest.mark.asyncio
    async def test_a_prompt_that_is_too_long_is_a_value_error(self, engine: Engine) -> None:
        if self.too_long is not None:
            with pytest.raises(ValueError, match=str(len(self.too_long))):
                await engine.sample(self.too_long, max_tokens=1, key="task/0")
        assert (await self.sample(engine, "task/1")).finish == "stop"

    @pytest.mark.asyncio
    async def test_an_empty_prompt_or_no_tokens_are_a_value_error(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="prompt"):
            await engine.sample([], max_tokens=1, key="task/0")
        with pytest.raises(ValueError, match="max_tokens"):
            await engine.sample(self.prompt(0), max_tokens=0, key="task/1")

    @pytest.mark.asyncio
    async def test_closing_twice_is_closing_once_and_ends_what_runs(self) -> None:
        engine = await self.made()
        count = min(engine.max_concurrent + 2, 8)
        tasks = [
            asyncio.create_task(engine.sample(self.prompt(n), max_tokens=self.max_tokens, key=f"task/{n}"))
            for n in range(count)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(self.patience_s):
            await engine.close()
            await engine.close()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, Sampled | InfrastructureError) for one in ended), ended
        with pytest.raises(InfrastructureError):
            await engine.sample(self.prompt(0), max_tokens=self.max_tokens, key="late")
