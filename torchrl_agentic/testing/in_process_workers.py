"""`InProcessWorkers`: workers of a collector on its own event loop, to test transforms without Ray."""

from __future__ import annotations

import asyncio
import pickle

from torchrl_agentic.collectors.worker_host import WorkerHost
from torchrl_agentic.collectors.workers import WorkerLink, WorkerLost, Workers


class InProcessWorkers(Workers):
    """Workers that share the process and the event loop of their collector.

    Everything else is as with `RayWorkers`: transforms are pickled once and unpickled in each worker, and
    trajectories exchange batches of bytes with the collector. `lose` ends a worker like a process that dies,
    `freeze` stops it like a process that hangs.

    Args:
        count: Number of workers.
        max_trajectories: Upper bound on the trajectories of one worker; None: no bound.
        max_restarts: Number of times in a row that a worker may die before one of its trajectories has ended.

    Attributes:
        hosts: The workers that live, by number.
        started: Number of starts so far.
    """

    def __init__(self, count: int, *, max_trajectories: int | None = None, max_restarts: int = 3) -> None:
        super().__init__(count, max_trajectories=max_trajectories, max_restarts=max_restarts)
        self.hosts: dict[int, WorkerHost] = {}
        self.started = 0
        self._links: dict[int, _HostLink] = {}

    async def start(self, number: int, spec: bytes) -> WorkerLink:
        """Start a worker.

        Args:
            number: Number of the worker.
            spec: Result of `pack`.
        """
        self.started += 1
        unpickled = pickle.loads(spec)
        host = WorkerHost(await asyncio.to_thread(unpickled.create), unpickled)
        self.hosts[number] = host
        link = self._links[number] = _HostLink(host)
        return link

    async def lose(self, number: int) -> None:
        """End a worker at once, without a report of its trajectories.

        Args:
            number: Number of the worker.
        """
        tasks = self.hosts.pop(number).abandon()
        self._links.pop(number).lose()
        if tasks:
            await asyncio.wait(tasks)

    async def freeze(self, number: int) -> None:
        """Freeze a worker: it neither receives nor sends until the collector ends it.

        Args:
            number: Number of the worker.
        """
        self._links[number].freeze()
        tasks = self.hosts.pop(number).abandon()
        if tasks:
            await asyncio.wait(tasks)


class _HostLink(WorkerLink):
    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_frozen = False

    async def send(self, batch: bytes) -> None:
        await asyncio.sleep(0)
        await self._thaw()
        self._check()
        self._host.deliver(batch)

    async def receive(self) -> bytes:
        collecting = asyncio.ensure_future(self._host.collect())
        try:
            await asyncio.wait((collecting, self._lost), return_when=asyncio.FIRST_COMPLETED)
            await self._thaw()
            self._check()
            return collecting.result()
        finally:
            collecting.cancel()

    async def close(self) -> None:
        if not self._lost.done():
            await self._host.close()

    def kill(self) -> None:
        self.lose()

    def freeze(self) -> None:
        self._is_frozen = True

    async def _thaw(self) -> None:
        """Wait for the end of a frozen worker."""
        if self._is_frozen:
            await asyncio.wait((self._lost,))

    def lose(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    def _check(self) -> None:
        if self._lost.done():
            raise WorkerLost("the worker was ended")
