"""Contracts, a tiny model and helpers for tests of tools, parsers, sandboxes and environments.

The package itself never imports this room; parts that it needs too, such as the tiny model, are elsewhere.
Names are imported on first use: contracts need pytest, policies need torch.
"""

import importlib.util
import sys
from typing import Any

from torchrl_agentic.errors import MissingExtra, load_lazily

_load, __dir__, __all__ = load_lazily(__name__)


def __getattr__(name: str) -> Any:
    if name.endswith("Contract"):
        for package in ("pytest", "pytest_asyncio", "hypothesis"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(name, package, "test")
        import pytest  # rewritten assertions show both sides

        modules = ("torchrl_agentic.testing.contracts", "torchrl_agentic.sandbox.conformance")
        pytest.register_assert_rewrite(*(module for module in modules if module not in sys.modules))
    return _load(name)
