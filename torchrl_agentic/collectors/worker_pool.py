"""`WorkerPool`: the workers of a collector, and which trajectories run on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter

from torchrl_agentic.collectors.remote_run import RemoteRun, Shared
from torchrl_agentic.collectors.trajectory_run import Observer
from torchrl_agentic.collectors.worker_messages import (
    Begin,
    Ended,
    Failed,
    FromWorker,
    ToWorker,
    gather_s,
    pack,
    unpack,
)
from torchrl_agentic.collectors.workers import WorkerLink, WorkerLost, Workers, WorkersFailed, choose_worker
from torchrl_agentic.trajectory.task import Task

logger = logging.getLogger(__name__)

REMINDER_S = 30.0
"""Seconds after which a log line says that trajectories wait for a worker."""


class _Worker:
    """One worker: its connection, the trajectories on it, and the messages for it."""

    def __init__(self, pool: WorkerPool, number: int) -> None:
        self._pool, self.number = pool, number
        self._loop = asyncio.get_running_loop()
        self.runs: dict[str, RemoteRun] = {}
        self.groups: Counter[int | None] = Counter()
        self.link: WorkerLink | None = None
        self.clock_offset = math.inf
        self.heard_at = -math.inf
        self._given_up: asyncio.Future[WorkerLost] = self._loop.create_future()
        self._outbox: list[ToWorker] = []
        self._filled = asyncio.Event()
        self._deaths = 0  # in a row
        self.task = self._loop.create_task(self._serve())

    def enter(self, run: RemoteRun, begin: Begin) -> None:
        """Begin a trajectory."""
        self.runs[run.name] = run
        self.groups[run.group] += 1
        self.post(begin)

    def leave(self, run: RemoteRun) -> None:
        """Free the place of a trajectory, which has ended here."""
        if self.runs.pop(run.name, None) is not None:
            self.groups[run.group] -= 1
            if not self.groups[run.group]:
                del self.groups[run.group]
            self._pool.changed()

    def post(self, message: ToWorker) -> None:
        """Send a message with the next batch; drop it if the worker is dead."""
        if self.link is not None:
            self._outbox.append(message)
            self._filled.set()

    def give_up(self, error: WorkerLost) -> None:
        """End the worker, which has frozen, as if it had died."""
        if not self._given_up.done():
            self._given_up.set_result(error)

    async def _serve(self) -> None:
        """Start the worker, and again whenever it dies."""
        while True:
            try:
                await self._live()
            except WorkerLost as error:
                self._lose(error)
                self._deaths += 1
                if self._deaths > self._pool.max_restarts:
                    text = f"worker {self.number} died {self._deaths} times in a row; the last time: {error}"
                    self._pool.fail(WorkersFailed(text))
                    return
                logger.warning("worker %d died (%s); it is started again", self.number, error)
            except asyncio.CancelledError:
                if self.link is not None:  # the event loop ends without a shutdown
                    self.link.kill()
                self._lose(WorkerLost("the collector has ended"))
                raise
            except Exception as error:
                self._lose(WorkerLost(str(error)))
                if isinstance(error, WorkersFailed):
                    failed = error
                else:
                    failed = WorkersFailed(f"worker {self.number} failed: {error!r}")
                    failed.__cause__ = error
                self._pool.fail(failed)
                return

    async def _live(self) -> None:
        """Start the worker, and exchange messages with it until it dies."""
        link = await self._pool.start(self.number)
        self.link, self.clock_offset, self.heard_at = link, math.inf, self._loop.time()
        given_up = self._given_up = self._loop.create_future()
        self._pool.changed()
        sending = self._loop.create_task(self._send(link))
        receiving = self._loop.create_task(self._receive(link))
        try:
            await asyncio.wait((sending, receiving, given_up), return_when=asyncio.FIRST_COMPLETED)
            if given_up.done():
                raise given_up.result()
            for task in (sending, receiving):
                if task.done():
                    task.result()
        except BaseException as error:
            if isinstance(error, WorkerLost):
                link.kill()
            raise
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.wait((sending, receiving))

    async def _send(self, link: WorkerLink) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(gather_s(len(self.runs)))
            self._filled.clear()
            messages, self._outbox = self._outbox, []
            await link.send(pack(self._loop.time(), messages, self._refuse))

    def _refuse(self, message: ToWorker, error: Exception) -> None:
        if (run := self.runs.get(message.name)) is not None:
            run.refuse(TypeError(f"task of {message.name} cannot be sent to a worker: {error}"))

    async def _receive(self, link: WorkerLink) -> None:
        while True:
            sent_at, messages = unpack(await link.receive())
            self.heard_at = self._loop.time()
            # The clocks differ by the least difference that was seen, since messages take time to arrive.
            self.clock_offset = min(self.clock_offset, self._loop.time() - sent_at)
            for message in messages:
                self._take(message)

    def _take(self, message: FromWorker) -> None:
        run = self.runs.get(message.name)
        if run is None:
            return
        if isinstance(message, Ended):
            self._deaths = 0
        if isinstance(message, Ended | Failed):
            self.leave(run)  # before the reward is computed
        run.take(message)

    def _lose(self, error: WorkerLost) -> None:
        """Report the death of the worker to its trajectories."""
        self.link = None
        self._outbox = []
        for run in list(self.runs.values()):
            run.lose(error)

    async def close(self) -> None:
        """End the worker."""
        link, self.link = self.link, None
        self.task.cancel()
        await asyncio.wait((self.task,))
        if link is not None:
            with contextlib.suppress(WorkerLost):
                await link.close()


class WorkerPool:
    """Runs the trajectories of a collector on its workers; lives on the event loop of the collector.

    Args:
        workers: How workers are started, and how many.
        spec: What workers create their agents from, pickled.
        shared: What the trajectories share on this side.
        name: Name under which the workers were packed.
    """

    def __init__(self, workers: Workers, spec: bytes, shared: Shared, *, name: str) -> None:
        self._workers, self._spec, self._shared, self._name = workers, spec, shared, name
        self._all: list[_Worker] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._error: WorkersFailed | None = None
        self.max_restarts = workers.max_restarts

    def new_run(
        self,
        task: Task,
        *,
        name: str,
        index: int = 0,
        group: int | None = None,
        observer: Observer | None = None,
        key: str | None = None,
        group_name: str = "",
    ) -> RemoteRun:
        """Return a trajectory that has not begun.

        Args:
            task: What it starts from.
            name: Name of the trajectory, unique in the process.
            index: Number in its group.
            group: Number of the group; None without one.
            observer: Follows what it does, or None.
            key: Name of the trajectory for the engine; None: `name`.
            group_name: Name of the group for its tools, unique in the process; "" without one.
        """
        return RemoteRun(
            self._shared,
            self,
            task,
            name=name,
            index=index,
            group=group,
            observer=observer,
            key=key,
            group_name=group_name,
        )

    async def start(self, number: int) -> WorkerLink:
        """Start a worker."""
        return await self._workers.start(number, self._spec)

    async def enter(self, run: RemoteRun, begin: Begin) -> _Worker:
        """Wait for a worker that has room, and begin a trajectory on it.

        Args:
            run: The trajectory.
            begin: Its first message.

        Raises:
            WorkersFailed: If workers do not start, or keep dying.
        """
        if not self._all:
            self._all = [_Worker(self, number) for number in range(self._workers.count)]
        while True:
            if self._error is not None:
                raise self._error
            loads = {one.number: len(one.runs) for one in self._all if one.link is not None}
            of_group = {one.number: one.groups[run.group] for one in self._all if run.group in one.groups}
            chosen = choose_worker(loads, of_group, self._workers.max_trajectories)
            if chosen is not None:
                worker = self._all[chosen]
                worker.enter(run, begin)
                return worker
            await self._wait(is_ready=bool(loads))

    async def _wait(self, *, is_ready: bool) -> None:
        """Wait until a worker is ready or has room."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        while not waiter.done():
            done, _ = await asyncio.wait((waiter,), timeout=None if is_ready else REMINDER_S)
            if not done and waiter is self._waiting[0]:
                logger.warning(
                    "no worker is ready: %d trajectories wait until the cluster has room for one of %d",
                    len(self._waiting),
                    len(self._all),
                )

    def changed(self) -> None:
        """Wake the trajectories that wait for a worker."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: WorkersFailed) -> None:
        """End all trajectories that need a worker."""
        self._error = self._error or error
        self.changed()
        for worker in self._all:
            for run in list(worker.runs.values()):
                run.refuse(self._error)

    async def close(self) -> None:
        """Close what the workers hold open, and end them; may be called again."""
        self._error = self._error or WorkersFailed("the collector was shut down")
        workers, self._all = self._all, []
        await asyncio.gather(*(worker.close() for worker in workers))
        self.changed()
        if workers:
            await self._release()

    async def _release(self) -> None:
        """Free what the workers shared; an error is logged, so that the rest is closed, too."""
        try:
            try:
                await asyncio.to_thread(self._workers.release, self._name)
            except RuntimeError:  # the program ends, and starts no thread any more
                self._workers.release(self._name)
        except Exception as error:
            logger.warning("what the workers shared may be left over: %r", error)
