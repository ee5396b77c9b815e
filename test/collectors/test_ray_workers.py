"""Trajectories on actors of a Ray cluster with several nodes on this machine, of which one is removed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
import ray
from helpers.collector_worlds import WildEngine, looks, rows_of, tokenizer
from helpers.limit import limit
from helpers.limiter_process import most_at_once
from helpers.processes import started
from ray.util import list_named_actors

from torchrl_agentic import Injected, RateLimiter, Task, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, CollectorError, RayWorkers
from torchrl_agentic.limits import ClusterRateLimiter
from torchrl_agentic.tools.base import Effects

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("ResourceWarning", "FutureWarning")),
    pytest.mark.timeout(limit(240)),
    pytest.mark.cluster,
]
QUIET = {"include_dashboard": False, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster(own_ray):
    """Start a cluster of a head, and of two nodes that may be removed."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **QUIET})
    for _ in range(2):
        found.add_node(num_cpus=2, object_store_memory=80 << 20)
    here = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ray.init(
        address=found.address,
        log_to_driver=False,
        namespace=uuid.uuid4().hex,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
    before = threading.excepthook

    def hook(args):  # Ray's own threads may lose the cluster before they are stopped
        if args.thread is None or not args.thread.name.startswith("ray_"):
            before(args)

    yield found
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    threading.excepthook = hook
    for thread in threading.enumerate():
        if thread.name == "torchrl_agentic-lease":  # Ray ends a process in which a thread uses it now
            thread.join(limit(30))
    ray.shutdown()
    found.shutdown()
    threading.excepthook = before


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"cpus_per_worker": -1},
        {"placement": "near"},
        {"runtime_env": {"working_dir": "."}},
        {"runtime_env": {"py_modules": ["s3://bucket/shop.zip", "shop"]}},
    ],
    ids=str,
)
def test_wrong_numbers_and_a_missing_cluster_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RayWorkers(**{"count": 1, **wrong})
    if not ray.is_initialized():
        with pytest.raises(RuntimeError, match=r"call ray\.init"):
            RayWorkers(1).check()


def noting(folder, seconds):
    """Return a tool with an effect, which notes its calls in files of its process."""

    @tool(effects=Effects(writes=["world"]))
    async def look(key: str, trajectory: Injected[str]) -> str:
        """Look something up.

        Args:
            key: A key.
        """
        import asyncio
        import os
        import time

        with open(os.path.join(folder, f"{os.getpid()}.keys"), "a") as keys:
            # The key is that of sampling, which a trajectory that begins again shares with the lost one.
            keys.write(f"{trajectory}#{key.rpartition('#')[2]}\n")
        began = time.monotonic()
        await asyncio.sleep(seconds)
        with open(os.path.join(folder, f"{os.getpid()}.log"), "a") as log:
            log.write(f"{began} {time.monotonic()}\n")
        return f"found {key}"

    return look


def task(number):
    return Task(f"t{number}", [{"role": "user", "content": f"q{number}"}])


def tasks(count):
    return list(map(task, range(count)))


def test_a_node_that_is_removed_loses_only_the_turns_that_ran_there(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_agentic.limits.cluster.LINGER_S", 0.2)
    is_removed, begun = threading.Event(), []

    def until_removed():
        """Yield tasks until the node is removed, and some more."""
        left = 8
        while left:
            left -= is_removed.is_set()
            begun.append(task(len(begun)))
            yield begun[-1]

    compose = ToolCompose([noting(str(tmp_path), 0.2)], rate_limits={"look": RateLimiter(max_concurrent=4)})
    collector = AgentCollector(
        compose,
        engine=WildEngine(looks(2), delay=lambda key: 0.005),
        tokenizer=tokenizer(),
        tasks=until_removed(),
        group_size=2,
        groups_per_batch=2,
        max_in_flight=16,
        max_staleness=None,
        workers=RayWorkers(2, cpus_per_worker=1),
        name="x",
    )
    batches = []
    with collector:
        for batch in collector:
            batches.append(batch)
            if not is_removed.is_set() and len(list(tmp_path.glob("*.keys"))) == 2:  # both workers run calls
                cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
                is_removed.set()
        figures = collector.stats.snapshot()
    rows = rows_of(batches)
    assert Counter(row["query"] for row in rows) == {f"q{number}": 2 for number in range(len(begun))}
    assert all(row["agentic", "n_calls"].item() == 2 for row in rows)
    assert figures["failures"] == {}
    assert figures["events"].get("restarted", 0) > 0
    keys = Counter(key for file in tmp_path.glob("*.keys") for key in file.read_text().split())
    assert set(keys.values()) == {1}  # no call of one trajectory ran twice
    kept = {row["collector", "name"] for row in rows}
    assert {key.partition("#")[0] for key in keys} >= kept
    assert len(list(tmp_path.glob("*.keys"))) >= 2
    assert most_at_once(sorted(tmp_path.glob("*.log"))) <= 4
    assert not [actor for actor in list_named_actors(all_namespaces=True) if "limiter:" in actor["name"]]
    ended_within(30, [int(file.stem) for file in tmp_path.glob("*.keys")])


def ended_within(seconds, pids):
    """Wait until processes have ended."""
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a worker goes on after the shutdown"
        time.sleep(0.05)


def test_a_worker_that_is_stopped_is_ended_and_replaced(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_agentic.collectors.remote_run.STOP_LIMIT_S", 3.0)
    collector = AgentCollector(
        ToolCompose([noting(str(tmp_path), 1.0)]),
        engine=WildEngine(looks(1)),
        tokenizer=tokenizer(),
        tasks=tasks(2),
        groups_per_batch=2,
        max_staleness=None,
        trajectory_timeout=5.0,
        workers=RayWorkers(1, cpus_per_worker=1),
    )
    rows = []
    with collector:
        collecting = threading.Thread(target=lambda: rows.extend(rows_of(list(collector))))
        collecting.start()
        while not (files := list(tmp_path.glob("*.keys"))):
            time.sleep(0.05)
        (pid,) = (int(file.stem) for file in files)
        os.kill(pid, signal.SIGSTOP)
        try:
            collecting.join(limit(120))
            assert not collecting.is_alive()
            assert {row["query"] for row in rows} == {"q0", "q1"}
            assert collector.stats.snapshot()["failures"] == {"timeout": 2}
            ended_within(30, [pid])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert len(list(tmp_path.glob("*.keys"))) == 2


def test_a_worker_that_cannot_be_created_names_the_reason(cluster):
    here = os.getpid()

    def made():
        if os.getpid() != here:
            raise ModuleNotFoundError("No module named 'shop'")
        return ToolCompose([noting("", 0.0)])

    given = {"tokenizer": tokenizer(), "tasks": tasks(1), "workers": RayWorkers(1)}
    collector = AgentCollector(made, engine=WildEngine(looks(1)), **given)
    with pytest.raises(CollectorError, match=r"worker 0 could not start.*'shop'.*runtime_env"):
        list(collector)


def test_limits_over_all_workers_do_not_let_ray_warn_of_a_blocked_event_loop(cluster):
    @tool
    async def look(key: str) -> str:
        """Look something up.

        Args:
            key: A key.
        """
        from ray._private import worker

        return f"warned: {worker.blocking_get_inside_async_warned}"

    heard = []
    collector = AgentCollector(
        ToolCompose([look], rate_limits={"look": RateLimiter(max_concurrent=1)}),
        engine=WildEngine(looks(1)),
        tokenizer=tokenizer(),
        tasks=tasks(1),
        workers=RayWorkers(1),
        reward=lambda trajectory: heard.extend(one.text for one in trajectory.messages) or 0.0,
    )
    with collector:
        list(collector)
    assert any("warned: False" in text for text in heard)


def test_a_limiter_of_this_machine_is_refused(cluster):
    limiter = ClusterRateLimiter(uuid.uuid4().hex, max_concurrent=1, over="machine")
    compose = ToolCompose([noting("", 0.0)], rate_limits={"look": limiter})
    given = {"tokenizer": tokenizer(), "tasks": tasks(1), "workers": RayWorkers(1)}
    with pytest.raises(ValueError, match="holds on this machine only"):
        AgentCollector(compose, engine=WildEngine(looks(1)), **given)


@pytest.mark.parametrize("how", ["interrupt", "kill", "exit", "garbage"])
def test_no_worker_is_left_however_its_program_ends(cluster, tmp_path, how):
    root = Path(__file__).parents[1]
    with started(
        [
            sys.executable,
            "-W",
            "ignore",
            str(root / "helpers/ray_driver.py"),
            cluster.address,
            str(tmp_path),
            how,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        # Ray prints what happens to other nodes on the same stream.
        assert "begun\n" in iter(program.stdout.readline, ""), program.stderr.read()
        if how in ("interrupt", "kill"):
            program.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        pids = [int(file.stem) for file in tmp_path.glob("*.stuck")]
        assert pids
        ended_within(limit(60), pids)
        if how == "garbage":
            assert program.poll() is None, "its workers ended before it"
        _, messages = program.communicate("", timeout=limit(60))
    assert (program.returncode == 0) is (how in ("exit", "garbage")), messages
    if how == "interrupt":
        assert "KeyboardInterrupt" in messages
