"""The limiter of a cluster, with two real nodes of Ray on this machine, and workers that are killed."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers.limit import limit
from helpers.limiter_process import call_for, count_calls, hold, most_at_once

from torchrl_agentic import InfrastructureError
from torchrl_agentic.dispatch import init_execution_pool
from torchrl_agentic.limits import ClusterRateLimiter, LimitsDiffer
from torchrl_agentic.limits.base import ServiceLimits
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest
from torchrl_agentic.limits.ray_actor import NAMESPACE, LeaseActor, RayTransport

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("ResourceWarning", "FutureWarning")),
    pytest.mark.timeout(limit(240)),
]
TTL = limit(0.35)


@pytest.fixture(scope="module")
def nodes(own_ray: None) -> Generator[list[str]]:
    """Start a cluster of two nodes; give their ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_agentic.limits.cluster.LINGER_S", 0.2)
        yield from _cluster()


def _cluster() -> Generator[list[str]]:
    from ray.cluster_utils import Cluster

    quiet = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        namespace=uuid.uuid4().hex,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    try:
        yield [node["NodeID"] for node in ray.nodes()]
    finally:
        with _rays_threads_may_fail():
            _reports_have_ended()
            ray.shutdown()
            cluster.shutdown()


def _reports_have_ended() -> None:
    """Wait for the threads that report: Ray ends a process in which a thread uses it as it shuts down."""
    for thread in threading.enumerate():
        if thread.name == "torchrl_agentic-lease":
            thread.join(limit(30))
            assert not thread.is_alive()


@contextlib.contextmanager
def _rays_threads_may_fail() -> Generator[None]:
    """Ray's own threads, which listen to the cluster, may lose it before they are stopped."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if args.thread is None or not args.thread.name.startswith("ray_"):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def _on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _caller(node: str) -> Any:
    """Make a remote function that calls on one node for some seconds."""

    @ray.remote(num_cpus=0, scheduling_strategy=_on(node), max_retries=0)
    def work(name: str, limit: int, log: str, seconds: float) -> str:
        limiter = ClusterRateLimiter(name, max_concurrent=limit, ttl=TTL)
        asyncio.run(call_for(limiter, Path(log), seconds, 2 * limit, least=21))
        return ray.get_runtime_context().get_node_id()

    return work


def _holder(node: str) -> Any:
    """Make an actor on one node that takes all there is."""

    @ray.remote(num_cpus=0, scheduling_strategy=_on(node), max_restarts=0)
    class Holder:
        async def hold(self, name: str, limit: int) -> int:
            limiter = ClusterRateLimiter(name, max_concurrent=limit, ttl=TTL)
            held = asyncio.Event()
            self.task = asyncio.create_task(hold(limiter, limit, held.set))
            await held.wait()
            return os.getpid()

    return Holder.remote()


def test_workers_on_two_nodes_keep_a_limit_together(nodes: list[str], name: str, tmp_path: Path):
    logs = [tmp_path / str(number) for number in range(4)]
    runs = [
        _caller(nodes[number % 2]).remote(name, 6, str(log), 2.0 + TTL) for number, log in enumerate(logs)
    ]
    assert sorted(set(ray.get(runs, timeout=limit(120)))) == sorted(nodes)
    assert most_at_once(logs) <= 6
    assert min(map(count_calls, logs)) > 20


async def test_slots_of_a_killed_worker_are_returned(nodes: list[str], name: str):
    holder = _holder(nodes[1])
    pid = ray.get(holder.hold.remote(name, 3), timeout=limit(120))
    limiter = ClusterRateLimiter(name, max_concurrent=3, ttl=TTL)
    waiting = asyncio.create_task(limiter.wait())
    done, _ = await asyncio.wait([waiting], timeout=1.5 * TTL)
    assert not done
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(waiting, limit(30))
    limiter.release()


def test_an_actor_that_starts_again_gives_out_nothing_twice(nodes: list[str], name: str, tmp_path: Path):
    logs = [tmp_path / str(number) for number in range(2)]
    runs = [
        _caller(node).remote(name, 3, str(log), 4.0 + 2 * TTL) for node, log in zip(nodes, logs, strict=True)
    ]
    deadline = ray.wait(runs, timeout=0)[1]
    assert deadline
    while not all(map(count_calls, logs)):
        ray.wait(runs, timeout=0.1)
    ray.kill(ray.get_actor(f"limiter:{name}", namespace=NAMESPACE), no_restart=False)
    ray.get(runs, timeout=limit(120))
    assert most_at_once(logs) <= 3
    assert min(map(count_calls, logs)) > 20


async def test_an_actor_that_nobody_uses_ends_and_another_takes_its_place(nodes: list[str], name: str):
    options = {"name": f"limiter:{name}", "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    first = ray.remote(LeaseActor).options(max_restarts=-1, **options).remote(idle_s=3 * TTL)
    limiter = ClusterRateLimiter(name, max_concurrent=1, ttl=TTL)
    async with limiter.slot():
        await asyncio.sleep(4 * TTL)  # a running call counts as use
        assert ray.get_actor(f"limiter:{name}", NAMESPACE)._actor_id == first._actor_id
    async with asyncio.timeout(limit(60)):
        while _is_there(name):
            await asyncio.sleep(0.05)
    async with asyncio.timeout(limit(60)), limiter.slot() as slot:
        assert not slot.is_lost
        assert ray.get_actor(f"limiter:{name}", NAMESPACE)._actor_id != first._actor_id


def _is_there(name: str) -> bool:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {"name": f"limiter:{name}", "namespace": NAMESPACE} in actors


@pytest.mark.parametrize(
    "raised", [SystemExit(0), Exception("Failed to submit task to actor"), ValueError("no such actor")]
)
def test_error_of_ending_ray_is_a_lost_connection_and_a_new_actor_follows(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException
):
    """A thread that waits as Ray shuts down gets SystemExit; after a new `ray.init` the actor is unknown."""
    lease, made = Lease(1, 1, (), 1.0, 0.0, 1, None, 0), []

    def new_actor(actor_class: type) -> Any:
        made.append(actor_class)
        return SimpleNamespace(sync=SimpleNamespace(remote=lambda report: len(made)))

    def get(number: int, timeout: float) -> Lease:
        if number == 1:
            raise raised
        return lease

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray,
        "remote",
        lambda actor: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(new_actor, actor))),
    )
    monkeypatch.setattr("ray._private.worker.get", get)
    transport, request = (
        RayTransport("name"),
        LeaseRequest("client", 1, ServiceLimits.of(1), TTL, 0, 0, 1, 0, 0, 0, None, 0.0),
    )
    with pytest.raises(ConnectionError):
        transport.sync(request, 1.0)
    assert transport.sync(request, 1.0) == lease


def test_a_report_that_is_under_way_as_ray_shuts_down_starts_no_cluster(monkeypatch: pytest.MonkeyPatch):
    states, started = iter([True, True]), []
    monkeypatch.setattr(ray, "is_initialized", lambda: next(states, False))
    monkeypatch.setattr(ray, "init", lambda *_, **__: started.append(1))
    transport, request = (
        RayTransport("name"),
        LeaseRequest("client", 1, ServiceLimits.of(1), TTL, 0, 0, 1, 0, 0, 0, None, 0.0),
    )
    transport._actor = SimpleNamespace(sync=SimpleNamespace(remote=lambda request: object()))
    with pytest.raises(ConnectionError):
        transport.sync(request, 1.0)
    assert not started


def test_job_with_different_limits_gets_an_error(nodes: list[str], name: str):
    ray.get(_holder(nodes[0]).hold.remote(name, 2), timeout=limit(120))
    with pytest.raises(LimitsDiffer, match="max_concurrent=2"):
        ClusterRateLimiter(name, max_concurrent=3, ttl=TTL)


async def test_tools_of_other_names_share_nothing(nodes: list[str], name: str):
    ray.get(_holder(nodes[0]).hold.remote(name, 1), timeout=limit(120))
    async with ClusterRateLimiter(f"{name}-2", max_concurrent=1, ttl=TTL).slot() as slot:
        assert not slot.is_lost


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let limiters lose the contact late: on a busy machine an actor may answer late."""
    monkeypatch.setitem(ClusterRateLimiter.__init__.__kwdefaults__, "ttl", limit(2))


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_a_pool_runs_its_work_in_actors_and_outlives_them(nodes: list[str], name: str, mode: str):
    async with init_execution_pool(3, rate_limit=2, name=name, mode=mode) as pool:  # type: ignore[arg-type]
        found = await asyncio.gather(*(pool.execute(divmod, number, 3) for number in range(6)))
        assert found == [divmod(number, 3) for number in range(6)]
        assert await pool.execute(os.getpid) != os.getpid()
        with pytest.raises(ZeroDivisionError):
            await pool.execute(divmod, 1, 0)
        with pytest.raises(InfrastructureError, match="died"):
            await pool.execute(os._exit, 1)
        assert await pool.execute(divmod, 7, 2) == (3, 1)
        assert pool.limiter is not None
        assert pool.limiter.stats().in_flight == 0


@pytest.mark.usefixtures("_patient")
async def test_a_cancelled_call_of_a_pool_of_processes_ends_its_actor(nodes: list[str], name: str):
    async with init_execution_pool(1, rate_limit=1, name=name, mode="process") as pool:
        hung = asyncio.create_task(pool.execute(time.sleep, 600))
        assert pool.limiter is not None
        while not pool.limiter.stats().in_flight:
            await asyncio.sleep(0.01)
        hung.cancel()
        assert await asyncio.wait_for(pool.execute(divmod, 7, 2), limit(60)) == (3, 1)
