"""Leases over a Ray cluster: a named actor gives them out, and outlives the jobs that use it."""

from __future__ import annotations

import sys
import time
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits.lease_server import Lease, LeaseServer, LimitsDiffer, Report

NAMESPACE = "torchrl_agentic"
START_S = 60.0


def is_initialised() -> bool:
    """Whether this process belongs to a Ray cluster; loads nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class LeaseActor:
    """A `LeaseServer` as an actor. Begun anew after its node has failed, it waits until old leases end."""

    def __init__(self) -> None:
        self._server = LeaseServer(time.monotonic())

    def sync(self, report: Report) -> Lease | LimitsDiffer:
        """Take a report; a refusal is a value here, since Ray would wrap an exception."""
        try:
            return self._server.sync(report, time.monotonic())
        except LimitsDiffer as error:
            return error


class RayTransport:
    """A connection to the actor of one name.

    Args:
        name: Name of the service.

    Raises:
        MissingExtra: If Ray is not installed.
        RuntimeError: If it is not initialised.
    """

    def __init__(self, name: str) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtra("a limiter over a Ray cluster", "ray", "ray") from None
        if not ray.is_initialized():
            raise RuntimeError("a limiter over Ray needs ray.init() first")
        # `ray.get` itself would start a cluster where Ray has been shut down since the report was sent.
        from ray._private.worker import get

        self._ray: Any = ray
        self._get: Any = get
        self._name = f"limiter:{name}"
        self._actor: Any = None
        self._asked: Any = None
        self._has_answered = False

    def sync(self, report: Report, timeout: float) -> Lease:
        """Exchange a report for a lease; see `Transport`."""
        ray = self._ray
        if not ray.is_initialized():  # else the next lines would start a cluster
            raise ConnectionError("Ray has been shut down")
        try:
            if self._actor is None:
                options = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
                remote = ray.remote(LeaseActor).options(get_if_exists=True, max_restarts=-1, **options)
                self._actor = remote.remote()
                if not self._has_answered:  # a process has to start for it; later on, others depend on us
                    timeout = max(timeout, START_S)
            # Held until the next report: Ray ends the process where a reference is dropped as it shuts down.
            self._asked = self._actor.sync.remote(report)
            answer = self._get(self._asked, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError("the actor that gives out the leases did not answer in time") from None
        except (Exception, SystemExit) as error:
            # RayError and ValueError if the actor has moved or is gone, a plain Exception if it is of an
            # earlier cluster, SystemExit in a thread that waits for it while Ray shuts down.
            self._actor = None
            raise ConnectionError(f"the actor that gives out the leases: {error!r}") from error
        self._has_answered = True
        if isinstance(answer, LimitsDiffer):
            raise answer
        return answer

    def close(self) -> None:
        """Do nothing: Ray keeps the connections."""
