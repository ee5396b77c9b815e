"""Blocking work of many callers: bounded, in order, and nothing that goes wrong keeps a slot."""

import asyncio
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic import InfrastructureError
from torchrl_agentic.dispatch import ExecutionPool, PoolMode, init_execution_pool
from torchrl_agentic.limits import ClusterRateLimiter, RateLimiter


@pytest.fixture(params=["thread", "process"])
async def pool(request: pytest.FixtureRequest) -> AsyncGenerator[ExecutionPool]:
    async with init_execution_pool(
        4, enable_global_rate_limit=False, rate_limit=2, mode=request.param
    ) as pool:
        yield pool


async def test_work_runs_where_it_was_asked_to():
    for mode, elsewhere in ((PoolMode.ThreadMode, False), (PoolMode.ProcessMode, True)):
        async with init_execution_pool(2, False, 2, mode) as pool:
            assert (await pool.execute(os.getpid) != os.getpid()) is elsewhere


async def test_results_come_in_the_order_of_their_calls(pool: ExecutionPool):
    captured = 10  # functions travel by value, with what they have captured

    def work(number: int, *, factor: int) -> int:
        time.sleep(0.01 * (3 - number % 3))
        return captured + number * factor

    found = await asyncio.gather(*(pool.execute(work, number, factor=2) for number in range(8)))
    assert found == [10 + 2 * number for number in range(8)]


async def test_no_more_run_at_once_than_the_limit(pool: ExecutionPool, tmp_path: Path):
    """Each counts those that have begun and not ended, in files that all processes see."""

    def work(number: int, folder: str) -> int:
        mine = Path(folder, str(number))
        mine.touch()
        seen = 0
        for _ in range(20):
            seen = max(seen, len(os.listdir(folder)))
            time.sleep(0.002)
        mine.unlink()
        return seen

    seen = await asyncio.gather(*(pool.execute(work, number, str(tmp_path)) for number in range(6)))
    assert max(seen) <= 2


async def test_an_error_reaches_its_caller_and_gives_the_slot_back(pool: ExecutionPool):
    """Of 20 calls one is rotten; the other 19 are untouched."""

    def work(number: int) -> int:
        if number == 10:
            raise KeyError("rotten")
        return number

    calls = [pool.execute(work, number) for number in range(20)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found.pop(10), KeyError)
    assert found == [number for number in range(20) if number != 10]
    assert pool.limiter is not None
    assert pool.limiter.stats().in_flight == 0


async def test_unpicklable_error_keeps_its_description():
    class Stubborn(Exception):
        def __reduce__(self) -> str:
            raise TypeError("no")

    def work() -> None:
        raise Stubborn("deep inside")

    async with init_execution_pool(1, False, None, "process") as pool:
        with pytest.raises(RuntimeError, match="Stubborn: deep inside"):
            await pool.execute(work)


async def test_cancelled_call_releases_slot_and_worker(pool: ExecutionPool):
    hung = [asyncio.create_task(pool.execute(time.sleep, 600)) for _ in range(2)]
    assert pool.limiter is not None
    while pool.limiter.stats().in_flight < 2:
        await asyncio.sleep(0.01)
    for task in hung:
        task.cancel()
    await asyncio.gather(*hung, return_exceptions=True)
    assert await asyncio.wait_for(pool.execute(os.getpid), limit(30))
    assert pool.limiter.stats().in_flight == 0


async def test_dead_worker_does_not_affect_other_calls():
    async with init_execution_pool(2, False, None, "process") as pool:
        dies, lives = await asyncio.gather(
            pool.execute(os._exit, 3), pool.execute(os.getpid), return_exceptions=True
        )
        assert isinstance(dies, InfrastructureError)
        assert isinstance(lives, int)
        assert await pool.execute(os.getpid)


async def test_threads_work_at_the_same_time():
    barrier = threading.Barrier(3)
    async with init_execution_pool(3, False, None) as pool:
        await asyncio.wait_for(asyncio.gather(*(pool.execute(barrier.wait) for _ in range(3))), limit(10))


async def test_a_limit_for_all_is_shared_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))
    name = uuid.uuid4().hex
    one, other = (init_execution_pool(4, rate_limit=1, name=name, over="here") for _ in range(2))
    assert isinstance(one.limiter, ClusterRateLimiter)
    async with one.limiter.slot():
        call = asyncio.create_task(other.execute(os.getpid))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
    assert await asyncio.wait_for(call, limit(20)) == os.getpid()
    for pool in (one, other):
        await pool.close()


def test_limit_can_be_per_process_or_absent():
    assert isinstance(init_execution_pool(1, False, 3).limiter, RateLimiter)
    assert init_execution_pool(1, rate_limit=None).limiter is None


async def test_calls_in_verls_spelling_share_one_limit_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))
    pools = [init_execution_pool(10), init_execution_pool(10, True, 10, PoolMode.ThreadMode)]
    limiters = [pool.limiter for pool in pools]
    assert [limiter.name for limiter in limiters if isinstance(limiter, ClusterRateLimiter)] == [
        "rate-limiter"
    ] * 2
    for pool in pools:
        assert await pool.execute.remote(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.execute.remote(divmod, 7, 0)
        await pool.close()


async def test_remote_starts_a_call_before_it_is_awaited():
    begun = threading.Event()
    async with init_execution_pool(2, False) as pool:
        pool.execute.remote(begun.set)
        assert await pool.execute(begun.wait, 10)


def test_remote_works_without_an_event_loop():
    pool = init_execution_pool(2, False)
    assert pool.execute.remote(divmod, 7, 2).result(limit(10)) == (3, 1)


def test_script_without_a_main_guard_gets_a_clear_error(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os\n"
        "from torchrl_agentic.dispatch import init_execution_pool\n"
        "async def main():\n"
        "    async with init_execution_pool(2, False, None, 'process') as pool:\n"
        "        await pool.execute(os.getpid)\n"
        "asyncio.run(main())\n"
    )
    done = run_program([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert """put what it runs under 'if __name__ == "__main__":'""" in done.stderr


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"mode": "rocket"}, "rocket"),
        ({"rate_limit": 0, "name": "x"}, "max_concurrent"),
    ],
)
def test_invalid_options_are_rejected(bad: dict, says: str):
    with pytest.raises(ValueError, match=says):
        init_execution_pool(**bad)
