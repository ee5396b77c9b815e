"""A process that shares a limiter with others, and logs when its calls begin and end."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchrl_agentic.limits import ClusterRateLimiter


async def call_for(
    limiter: ClusterRateLimiter, log: Path, seconds: float, at_once: int, least: int = 0
) -> None:
    """Call as often as the limiter allows for some seconds, and go on until there were enough calls.

    Args:
        limiter: The limiter.
        log: File for the begin and the end of each call.
        seconds: Minimum seconds.
        at_once: Number of calls that wait or run at once.
        least: Minimum number of calls, for a machine that is too busy for them in `seconds`.
    """
    until = time.monotonic() + seconds
    calls = 0
    with log.open("a") as file:

        async def one() -> None:
            nonlocal calls
            while time.monotonic() < until or calls < least:
                async with limiter.slot():
                    began = time.monotonic()
                    await asyncio.sleep(0.005)
                    print(began, time.monotonic(), file=file)
                    calls += 1

        await asyncio.gather(*(one() for _ in range(at_once)))


def most_at_once(logs: list[Path]) -> int:
    """Return the largest number of calls that ran at once."""
    events: list[tuple[float, int]] = []
    for log in logs:
        for line in log.read_text().splitlines():
            began, ended = map(float, line.split())
            events += [(began, 1), (ended, -1)]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def count_calls(log: Path) -> int:
    """Return the number of calls that a process has logged."""
    return len(log.read_text().splitlines()) if log.exists() else 0


def main(name: str, limit: str, log: str, seconds: str, over: str, ttl: str, least: str) -> None:
    """Call under a limiter; see `call_for`. If `seconds` is "hold", take all slots and keep them."""
    limiter = ClusterRateLimiter(name, max_concurrent=int(limit), ttl=float(ttl), over=over)  # type: ignore[arg-type]
    if seconds == "hold":
        asyncio.run(hold(limiter, int(limit), lambda: print("held", flush=True)))
    else:
        asyncio.run(call_for(limiter, Path(log), float(seconds), int(limit) * 2, int(least)))


async def hold(limiter: ClusterRateLimiter, limit: int, say: Callable[[], object]) -> None:
    """Take all slots, report it, and keep them."""
    for _ in range(limit):
        await limiter.slot().acquire()
    say()
    await asyncio.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
