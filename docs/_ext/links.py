"""Link public names in backticks to their pages, also in short forms."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PACKAGE = "torchrl_agentic"
MODULES = (
    "",
    ".parsers",
    ".tools",
    ".sandbox",
    ".repl",
    ".limits",
    ".engines",
    ".collectors",
    ".rollout",
    ".testing",
    ".interactions",
    ".transforms",
)


@functools.cache
def public_names() -> dict[str, str]:
    """Return the page of each public name; names of the top level have their page there."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name in importlib.import_module(PACKAGE + module).__all__:
            found.setdefault(name, f"{PACKAGE}{module}.{name}")
    return found


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: TextElement
) -> Element | TextElement | None:
    """Resolve a reference that Sphinx could not resolve; other names remain code."""
    if node.get("refdomain") != "py":
        return None
    target: str = node["reftarget"].removesuffix("()")
    for whole in _candidates(target, public_names()):
        found = env.domains.python_domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", whole, node, shown
        )
        if found is not None:
            return found
    # What is written out in full is meant as a link: if it leads nowhere, Sphinx warns.
    return shown if node["reftype"] == "obj" and not target.startswith(f"{PACKAGE}.") else None


def _candidates(target: str, names: dict[str, str]) -> list[str]:
    """Return possible pages of a name such as `Tool`, `Tool.run` or `torchrl_agentic.tools.base.Tool`."""
    head, _, rest = target.partition(".")
    if head in names:
        return [f"{names[head]}.{rest}" if rest else names[head]]
    *_, owner, name = ["", *target.split(".")]
    found = [names[name]] if name in names else []
    return found + ([f"{names[owner]}.{name}"] if owner in names else [])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
