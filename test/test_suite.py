"""Rules of the test suite: tests that run alone, slow tests, and attributes that tests may read."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "torchrl_agentic"
ALONE = re.compile(r"^(import|from) ray\b|ray\.init\(|import.*\bcgroups\b|RLIMIT_NPROC, \(", re.MULTILINE)
ELSEWHERE = {
    "test_suite.py",
    "test_migration.py",
    "rollout/test_vllm.py",
    "engines/test_vllm_actors.py",
}  # `make test-legacy`, `make test-vllm`
REPEATED_NAMES = {"__init__", "__main__", "base"}
OWN = {"test_package.py": "__init__"}
NOT_PUBLIC_YET = {
    ("sandbox/test_e2b.py", "_unread"),  # how much output of a remote process waits on this side
    ("sandbox/test_modal.py", "_unread"),
    ("repl/test_jupyter_repl.py", "_process"),  # the process of an interpreter, which tests kill
    ("repl/test_subprocess_repl.py", "_process"),
    ("repl/test_jupyter_repl.py", "_link"),
}
"""Private attributes of other modules that tests read because nothing public shows the same."""


def _conftest(request: pytest.FixtureRequest):
    return request.config.pluginmanager.get_plugin(str(HERE / "conftest.py"))


def _needing(folder: Path, pattern: str) -> set[str]:
    """Return the files below a folder that start Ray or change quotas."""
    found = (path for path in folder.rglob(pattern) if ALONE.search(path.read_text("utf-8")))
    return {path.relative_to(folder).as_posix() for path in found}


def _is_private(name: str) -> bool:
    return re.match("_[a-z]|_[A-Z]", name) is not None


def _parsed(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text("utf-8"))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
        else:
            continue
        if _is_private(name):
            yield name


def _exported(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets):
            yield from ast.literal_eval(node.value)


def _read(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a test reads from something other than `self`, or replaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if getattr(node.value, "id", "") not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").startswith("torchrl_agentic"):
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr"):
            names = (one.value for one in node.args[:2] if isinstance(one, ast.Constant))
            yield from (name.rpartition(".")[2] for name in names if isinstance(name, str))


def test_tests_that_start_ray_or_change_quotas_run_one_after_the_other(request: pytest.FixtureRequest):
    listed = _conftest(request).MACHINE
    assert _needing(HERE, "test_*.py") - ELSEWHERE <= {entry.partition("::")[0] for entry in listed}
    tutorials = [name.removesuffix(".py") for name in _needing(HERE.parent / "tutorials", "*.py")]
    assert {f"test_tutorials.py::test_a_tutorial_runs[{name}]" for name in tutorials} <= set(listed)


def test_listed_slow_and_exclusive_tests_exist(request: pytest.FixtureRequest):
    """Otherwise a file that moves would run as a quick or parallel test unnoticed."""
    conftest = _conftest(request)
    listed = {entry.partition("::")[0] for entry in (*conftest.SLOW, *conftest.MACHINE)}
    assert not {entry for entry in listed if not (HERE / entry).exists()}


@pytest.mark.slow
def test_tests_read_no_private_attribute_but_of_the_module_that_they_test():
    """`test_x.py` may read those of a module `x.py`, and `test_package.py` those of `__init__.py`."""
    owners: dict[str, set[str]] = {}
    exported: set[str] = set()
    for file, tree in _parsed(PACKAGE):
        exported.update(_exported(tree))
        for name in _defined(tree):
            owners.setdefault(name, set()).add(Path(file).stem)
    found = {
        (file, name)
        for file, tree in _parsed(HERE)
        if not file.startswith("fakes/")  # they serve other packages
        for name in set(_read(tree)) & owners.keys() - exported - set(_defined(tree))
        if OWN.get(file, Path(file).stem.removeprefix("test_")) not in owners[name]
    }
    assert found == NOT_PUBLIC_YET


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in PACKAGE.rglob("*.py"))
    assert not {name for name, count in names.items() if count > 1} - REPEATED_NAMES
