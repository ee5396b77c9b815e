"""Importing the package starts nothing and loads nothing heavy; its names are there."""

import ast
import importlib
import inspect
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.processes import run_program

import torchrl_agentic
import torchrl_agentic.testing


def _fresh(code: str) -> str:
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_torch_and_starts_no_thread():
    code = (
        "import sys, threading, warnings; warnings.simplefilter('error'); import torchrl_agentic\n"
        "heavy = {'torch', 'transformers', 'tensordict', 'torchrl', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), threading.active_count())"
    )
    assert _fresh(code) == "[] 1"


PLAIN = "dispatch parsers sandbox repl tools records limits config interactions tokens.ledger"


@pytest.mark.slow
@pytest.mark.parametrize("module", [*PLAIN.split(), "viewer.app", "viewer.html", "viewer.report"])
def test_parts_below_the_transforms_load_no_torch(module: str):
    code = (
        f"import sys, threading, torchrl_agentic.{module}\n"
        "print(sorted({'torch', 'transformers', 'tensordict', 'torchrl'} & set(sys.modules)),"
        " threading.active_count())"
    )
    assert _fresh(code) == "[] 1"


MAX_LINES_FOR_TOOL_COMPOSE = 10_000
"""Lines of this package that `from torchrl_agentic import ToolCompose` may load."""


@pytest.mark.slow
def test_tool_compose_loads_no_more_of_the_package_than_it_needs():
    code = (
        "import sys; from torchrl_agentic import ToolCompose\n"
        "ours = [sys.modules[name] for name in sys.modules if name.partition('.')[0] == 'torchrl_agentic']\n"
        "print(sum(len(open(module.__file__).readlines()) for module in ours))"
    )
    assert int(_fresh(code)) <= MAX_LINES_FOR_TOOL_COMPOSE


ROOT = Path(torchrl_agentic.__file__).parent
STUBS = {
    ".".join(path.parent.relative_to(ROOT.parent).parts): ast.parse(path.read_text("utf-8"))
    for path in sorted(ROOT.rglob("__init__.pyi"))
}
"""The stub of each package that loads its names when they are first used."""


def _room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("package", STUBS)
def test_a_package_has_the_names_of_its_stub(package: str):
    imports = [node for node in STUBS[package].body if isinstance(node, ast.ImportFrom)]
    sources = {alias.asname: node.module for node in imports for alias in node.names}
    module = importlib.import_module(package)
    assert module.__all__ == list(sources)
    for name, source in sources.items():
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(source or ""), name)
        assert value is getattr(module, name)
        assert value is not sys.modules.get(f"{package}.{name}")  # a module of the same name hides nothing
    declared = {
        node.target.id
        for node in STUBS[package].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert sources.keys() | declared <= set(dir(module))


def test_stubs_import_from_their_own_room_or_from_lower_layers():
    """As import-linter demands of modules; it reads no stubs."""
    rules = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = rules["contracts"][0]["layers"]
    height = {room: -place for place, layer in enumerate(layers) for room in layer.split(" | ")}
    upwards = {
        (package, node.module)
        for package, stub in STUBS.items()
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and package != "torchrl_agentic"
        if (here := _room(package)) != (there := _room(node.module or "")) and height[here] <= height[there]
    }
    assert not upwards


@pytest.mark.parametrize("package", [torchrl_agentic, torchrl_agentic.testing])
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'") as raised:
        _ = package.no_such_name
    assert (raised.value.name, raised.value.obj) == ("no_such_name", package)  # "Did you mean" needs them


def test_a_function_is_no_module_after_its_module_was_imported_too():
    """Function and module share a name; whichever is imported last must not win."""
    code = (
        "import torchrl_agentic.viewer.report.compare; from torchrl_agentic.viewer.report import compare;"
        "print(callable(compare))"
    )
    assert _fresh(code) == "True"


def test_the_heart_stays_small():
    """Sessions by row, processes and the list of tools have files of their own."""
    heart = torchrl_agentic.ToolCompose
    methods = [name for name, value in vars(heart).items() if inspect.isfunction(value)]
    assert len(inspect.getsource(heart).splitlines()) <= 300
    assert len(methods) <= 15
