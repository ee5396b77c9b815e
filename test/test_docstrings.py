"""Public docstrings: Google form, every argument described, a verb first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torchrl_agentic"
SECTION = re.compile(r"^[ ]*Args:\n((?:[ ]*\n|[ ]+.*\n?)+)", re.MULTILINE)
NAME = re.compile(r"^[ ]+\**(\w+)(?: \([^)]*\))?:", re.MULTILINE)
OPTION = re.compile(r"Annotated\[.*typer\.", re.DOTALL)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of the package, by path."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Free the trees: with a million more objects, each garbage collection of later tests takes long."""
    yield
    trees.cache_clear()


@cache
def shared_options() -> set[str]:
    """Return the names of options that several commands have."""
    return {
        target.id
        for file, tree in trees().items()
        if file.startswith("cli/")
        for node in tree.body
        if isinstance(node, ast.Assign) and OPTION.match(ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def has_help(annotation: str) -> bool:
    """Return whether a parameter is an option of a command, which its help text describes."""
    return annotation in shared_options() or OPTION.match(annotation) is not None


def parameters(function: Function) -> list[str]:
    """Return the names of the parameters, without `self` and `cls`, and options that have a help text."""
    args = function.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs)
    names = [
        arg.arg
        for arg in every
        if not has_help("" if arg.annotation is None else ast.unparse(arg.annotation))
    ]
    names += [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def described(docstring: str) -> set[str]:
    """Return the names that the `Args:` section of a docstring describes."""
    section = SECTION.search(docstring + "\n")
    return set(NAME.findall(section[1])) if section else set()


@cache
def public_methods() -> dict[str, set[str]]:
    """Return the names of the methods that each class of the package and its bases define, by class."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, Function)}
                found.setdefault(node.name, set()).update(methods)
                names = {base.id if isinstance(base, ast.Name) else "" for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    has_changed = True
    while has_changed:  # until all ancestors are included
        has_changed = False
        for name, parents in bases.items():
            inherited = set[str]().union(*(found.get(parent, ()) for parent in parents))
            has_changed = has_changed or not inherited <= found[name]
            found[name] |= inherited
    return found


def callables(tree: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name, docstring, parameters) of each public function, method and constructor."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            decorators = {getattr(item, "id", "") for item in node.decorator_list}
            if "overload" not in decorators:
                yield node.name, ast.get_docstring(node) or "", parameters(node)
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        bases = [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]
        for each in node.body:
            if not isinstance(each, Function):
                continue
            if each.name == "__init__":
                yield node.name, ast.get_docstring(node) or "", parameters(each)
            elif not each.name.startswith(("_", "test_")):
                if any(each.name in public_methods().get(base, ()) for base in bases):
                    continue  # the base class describes the parameters
                if any(
                    getattr(item, "attr", getattr(item, "id", "")) == "override"
                    for item in each.decorator_list
                ):
                    continue
                yield f"{node.name}.{each.name}", ast.get_docstring(each) or "", parameters(each)


def test_each_argument_of_a_public_callable_is_described():
    missing = {
        f"{file}: {name}": sorted(lacking)
        for file, tree in trees().items()
        if "/inside/" not in file
        for name, docstring, names in callables(tree)
        if len(names) >= 2 and (lacking := set(names) - described(docstring))
    }
    assert not missing


def test_a_docstring_begins_with_a_plain_verb_or_noun():
    """Words of an idiom that the project has left."""
    odd = {
        f"{file}: {text.splitlines()[0]}"
        for file, tree in trees().items()
        if "/inside/" not in file
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef | ast.Module)
        and (text := ast.get_docstring(node) or "")
        and re.match(r"(Give|Say|Tell|Take note|Whether|What|Whoever|Let|See that|Work out)\b", text)
    }
    assert not odd
