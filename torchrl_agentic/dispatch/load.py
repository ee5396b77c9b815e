"""Many calls of one tool at once: how fast they are answered, how long they wait, what goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchrl_agentic.dispatch.dispatcher import Dispatcher
from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult

SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What came of it.

    seconds: from the first call to the last result. queue_s, run_s: of each call, in order of their size.
    statuses: how many calls ended how. errors: the text of the first few that were not OK, each once.
    """

    seconds: float
    queue_s: tuple[float, ...]
    run_s: tuple[float, ...]
    statuses: Counter[Status]
    errors: tuple[str, ...]

    @property
    def per_second(self) -> float:
        """How many calls were answered in a second."""
        return self.statuses.total() / self.seconds


async def put_under_load(
    dispatcher: Dispatcher,
    tool: str,
    args: Mapping[str, JSON],
    *,
    calls: int,
    concurrency: int,
    on_result: Callable[[ToolResult], None] | None = None,
) -> Load:
    """Call a tool so often, by so many trajectories at once; each waits for its result before it calls again.

    Raises:
        ValueError: a number that is not above 0.
    """
    if calls < 1 or concurrency < 1:
        raise ValueError(f"calls and concurrency must be 1 or more; got {calls} and {concurrency}")
    numbers = iter(range(calls))
    results: list[ToolResult] = []

    async def trajectory(name: str) -> None:
        async with dispatcher.session(name) as session:
            for number in numbers:
                (result,) = await session.run([ParsedCall(tool, args, f"call_{number}")])
                results.append(result)
                if on_result is not None:
                    on_result(result)

    await dispatcher.setup()
    began = time.perf_counter()
    await asyncio.gather(*(trajectory(f"load-{index}") for index in range(min(concurrency, calls))))
    seconds = time.perf_counter() - began
    timings = [result.timing for result in results if result.timing is not None]
    errors = dict.fromkeys(result.text for result in results if result.is_error)
    return Load(
        seconds,
        tuple(sorted(timing.queue_s for timing in timings)),
        tuple(sorted(timing.run_s for timing in timings)),
        Counter(result.status or Status.OK for result in results),
        tuple(errors)[:SHOWN_ERRORS],
    )
