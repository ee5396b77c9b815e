"""The cost of importing the package: new interpreters with and without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("statement", ["pass", "import torchrl_agentic", "import torch"])
def test_import(benchmark: Callable[..., Any], statement: str) -> None:
    benchmark.group = "import: a fresh interpreter"
    benchmark.pedantic(
        subprocess.run,
        args=([sys.executable, "-c", statement],),
        kwargs={"check": True},
        rounds=5,
        warmup_rounds=1,
    )
