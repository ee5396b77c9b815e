"""`RayWorkers`: workers of a collector as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_agentic.collectors.workers import WorkerLink, WorkerLost, Workers, WorkersFailed
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.errors import MissingExtra

if TYPE_CHECKING:
    from torchrl_agentic.collectors.worker_host import WorkerHost

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 25.0
"""Seconds that a worker may take to close what it holds open before it is killed."""


class RayWorkers(Workers):
    """Actors of a Ray cluster that run the trajectories of an `AgentCollector`.

    ::

        ray.init()
        collector = AgentCollector(compose, ..., workers=RayWorkers(8, cpus_per_worker=4))

    Each actor holds the tools, sandboxes and sessions of its trajectories; names, ids, texts and results
    travel. Engine, rewards and records stay in the process of the collector. Transforms are pickled to the
    workers, and each `RateLimiter` among them becomes a `ClusterRateLimiter`, so that its limits hold over
    all workers.

    If a worker or its node dies, another one is started, and its trajectories go on elsewhere: from their
    last turn if nothing was open and no call with effects may have run since, else from their task, under a
    new name.

    Args:
        count: Number of workers.
        cpus_per_worker: Processors that Ray reserves for each. A worker's own event loop uses one; sandboxes
            and blocking tools need more.
        resources: Further resources that each needs, such as `{"sandbox": 1}`.
        placement: "spread" over the nodes, "pack" on few nodes, a `PlacementGroup` with a bundle for each
            worker, or another scheduling strategy of Ray.
        runtime_env: Environment of the workers, as Ray takes it; None: that of the job. Ray uploads local
            folders for whole jobs only, by `ray.init(runtime_env=...)`; here, folders are URIs.
        max_trajectories: Upper bound on the trajectories of one worker; None: the collector's
            `max_in_flight` alone.
        max_restarts: Number of times in a row that a worker may die before one of its trajectories has ended;
            after one more, the next batch raises.

    Raises:
        ValueError: If a number or `placement` is invalid, or `runtime_env` has a local folder.
    """

    def __init__(
        self,
        count: int,
        *,
        cpus_per_worker: float = 1.0,
        resources: Mapping[str, float] | None = None,
        placement: Any = "spread",
        runtime_env: Mapping[str, Any] | None = None,
        max_trajectories: int | None = None,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(count, max_trajectories=max_trajectories, max_restarts=max_restarts)
        if not cpus_per_worker >= 0:
            raise ValueError(f"cpus_per_worker is 0 or more; got {cpus_per_worker}")
        if isinstance(placement, str) and placement not in ("spread", "pack"):
            raise ValueError(
                f"placement is 'spread', 'pack', a PlacementGroup or a scheduling strategy; got {placement!r}"
            )
        env = runtime_env or {}
        for folder in (env.get("working_dir"), *(env.get("py_modules") or ())):
            if folder is not None and "://" not in str(folder):
                raise ValueError(
                    f"runtime_env of RayWorkers takes URIs; got the local folder {folder!r}, which Ray "
                    "uploads for a whole job only: ray.init(runtime_env=...)"
                )
        self._placement = placement
        self._options: dict[str, Any] = {
            "num_cpus": cpus_per_worker,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if resources:
            self._options["resources"] = dict(resources)
        if runtime_env is not None:
            self._options["runtime_env"] = dict(runtime_env)

    def check(self) -> None:
        """Raise MissingExtra if Ray is not installed, and RuntimeError if it is not initialised."""
        if not _ray().is_initialized():
            raise RuntimeError("RayWorkers need a cluster: call ray.init() before the collector is created")

    def pack(self, spec: Any, name: str) -> bytes:
        """Pickle what a worker creates its stages from, with limiters that hold over the cluster.

        Args:
            spec: A `WorkerSpec`.
            name: Name of the collector, unique in the cluster.
        """
        from torchrl_agentic.collectors.worker_pickle import pickle_for_workers

        return pickle_for_workers(spec, name, over="ray")

    def release(self, name: str) -> None:
        """End the actors that hold the limits of the workers.

        Args:
            name: Name of the collector.
        """
        from torchrl_agentic.limits.ray_actor import end_leases

        end_leases(f"{name}:")

    async def start(self, number: int, spec: bytes) -> WorkerLink:
        """Start an actor, and wait until it has created its tools.

        Args:
            number: Number of the worker.
            spec: Result of `pack`.

        Raises:
            WorkerLost: If it died meanwhile.
            WorkersFailed: If its environment, or the transforms, cannot be created there.
        """
        ray = _ray()
        if not ray.is_initialized():
            raise WorkersFailed("Ray has been shut down")
        options = {**self._options, "scheduling_strategy": self._strategy()}
        link = _RayLink(ray.remote(_RayWorker).options(**options).remote())
        try:
            node = await link.ask("start", spec)
        except (WorkerLost, asyncio.CancelledError):
            link.kill()
            raise
        except Exception as error:
            link.kill()
            cause = getattr(error, "cause", None) or error
            raise WorkersFailed(
                f"worker {number} could not start: {type(cause).__name__}: {cause}. Its packages and files "
                "come from its node, or from runtime_env"
            ) from error
        logger.info("worker %d started on node %s", number, node)
        return link

    def _strategy(self) -> Any:
        placement = self._placement
        if isinstance(placement, str):
            return {"spread": "SPREAD", "pack": "DEFAULT"}[placement]
        if hasattr(placement, "bundle_specs"):
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            return PlacementGroupSchedulingStrategy(placement, placement_group_capture_child_tasks=True)
        return placement

    def __repr__(self) -> str:
        return f"RayWorkers({self.count}, {self._options})"


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("RayWorkers", "ray", "ray") from None
    return ray


class _RayLink(WorkerLink):
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the actor."""
        ray = _ray()
        if not ray.is_initialized():  # otherwise the call would start a cluster
            raise WorkersFailed("Ray has been shut down")
        try:
            return await getattr(self._actor, method).remote(*args)
        except ray.exceptions.RuntimeEnvSetupError as error:
            raise WorkersFailed(str(error)) from error
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise WorkerLost(str(error).strip().partition("\n")[0]) from error

    async def send(self, batch: bytes) -> None:
        await self.ask("send", batch)

    async def receive(self) -> bytes:
        return await self.ask("receive")

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self.ask("close"), CLOSE_LIMIT_S)
        except TimeoutError:
            logger.error("a worker did not close in %g s; it is killed", CLOSE_LIMIT_S)
        except WorkersFailed:
            return
        finally:
            self.kill()

    def kill(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # it is dead, or Ray shuts down
                ray.kill(self._actor, no_restart=True)


class _RayWorker:
    """A worker as an actor; its trajectories run on the event loop of this package, as tools expect."""

    def __init__(self) -> None:
        # Limiters wait for their leases on threads of their own, of which Ray would warn.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        self._host: WorkerHost | None = None

    async def start(self, spec: bytes) -> str:
        """Create the stages; return the id of the node."""
        from torchrl_agentic.collectors.worker_host import WorkerHost

        unpickled = await asyncio.to_thread(pickle.loads, spec)
        shared = await asyncio.to_thread(unpickled.create)

        async def host() -> WorkerHost:
            return WorkerHost(shared, unpickled)

        self._host = await _on_loop(host())
        return _ray().get_runtime_context().get_node_id()

    async def send(self, batch: bytes) -> None:
        """Take a batch of messages."""
        assert self._host is not None
        host = self._host

        async def deliver() -> None:
            host.deliver(batch)

        await _on_loop(deliver())

    async def receive(self) -> bytes:
        """Wait for messages, and return them."""
        assert self._host is not None
        return await _on_loop(self._host.collect())

    async def close(self) -> None:
        """Close what is open."""
        if self._host is not None:
            await _on_loop(self._host.close())


async def _on_loop(work: Any) -> Any:
    """Await a coroutine on the event loop of this package."""
    return await asyncio.wrap_future(event_loop.submit(work))
