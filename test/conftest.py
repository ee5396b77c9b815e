"""Configuration of all tests: signals, examples per property, slow tests, and the order of files."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests share the processors, so that threads of torch would wait for each other. Tests with vLLM run alone.
if importlib.util.find_spec("vllm") is None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# In its first cluster, Ray gives a process a token, and sets this variable, which `own_environ` would remove.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray's processes are nice to all others (15), so that beside busy ones they would not begin for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
HERE = Path(__file__).parent
# Tests import `helpers`, `fakes`, and the programs of `examples`, `scripts` and `benchmarks` that they check.
sys.path[:0] = map(str, (HERE, HERE.parent / "examples", HERE.parent / "scripts"))
sys.path.append(str(HERE.parent / "benchmarks"))

from helpers.leaks import check_ended, no_leaks  # noqa: E402
from helpers.limit import SLOWNESS, limit, measure_slowness  # noqa: E402

SLOW = (
    "sandbox",
    "tools/test_sandbox_fusion.py",
    "limits/test_ray_actor.py",
    "transforms/test_control_tokens.py",
    "rollout",
    "engines/test_vllm_engine.py",
    "engines/test_vllm_actors.py",
    "engines/test_vllm_server.py",
    "engines/test_openai_engine.py",
    "engines/test_openai_vllm.py",
    "engines/test_engine_pool_vllm.py",
    "collectors/test_collector_vllm.py",
    "collectors/test_training_vllm.py",
    "engines/test_http_engine.py",
    "repl",
    "tools/mcp",
    "rewards/test_code_scorer.py",
    "test_docs.py",
    "transforms/test_environments.py",
    "test_tutorials.py",
    "serve",
    "viewer/test_app.py",
    "viewer/html",
    "tools/test_capped.py",
    "testing",
    "test_deep_readers.py",
    "test_soak.py",
    "test_upstream.py",
    "test_tree_example.py",
    "tools/legacy",
    "tools/http/test_hostile.py",
    "tools/http/test_body.py",
    "tools/http/test_page.py",
    "cli/test_servers.py",
    "trajectory",
    "collectors/test_random_schedules.py",
    "collectors/test_admission.py",
    "collectors/test_collector_exits.py",
    "collectors/test_agent_collector.py",
    "collectors/test_branching.py",
    "collectors/test_tree_advantages.py",
    "collectors/test_weight_updates.py",
    "collectors/test_bad_input.py",
    "collectors/test_task_stream.py",
    "collectors/test_collector_state.py",
    "collectors/test_resumed_processes.py",
    "collectors/test_capacity.py",
    "collectors/test_request_permits.py",
    "collectors/test_context_length.py",
    "collectors/test_workers.py",
    "collectors/test_ray_workers.py",
    "test_examples.py",
    "test_grpo_example.py",
    "test_grpo_gradients.py",
    "transforms/test_hazards.py",
    "transforms/test_consumers_torchrl.py",
    "transforms/test_turn_costs.py",
    "dispatch/test_outages.py",
    "tools/test_service.py",
    "tools/http/test_tool.py",
    "cli/test_view.py",
    "test_packaging.py",
    "tools/test_search.py",
    "tokens/test_media.py",
    "cli/test_report.py",
    "tools/test_tools.py",
    "cli/test_load.py",
    "transforms/test_cassette.py",
    "dispatch/test_execution_pool.py",
    "records/test_jsonl_index.py",
    "limits/test_cluster.py",
    "config/test_sources.py",
    "cli/test_main.py",
    "cli/test_replay.py",
    "cli/test_ask.py",
    "cli/test_eval_command.py",
    "evaluation/test_evaluate.py",
    "evaluation/test_resume.py",
    "test_migration.py",
    "test_documented_tools.py",
    "rewards/test_collector_rewards.py",
    "rewards/test_scorer_contract.py",
    "rewards/test_model_judge.py",
    "engines/test_scripted_engine.py",
    "engines/test_transformers_engine.py",
    "rollout/test_lock_step.py",
    "engines/test_engine_pool.py",
)
"""Files and folders whose tests are `slow`: they start sandboxes, servers, Ray or a model."""

LONGEST = (
    "sandbox/test_contract.py",
    "sandbox/test_other_user.py",
    "repl/test_jupyter_repl.py",
    "repl/test_contract.py",
    "test_grpo_example.py",
    "parsers/test_contract.py",
    "test_tutorials.py",
)
"""Files that take long. They run first, so that all processes end at about the same time."""

MACHINE = (
    "limits/test_ray_actor.py",
    "collectors/test_ray_workers.py",
    "sandbox/test_cgroups.py",
    "sandbox/test_forkserver_sandbox.py::test_a_zygote_that_cannot_fork",
    "test_tutorials.py::test_a_tutorial_runs[06_services_and_cluster_limits]",
)
"""Tests that start Ray or change quotas of a user, so that no two may run at once. They run first."""

# Examples per property test, for `--hypothesis-profile`. Tests share the machine, hence no deadlines.
# Runs of the same code try the same examples, so that a failure comes from the change.
settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("default")

# Background jobs of a shell ignore these signals; tests and their processes must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick` and `--order-seed`."""
    text = "skip tests marked `slow`, and try few examples of each property"
    parser.addoption("--quick", action="store_true", help=text)
    text = "run the files in the order that this number determines"
    parser.addoption("--order-seed", type=int, metavar="N", help=text)


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Load the quick profile if `--quick` is given, keep the order of files under xdist, and scale limits."""
    if config.getoption("--quick"):
        settings.load_profile("quick")
    config.option.loadscopereorder = False  # pytest_collection_modifyitems orders them
    if not hasattr(config, "workerinput"):  # whose environment is that of the process that has measured
        os.environ[SLOWNESS] = str(measure_slowness(getattr(config.option, "numprocesses", None) or 1))
    if config.option.timeout is None and "PYTEST_TIMEOUT" not in os.environ:
        config.option.timeout = limit(float(config.getini("timeout")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of slow files with `--quick`."""
    return True if config.getoption("--quick") and _is_slow(collection_path) else None


def _needs_machine(nodeid: str) -> bool:
    """Check that a test is one of `MACHINE`."""
    return nodeid.removeprefix("test/").startswith(MACHINE)


def _place(path: Path, entries: Sequence[str]) -> int:
    """Return the index of a file's entry, or the number of entries if it has none."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.name
    places = (index for index, one in enumerate(entries) if name == one or name.startswith(f"{one}/"))
    return next(places, len(entries))


def _is_slow(path: Path) -> bool:
    """Check that a file is one of `SLOW`."""
    return _place(path, SLOW) < len(SLOW)


@pytest.fixture(scope="module", autouse=True)
def _left() -> Iterator[dict[int, str]]:
    """Fail a file that leaves processes behind, and name the test that has started them."""
    left: dict[int, str] = {}
    yield left
    check_ended(left)


@pytest.fixture(autouse=True)
def _leaks(request: pytest.FixtureRequest, _left: dict[int, str]) -> Iterator[None]:
    """Fail the test that leaves open files behind; see `no_leaks`."""
    with no_leaks(request.node.name, _left):
        yield


@pytest.fixture
def own_environ() -> Iterator[None]:
    """Restore environment variables after a program; records redact the values of names such as *_KEY."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return an empty folder, in which sandboxes of this test create their working folders."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)  # sandboxed code may run as another user
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


@pytest.fixture(scope="session")
def own_ray() -> Iterator[None]:
    """Give Ray a folder of its own, so that it does not join the cluster of another test run."""
    short = tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    )  # for its sockets
    with short as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, name formats, and order the files under xdist, or as `--order-seed` says.

    The order is random, the same in each run, so that files which compute run beside files which wait.
    """
    for item in items:
        if (name := getattr(getattr(getattr(item, "cls", None), "parser", None), "name", None)) is not None:
            item.extra_keyword_matches.add(str(name))  # `-k qwen3_coder` finds `TestQwen3Coder`
        if _is_slow(item.path):
            item.add_marker("slow")
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    seed = config.getoption("--order-seed")
    if seed is None and not hasattr(config, "workerinput"):
        return
    files = {item.path: item.nodeid.partition("::")[0] for item in items}
    places = {path: random.Random(f"{seed} {name}").random() for path, name in files.items()}
    items.sort(key=lambda item: places[item.path])
    if seed is None:
        items.sort(key=lambda item: (not _needs_machine(item.nodeid), _place(item.path, LONGEST)))


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection: with torch, `gc.collect()` takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file in one process, because of its fixtures, and all of `MACHINE` in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if _needs_machine(nodeid) else nodeid.partition("::")[0]

    return (
        ByFile(config, log) if config.getvalue("dist") == "load" else None
    )  # which is what -n means by itself
