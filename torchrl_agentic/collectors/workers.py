"""`Workers`: processes that hold tools, sandboxes and sessions for the trajectories of a collector."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from torchrl_agentic.errors import InfrastructureError, check_count
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory


class WorkerLost(InfrastructureError):
    """A worker has died, and what ran on it."""


class WorkersFailed(RuntimeError):
    """Workers do not start, or keep dying; the collector ends with it."""


class Run(Protocol):
    """One trajectory of a collector, from its task to its reward.

    Attributes:
        name: Name of the trajectory.
        phase: What runs: the preparation of the task, the turns, or the rewards.
    """

    name: str
    phase: Literal["task", "trajectory", "reward"]

    @property
    def n_turns(self) -> int:
        """Number of turns so far."""
        ...

    async def run(self) -> Trajectory:
        """Run the trajectory to its end, and compute its reward."""
        ...

    def so_far(self) -> Trajectory:
        """Return what has happened in a trajectory that failed."""
        ...


class WorkerRun(Run, Protocol):
    """A trajectory on a worker.

    Attributes:
        time_limit: Time limit of the trajectory, which stands still while it waits for a worker; or None.
    """

    time_limit: asyncio.Timeout | None


class Runs(Protocol):
    """Creates trajectories of a `RolloutLoop` that run on workers; see `WorkerPool`."""

    def new_run(
        self,
        task: Task,
        *,
        name: str,
        index: int,
        group: int | None,
        observer: Any,
        key: str | None = None,
        group_name: str = "",
    ) -> WorkerRun:
        """Return a trajectory that has not begun.

        Args:
            task: What it starts from.
            name: Name of the trajectory.
            index: Number in its group.
            group: Number of the group.
            observer: Follows what it does.
            key: Name of the trajectory for the engine; None: `name`.
            group_name: Name of the group for its tools, unique in the process; "" without one.
        """
        ...

    async def close(self) -> None:
        """Close what the trajectories ran on."""
        ...


class WorkerLink(ABC):
    """Connection to one worker that is ready: batches of bytes in both directions.

    Each method raises WorkerLost if the worker has died.
    """

    @abstractmethod
    async def send(self, batch: bytes) -> None:
        """Hand a batch over; batches arrive in the order in which they were sent."""

    @abstractmethod
    async def receive(self) -> bytes:
        """Wait for the next batch of the worker."""

    @abstractmethod
    async def close(self) -> None:
        """Close what the worker holds open, and end it."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once, without waiting; it may be dead already."""


class Workers(ABC):
    """Workers of an `AgentCollector`; `RayWorkers` are actors of a Ray cluster.

    Args:
        count: Number of workers.
        max_trajectories: Upper bound on the trajectories of one worker; None: the collector's
            `max_in_flight` alone.
        max_restarts: Number of times in a row that a worker may die before one of its trajectories has ended;
            after one more, the next batch raises.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, count: int, *, max_trajectories: int | None = None, max_restarts: int = 3) -> None:
        check_count("count", count, optional=False)
        check_count("max_trajectories", max_trajectories)
        check_count("max_restarts", max_restarts, optional=False, least=0)
        self.count, self.max_trajectories, self.max_restarts = count, max_trajectories, max_restarts

    def check(self) -> None:  # noqa: B027  most have nothing to check
        """Raise an error if workers cannot be started from this process."""

    def pack(self, spec: Any, name: str) -> bytes:
        """Pickle what a worker creates its agent from.

        Args:
            spec: A `WorkerSpec`.
            name: Name of the collector, unique in the cluster.
        """
        from torchrl_agentic.collectors.worker_pickle import pickle_for_workers

        return pickle_for_workers(spec, name, over="machine")

    def release(self, name: str) -> None:  # noqa: B027  most have nothing to free
        """Free what the workers of a collector shared, after they have ended; called on a thread.

        Args:
            name: Name of the collector, as `pack` got it.
        """

    @abstractmethod
    async def start(self, number: int, spec: bytes) -> WorkerLink:
        """Start a worker, and wait until it is ready.

        Args:
            number: Number of the worker, counted from 0.
            spec: Result of `pack`.

        Raises:
            WorkerLost: If the worker died meanwhile; it is started again.
            WorkersFailed: If it cannot start; no other attempt is made.
        """


def choose_worker(
    loads: Mapping[int, int], of_group: Mapping[int, int], max_trajectories: int | None
) -> int | None:
    """Return the worker of a new trajectory: the least loaded one, among these one with few of its group.

    Args:
        loads: Number of trajectories by the numbers of the workers that are ready.
        of_group: Number of trajectories of its group by worker; 0 where a worker is missing.
        max_trajectories: Upper bound on the trajectories of a worker; None: no bound.

    Returns:
        The number of a worker; None if all are full, or none is ready.
    """
    free = [one for one, load in loads.items() if max_trajectories is None or load < max_trajectories]
    return min(free, key=lambda one: (loads[one], of_group.get(one, 0), one), default=None)
