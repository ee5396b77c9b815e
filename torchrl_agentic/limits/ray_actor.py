"""Leases over a Ray cluster: a named actor that outlives the jobs that use it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest, LeaseServer, LimitsDiffer

_logger = logging.getLogger(__name__)
NAMESPACE = "torchrl_agentic"
_PREFIX = "limiter:"
START_S = 60.0
"""Seconds that the process of the actor may take to start, also on another node."""
RETRY_S = 0.2
AGAIN_S = 10.0
"""Seconds after which an actor that could not end tries again."""
IDLE_S = 3600.0
"""Seconds without a request after which the actor ends. A limiter that is used again starts another one, and
waits for it as after the failure of a node."""


def is_initialised() -> bool:
    """Return whether this process belongs to a Ray cluster, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def end_leases(prefix: str) -> None:
    """End the lease actors of services that nobody uses any more.

    Args:
        prefix: What the names of the services begin with.
    """
    if not is_initialised():
        return
    ray: Any = sys.modules["ray"]
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{_PREFIX}{prefix}"):
            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(ray.get_actor(actor["name"], NAMESPACE), no_restart=True)


class LeaseActor:
    """A `LeaseServer` as a Ray actor.

    Ray restarts it after its node has failed; it then waits for old leases to end. It ends by itself after
    `idle_s` seconds without a request, since a program that was killed cannot end it.

    Args:
        idle_s: Seconds without a request after which it ends; more, if a service may run a call for longer.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        now = time.monotonic()
        self._server = LeaseServer(now)
        self._idle_s, self._ends_at = idle_s, now + idle_s
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def _end_when_idle(self) -> None:
        ray: Any = sys.modules["ray"]
        while True:
            while (left := self._ends_at - time.monotonic()) > 0:
                time.sleep(left)
            try:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            except Exception as error:  # the head of the cluster does not answer, for example
                _logger.warning("the lease actor is not used, and could not end: %r", error)
            time.sleep(AGAIN_S)

    def sync(self, request: LeaseRequest) -> Lease | LimitsDiffer:
        """Return the lease for a request; a refusal too is returned, since Ray would wrap an exception."""
        now = time.monotonic()
        self._ends_at = max(self._ends_at, now + max(self._idle_s, request.call_s))
        try:
            return self._server.sync(request, now)
        except LimitsDiffer as error:
            return error


class RayTransport:
    """A connection to the lease actor of one service.

    Args:
        name: Name of the service.

    Raises:
        MissingExtra: If Ray is not installed.
        RuntimeError: If Ray is not initialised.
    """

    def __init__(self, name: str) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtra("a limiter over a Ray cluster", "ray", "ray") from None
        if not ray.is_initialized():
            raise RuntimeError("a limiter over Ray needs an initialised Ray: call ray.init() first")
        # `ray.get` itself would start a cluster if Ray has been shut down since the request was sent.
        from ray._private.worker import get

        self._ray: Any = ray
        self._get: Any = get
        self._name = f"{_PREFIX}{name}"
        self._actor: Any = None
        self._asked: Any = None
        self._has_answered = False

    def sync(self, request: LeaseRequest, timeout: float) -> Lease:
        """Send a request and return the lease; see `Transport`.

        Args:
            request: State and demand of this process.
            timeout: Longest time to wait for the answer, in seconds.
        """
        ray = self._ray
        if not ray.is_initialized():  # otherwise the next lines would start a cluster
            raise ConnectionError("Ray has been shut down")
        if not self._has_answered:  # the actor's process has to start; later answers come fast
            timeout = max(timeout, START_S)
        began = time.monotonic()
        while True:
            try:
                return self._ask(request, timeout)
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError(
                    f"the lease actor {self._name!r} did not answer in {timeout:g} s"
                ) from None
            except LimitsDiffer:
                raise
            except (Exception, SystemExit) as error:
                # RayError and ValueError if the actor has moved or ended, a plain Exception if it belongs to
                # an earlier cluster, SystemExit in a thread that waits for it while Ray shuts down.
                is_starting = isinstance(error, ray.exceptions.ActorUnavailableError)
                if is_starting and not self._has_answered and time.monotonic() < began + START_S:
                    time.sleep(RETRY_S)  # its node has died, and Ray starts it on another one
                    continue
                self._actor = None
                what = f"the lease actor {self._name!r} cannot be reached: {error!r}"
                raise ConnectionError(what) from error

    def _ask(self, request: LeaseRequest, timeout: float) -> Lease:
        if self._actor is None:
            options = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
            remote = self._ray.remote(LeaseActor).options(get_if_exists=True, max_restarts=-1, **options)
            self._actor = remote.remote()
        # Kept until the next request: Ray aborts a process that drops a reference while Ray shuts down.
        self._asked = self._actor.sync.remote(request)
        answer = self._get(self._asked, timeout=timeout)
        self._has_answered = True
        if isinstance(answer, LimitsDiffer):
            raise answer
        return answer

    def close(self) -> None:
        """Do nothing: Ray keeps the connections."""
