"""What does parsing cost, and does it stay linear?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from torchrl_agentic.parsers import HermesParser, XMLToolCallParser

ONE = "<tool_call>\n" + json.dumps({"name": "f", "arguments": {"code": "x" * 150}}) + "\n</tool_call>"
BIG = "<tool_call>\n" + json.dumps({"name": "f", "arguments": {"code": "x\n" * 350_000}}) + "\n</tool_call>"
INPUTS = {
    "1 call of 200 B": ONE,
    "8 calls": ONE * 8,
    "a 1 MB argument": BIG,
    "100 KB, no call": "hello " * 17_000,
}
_REGEX = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@pytest.mark.parametrize("size", list(INPUTS))
@pytest.mark.parametrize("which", ["regex and json.loads", "hermes"])
def test_hermes(benchmark: Callable[..., Any], which: str, size: str) -> None:
    benchmark.group = f"parse: hermes, {size}"
    text, parser = INPUTS[size], HermesParser()
    if which == "hermes":
        benchmark(parser.parse, text)
    else:
        benchmark(lambda: [json.loads(body) for body in _REGEX.findall(text)])


@pytest.mark.parametrize("size", [20_000, 40_000, 80_000])
@pytest.mark.parametrize(
    ("which", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{"),
        ("hermes", "<think>"),
        ("xml", '<tool name="f">{'),
        ("xml", "<tool "),
    ],
)
def test_slope(benchmark: Callable[..., Any], which: str, piece: str, size: int) -> None:
    benchmark.group = f"parse: {which}, {piece!r} repeated"
    parser = HermesParser() if which == "hermes" else XMLToolCallParser()
    benchmark.extra_info["which"] = f"{size} times"
    benchmark.pedantic(parser.parse, args=(piece * size,), rounds=5)
