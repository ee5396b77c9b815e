"""The simulated engine keeps the contract, its model of time, and its count of what it did."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.engines import EnginePressure, Sampled
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract, SimulatedEngine, run_skipping

EOS = 0


def _answer(key: str, turn: int, ids: Sequence[int]) -> list[int]:
    """Return 20 to 39 ids that depend on the prompt alone."""
    return [*(1 + (ids[0] * 31 + n) % 97 for n in range(20 + ids[0] % 20)), EOS]


class TestSimulatedEngine(EngineContract):
    prompts = ((5, 6, 7), (8,), (9, 9))
    stop_ids = (EOS,)
    min_tokens = 20
    too_long = (3,) * 100

    async def make(self) -> SimulatedEngine:
        return SimulatedEngine(_answer, step_s=2e-4, per_sequence_s=1e-6, max_concurrent=6, context_length=99)


class TestSimulatedEngineWithASmallCache(TestSimulatedEngine):
    async def make(self) -> SimulatedEngine:
        return SimulatedEngine(
            _answer, step_s=2e-4, per_sequence_s=1e-6, max_concurrent=6, context_length=99, kv_tokens=120
        )


def _of_size(size: int):
    return lambda key, turn, ids: [*range(1, size), EOS]


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_an_answer_takes_a_step_for_each_token():
    async def main() -> tuple[Sampled, float]:
        engine = SimulatedEngine(_of_size(100))
        return await engine.sample([1], max_tokens=500, key="a"), _now()

    found, seconds = run_skipping(main())
    assert found == Sampled([*range(1, 100), EOS], [-1.0] * 100, "stop", 0)
    assert seconds == pytest.approx(100 * (0.008 + 4e-5), abs=1e-6)


def test_sequences_share_steps_and_later_ones_wait_for_a_place():
    """Three places: the fourth begins when the first ends. Steps of 3, then of 2 and 1 sequences."""

    async def main() -> list[float]:
        engine = SimulatedEngine(lambda key, turn, ids: [1] * ids[0], max_concurrent=3)

        async def ask(size: int) -> float:
            await engine.sample([size], max_tokens=1000, key=f"{size}")
            return _now()

        return await asyncio.gather(*map(ask, (10, 20, 40, 15)))

    step = [0.008 + 4e-5 * n for n in range(4)]
    first = 10 * step[3]
    second = first + 10 * step[3]
    fourth = second + 5 * step[2]
    third = fourth + 15 * step[1]
    assert run_skipping(main()) == pytest.approx([first, second, third, fourth], abs=1e-6)


def test_the_saturated_engine_gives_the_tokens_of_its_model():
    async def main():
        engine = SimulatedEngine(_of_size(64))
        await asyncio.gather(*(engine.sample([1], max_tokens=99, key=f"{n}") for n in range(1024)))
        await asyncio.sleep(engine.load().elapsed_s)
        return engine.load(), engine.saturated_tokens_per_s

    load, saturated = run_skipping(main())
    assert saturated == pytest.approx(14_035, abs=1)
    assert (load.tokens, load.finished, load.aborted, load.peak) == (1024 * 64, 1024, 0, 256)
    assert load.busy_s == pytest.approx(load.tokens / saturated)
    assert load.idle_share == pytest.approx(0.5)
    assert load.utilization == pytest.approx(0.5)
    assert load.tokens_per_s == pytest.approx(saturated / 2)


def test_an_update_gives_each_request_the_tokens_of_the_steps_so_far():
    async def main() -> tuple[Sampled, Sampled, float]:
        engine = SimulatedEngine(_of_size(100), per_sequence_s=0.0, step_s=0.01, update_s=5.0)
        task = asyncio.create_task(engine.sample([7, 7], max_tokens=90, key="a"))
        await asyncio.sleep(0.355)
        assert await engine.update(None) == 1
        first = await task
        rest = await engine.sample([7, 7, *first.ids], max_tokens=90 - len(first.ids), key="a")
        return first, rest, _now()

    first, rest, seconds = run_skipping(main())
    assert first == Sampled(list(range(1, 36)), [-1.0] * 35, "aborted", 0)
    assert rest == Sampled(list(range(36, 91)), [-1.0] * 55, "length", 1)
    assert seconds == pytest.approx(0.355 + 5.0 + 0.55)


def test_requests_made_during_an_update_wait_for_the_new_weights():
    async def main() -> tuple[Sampled, float]:
        engine = SimulatedEngine(_of_size(10), step_s=0.1, per_sequence_s=0.0, update_s=5.0)
        update = asyncio.create_task(engine.update(None))
        await asyncio.sleep(1)
        found = await engine.sample([1], max_tokens=10, key="a")
        assert update.done()
        return found, _now()

    found, seconds = run_skipping(main())
    assert (found.finish, found.version, seconds) == ("stop", 1, pytest.approx(6.0))


def test_a_waiting_request_survives_an_update():
    async def main() -> list[Sampled]:
        engine = SimulatedEngine(_of_size(10), max_concurrent=1)
        tasks = [asyncio.create_task(engine.sample([1], max_tokens=10, key=f"{n}")) for n in range(2)]
        await asyncio.sleep(0.02)
        await engine.update(None)
        return await asyncio.gather(*tasks)

    running, waiting = run_skipping(main())
    assert (running.finish, running.version) == ("aborted", 0)
    assert (waiting.finish, waiting.version, len(waiting.ids)) == ("stop", 1, 10)


def test_pieces_come_while_the_answer_is_decoded():
    async def main() -> list[tuple[float, int]]:
        engine = SimulatedEngine(_of_size(10), step_s=1.0, per_sequence_s=0.0, piece_tokens=4)
        seen: list[tuple[float, int]] = []
        await engine.sample(
            [1], max_tokens=10, key="a", on_ids=lambda ids: seen.append((round(_now(), 6), len(ids)))
        )
        return seen

    assert run_skipping(main()) == [(4.0, 4), (8.0, 4), (10.0, 2)]


def test_turns_are_counted_by_key():
    async def main() -> list[list[int]]:
        engine = SimulatedEngine(lambda key, turn, ids: [ord(key), turn, EOS])
        asked = [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]
        return [list((await engine.sample([1], max_tokens=9, key=key)).ids) for key, _ in asked]

    a, b = ord("a"), ord("b")
    assert run_skipping(main()) == [[a, 0, 0], [b, 0, 0], [a, 1, 0], [a, 2, 0], [b, 1, 0]]


def test_lost_requests_are_asked_again_for_the_same_answer():
    async def main() -> Sampled:
        engine = SimulatedEngine(lambda key, turn, ids: [turn + 1] * 10)
        task = asyncio.create_task(engine.sample([1], max_tokens=10, key="a"))
        await asyncio.sleep(0.02)
        engine.lose_requests("gone")
        with pytest.raises(InfrastructureError, match="gone"):
            await task
        return await engine.sample([1], max_tokens=10, key="a")

    assert run_skipping(main()).ids == [1] * 10


def test_an_engine_that_is_lost_for_a_time_answers_and_updates_after_it():
    async def main() -> Sampled:
        engine = SimulatedEngine(_of_size(10))
        engine.lose_requests("gone", for_s=5.0)
        for _ in range(2):
            with pytest.raises(InfrastructureError, match="gone"):
                await engine.sample([1], max_tokens=10, key="a")
            with pytest.raises(InfrastructureError, match="gone"):
                await engine.update(None)
            await asyncio.sleep(2.4)
        await asyncio.sleep(0.3)
        assert await engine.update(None) == 1
        return await engine.sample([1], max_tokens=10, key="a")

    assert run_skipping(main()).finish == "stop"


def test_an_engine_that_is_lost_may_keep_the_ids_that_it_has():
    async def main() -> None:
        engine = SimulatedEngine(_of_size(10), max_concurrent=1)
        task = asyncio.create_task(engine.sample([1], max_tokens=10, key="a"))
        waits = asyncio.create_task(engine.sample([1], max_tokens=10, key="b"))
        await asyncio.sleep(0.03)
        engine.lose_requests("gone", keeps_ids=True)
        assert await task == Sampled([1, 2, 3], [-1.0] * 3, "aborted", 0)
        with pytest.raises(InfrastructureError, match="gone"):
            await waits
        with pytest.raises(ValueError, match="for_s must be 0 or more"):
            engine.lose_requests(for_s=-1.0)

    run_skipping(main())


@pytest.mark.parametrize("place", ["answers", "on_ids"])
def test_an_error_of_the_callers_function_reaches_its_request_alone(place: str):
    def answers(key: str, turn: int, ids: Sequence[int]) -> list[int]:
        if key == "bad" and place == "answers":
            raise KeyError(place)
        return [1] * 10

    def on_ids(ids: Sequence[int]) -> None:
        raise KeyError(place)

    async def main() -> Sampled:
        engine = SimulatedEngine(answers)
        good = asyncio.create_task(engine.sample([1], max_tokens=10, key="good"))
        with pytest.raises(KeyError, match=place):
            await engine.sample([1], max_tokens=10, key="bad", on_ids=on_ids)
        return await good

    assert len(run_skipping(main()).ids) == 10


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.lists(st.floats(0.001, 3.0), max_size=6),
    st.none() | st.integers(80, 200),
)
def test_no_token_is_lost_or_repeated_over_updates_cancellations_and_preemptions(
    seed: int, places: int, updates: list[float], kv_tokens: int | None
):
    """Each trajectory collects its whole answers, whatever aborts or cancels its requests."""
    rng = random.Random(seed)

    def answers(key: str, turn: int, ids: Sequence[int]) -> list[int]:
        return [*(hash((int(key), turn, n)) % 1000 + 1 for n in range(5 + 7 * turn)), EOS]

    async def main() -> None:
        engine = SimulatedEngine(answers, max_concurrent=places, kv_tokens=kv_tokens)

        async def trajectory(number: int) -> None:
            ids = [1]
            for turn in range(4):
                answer: list[int] = []
                while True:
                    asked = engine.sample([*ids, *answer], max_tokens=200 - len(answer), key=str(number))
                    if rng.random() < 0.3:
                        try:
                            found = await asyncio.wait_for(asked, rng.uniform(0.001, 0.3))
                        except TimeoutError:
                            continue
                    else:
                        found = await asked
                    answer += found.ids
                    if found.finish != "aborted":
                        break
                assert answer == answers(str(number), turn, ids)
                ids += [*answer, 5, 5]

        async def update() -> None:
            for delay in updates:
                await asyncio.sleep(delay)
                await engine.update(None)

        await asyncio.gather(update(), *map(trajectory, range(8)))
        load = engine.load()
        assert load.finished == 32
        assert load.peak <= places
        assert load.busy_s <= load.elapsed_s + 1e-9

    run_skipping(main())


def _growing(size: int):
    """Return an engine's answers of one size, whatever the prompt."""
    return lambda key, turn, ids: [1] * size


def test_the_request_that_began_last_is_preempted_and_computed_again_at_the_prefill_rate():
    """100 places for tokens, prompts of 20: after 30 steps both hold 50, and the second one must go.

    The first goes on to its 60 tokens; then 50 tokens of the second are computed again, at 100 a second.
    """

    async def main():
        engine = SimulatedEngine(
            _growing(60), step_s=0.1, per_sequence_s=0.0, kv_tokens=100, prefill_tokens_per_s=100.0
        )

        async def ask(key: str) -> tuple[Sampled, float]:
            return await engine.sample([7] * 20, max_tokens=60, key=key), _now()

        tasks = [asyncio.create_task(ask(key)) for key in ("first", "second")]
        await asyncio.sleep(3.05)
        pressure = await engine.pressure()
        return await asyncio.gather(*tasks), pressure, engine.load()

    found, pressure, load = run_skipping(main())
    assert pressure == EnginePressure(pytest.approx(0.505), waiting=1, running=1, preempted=1)
    (first, at_first), (second, at_second) = found
    assert first == second == Sampled([1] * 60, [-1.0] * 60, "stop", 0)
    assert at_first == pytest.approx(6.0)
    assert at_second == pytest.approx(6.0 + 0.5 + 3.0)
    assert (load.preempted, load.recomputed, load.tokens) == (1, 50, 120)
    assert load.preempted_share == pytest.approx(0.5 / 9.5)


def test_a_request_begins_once_its_prompt_fits_and_none_overtakes_it():
    async def main() -> list[str]:
        engine = SimulatedEngine(_growing(10), kv_tokens=100)
        order: list[str] = []

        async def ask(key: str, prompt: int) -> None:
            await engine.sample([7] * prompt, max_tokens=10, key=key)
            order.append(key)

        await asyncio.gather(ask("first", 60), ask("large", 50), ask("small", 5))
        assert engine.load().preempted == 0
        return order

    assert run_skipping(main()) == ["first", "large", "small"]


def test_a_prompt_larger_than_the_cache_is_refused_and_an_answer_ends_with_it():
    async def main() -> Sampled:
        engine = SimulatedEngine(_growing(99), kv_tokens=50)
        with pytest.raises(ValueError, match="the prompt has 50 tokens"):
            await engine.sample([7] * 50, max_tokens=9, key="a")
        return await engine.sample([7] * 30, max_tokens=99, key="b")

    assert len(run_skipping(main()).ids) == 20


def test_an_update_ends_preempted_requests_too_with_what_they_have():
    async def main() -> tuple[Sampled, Sampled]:
        engine = SimulatedEngine(_growing(60), step_s=0.1, per_sequence_s=0.0, kv_tokens=100)
        tasks = [
            asyncio.create_task(engine.sample([7] * 20, max_tokens=60, key=key)) for key in ("one", "two")
        ]
        await asyncio.sleep(4.05)
        await engine.update(None)
        return await tasks[0], await tasks[1]

    first, second = run_skipping(main())
    assert (len(first.ids), first.finish, first.version) == (40, "aborted", 0)
    assert (len(second.ids), second.finish, second.version) == (30, "aborted", 0)


def test_without_a_bound_of_the_cache_no_pressure_is_known():
    assert run_skipping(SimulatedEngine(_growing(5)).pressure()) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_tokens": 0}, "kv_tokens must be 1 or more"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s must be above 0"),
    ],
)
def test_a_cache_without_room_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SimulatedEngine(_growing(5), **options)
