"""What holds for all tests: signals, examples per property, what is slow, and who runs what in parallel."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
SLOW = (
    "sandbox",
    "limits/test_ray_actor.py",
    "tools/mcp",
    "tools/legacy",
    "tools/test_sandbox_fusion.py",
    "tools/test_capped.py",
    "tools/http/test_body.py",
    "tools/http/test_hostile.py",
    "tools/http/test_page.py",
    "repl",
    "transforms/test_environments.py",
    "transforms/test_hazards.py",
    "transforms/test_control_tokens.py",
    "records/test_jsonl_index.py",
    "limits/test_cluster.py",
    "test_tutorials.py",
    "testing",
    "test_examples.py",
    "viewer/test_app.py",
    "viewer/html",
    "serve",
    "rollout",
    "config/test_sources.py",
    "dispatch/test_execution_pool.py",
    "tools/test_tools.py",
    "transforms/test_cassette.py",
    "test_documented_tools.py",
    "cli/test_main.py",
    "cli/test_load.py",
    "cli/test_replay.py",
    "cli/test_servers.py",
    "test_docs.py",
    "test_migration.py",
    "test_deep_readers.py",
    "test_readme.py",
)
"""Files and folders whose tests start sandboxes, servers, Ray or a model, longest first: all are `slow`."""

MACHINE = (
    "limits/test_ray_actor.py",
    "sandbox/test_cgroups.py",
    "sandbox/test_forkserver_sandbox.py::test_a_zygote_that_cannot_fork",
    "test_tutorials.py::test_a_tutorial_runs[06_services_and_cluster_limits]",
)
"""Tests of which no two may run at once: they start Ray, or change the quotas of a user. Begun first."""

# Examples per property test, for `--hypothesis-profile`. Tests share the machine, hence no deadlines.
# Runs of the same code try the same examples, so that a failure comes from the change.
settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("default")

# A shell's background job ignores these; tests, and what they start, are to be interrupted by them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`."""
    text = "leave out the tests marked `slow`, and try few examples of each property"
    parser.addoption("--quick", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Try few examples if that is asked for; keep the order of files for xdist."""
    if config.getoption("--quick"):
        settings.load_profile("quick")
    config.option.loadscopereorder = False  # we have an order, see below


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import slow files if only quick tests are asked for."""
    return True if config.getoption("--quick") and _place(collection_path) < len(SLOW) else None


def _needs_machine(nodeid: str) -> bool:
    """Return whether a test is one of `MACHINE`."""
    return nodeid.removeprefix("test/").startswith(MACHINE)


def _place(path: Path) -> int:
    """Return the index in `SLOW` of what a file belongs to, or its length if it is quick."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.name
    places = (index for index, slow in enumerate(SLOW) if name == slow or name.startswith(f"{slow}/"))
    return next(places, len(SLOW))


@pytest.fixture
def own_environ() -> Iterator[None]:
    """Undo what programs of readers do to the environment; whatever ends in _KEY is redacted, for example."""
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
    """Give Ray a folder of its own, in which it finds no cluster of another test run that it would join."""
    short = tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    )  # for its sockets
    with short as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow; several processes begin with what takes longest, so that they end together."""
    for item in items:
        if _place(item.path) < len(SLOW):
            item.add_marker("slow")
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not _needs_machine(item.nodeid), _place(item.path)))


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection: with torch, `gc.collect()` takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, for its fixtures' sake, and all of `MACHINE` to one too."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if _needs_machine(nodeid) else nodeid.partition("::")[0]

    return (
        ByFile(config, log) if config.getvalue("dist") == "load" else None
    )  # which is what -n means by itself
