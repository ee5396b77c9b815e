"""Importing the package starts nothing and loads nothing heavy; its names are there."""

import inspect
import sys

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


MAX_LINES_FOR_TOOL_COMPOSE = 10_300
"""Lines of this package that `from torchrl_agentic import ToolCompose` may load."""


@pytest.mark.slow
def test_tool_compose_loads_no_more_of_the_package_than_it_needs():
    code = (
        "import sys; from torchrl_agentic import ToolCompose\n"
        "ours = [sys.modules[name] for name in sys.modules if name.partition('.')[0] == 'torchrl_agentic']\n"
        "print(sum(len(open(module.__file__).readlines()) for module in ours))"
    )
    assert int(_fresh(code)) <= MAX_LINES_FOR_TOOL_COMPOSE


@pytest.mark.parametrize("name", torchrl_agentic.__all__)
def test_each_public_name_is_there(name: str):
    assert getattr(torchrl_agentic, name) is getattr(torchrl_agentic, name)
    assert name in dir(torchrl_agentic)


def test_public_names_are_sorted_once_and_cover_the_lazy_ones():
    assert len(set(torchrl_agentic.__all__)) == len(torchrl_agentic.__all__)
    lazy = {name for names in torchrl_agentic._WHERE.values() for name in names}
    assert lazy <= set(torchrl_agentic.__all__)


@pytest.mark.parametrize("package", [torchrl_agentic, torchrl_agentic.testing])
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


@pytest.mark.parametrize("name", torchrl_agentic.testing.__all__)
def test_each_name_of_testing_is_there(name: str):
    assert getattr(torchrl_agentic.testing, name)


def test_tool_is_the_decorator_after_its_module_was_imported_too():
    """Function and module share a name; whichever is imported last must not win."""
    code = "import torchrl_agentic.tools.base; from torchrl_agentic import tool; print(callable(tool))"
    assert _fresh(code) == "True"


def test_the_heart_stays_small():
    """Sessions by row, processes and the list of tools have files of their own."""
    heart = torchrl_agentic.ToolCompose
    methods = [name for name, value in vars(heart).items() if inspect.isfunction(value)]
    assert len(inspect.getsource(heart).splitlines()) <= 300
    assert len(methods) <= 15
