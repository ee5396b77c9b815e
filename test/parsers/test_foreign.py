"""The cases of the suites of vLLM, SGLang and llama.cpp: each gives the same calls, or differs for a reason.

The cases are no part of this repository: they are looked for beside the checkout, in `../shared/data`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.messages import ParseResult
from torchrl_agentic.parsers import ALIASES, PARSERS
from torchrl_agentic.parsers.base import schemas_of

CASES = Path(__file__).parents[3] / "shared" / "data" / "foreign_parser_cases.jsonl"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason=f"{CASES.name} is not beside this checkout")


@dataclass(frozen=True)
class Case:
    """One text of a foreign suite, and the calls that its engine found."""

    format: str
    source: str
    text: str
    tools: Sequence[Mapping[str, Any]] | None
    expected: Sequence[tuple[str, Any]]
    outcome: str

    @property
    def parser(self) -> str | None:
        """Our parser for it; None if only the engine has one."""
        for part, name in READ_BY.items():
            if part in f"{self.format} {self.source}":
                return name
        name = self.format.removeprefix("unsupported:")
        assert name in PARSERS or name in ALIASES, f"say in READ_BY who reads {name}: {self.source}"
        return name

    @property
    def known(self) -> Mapping[str, Any]:
        """The tools by name."""
        return schemas_of(list(self.tools or ())) or {}


READ_BY: Mapping[str, str | None] = {
    # Parts of "class or chat template, source" of cases that do not name a parser, the first that fits.
    "test_plamo3.py": None,
    "Plamo3Parser": None,
    "K2Horizon": None,
    "test_k2_horizon": None,
    "DotsToolParser": None,
    "BeamParser": None,
    "muse-glimmer": None,
    "functionary": None,
    "firefunction": None,
    "command-r-plus": None,
    "gemma-2-2b": None,
    "TestFormatDetector": "hermes",
    "DummyDetector": "llama3_json",
    "JsonArrayParser": "xlam",
    "test_inkling.py": "inkling",
    "Inkling": "inkling",
    "parser/mistral/": "mistral",
    "test_parser_engine.py": "hermes",
    "test_deepseek_v41.py": "deepseek_v41",
    "engine/test_qwen3.py": "qwen3_coder",
    "engine/test_minimax_m2.py": "minimax_m2",
    "_CombinedDelegating": "hermes",
    "unsupported:TestParser": "hermes",
    "test_response_template.py": "gemma4",
    "Gemma4": "gemma4",
    "gemma-4": "gemma4",
    "FunctionGemma": "functiongemma",
    "SeedOss": "seed_oss",
    "Hunyuan": "hunyuan_a13b",
    "MiniCPM5": "minicpm5",
    "MiniCPMV": "qwen3_coder",
    "inimaxM3": "minimax_m3",
    "MiniMax-M3": "minimax_m3",
    "GigaChat3.1": "gigachat35",
    "GigaChat3": "gigachat3",
    "PoolsideV1": "poolside_v1",
    "Step3p5": "step3p5",
    "Step3": "step3",
    "Apertus": "apertus",
    "ling-3.0": "ling3",
    "Ling3": "ling3",
    "Reka-Edge": "hermes",
    "Longcat": "longcat",
    "KimiK2": "kimi_k2",
    "Kimi-K3": "kimi_k3",
    "KimiK3": "kimi_k3",
    "DeepSeekV41": "deepseek_v41",
    "GraniteThinking": "qwen3_coder",
    "xLAM": "xlam",
    "HYV3": "hy_v3",
    "Internlm2": "internlm",
    "Cohere2MoE": "cohere_command4",
    "command-r7b": "cohere_command3",
    "Ernie45": "ernie45",
    "Jamba": "jamba",
    "Spark2.5": "spark25",
    "Apriel": "jamba",
    "Nemotron-Nano-v2": "nemotron_nano_v2",
    "Qwen3ReasoningHermes": "hermes",
    "test-chat.cpp": "lfm2",
}


@dataclass(frozen=True)
class Kind:
    """Why ours differs. holds: whether that is what a case and our reading of it show."""

    why: str
    holds: Callable[[Case, ParseResult], bool]


def readable(result: ParseResult) -> list[tuple[str, str]]:
    """The calls that run, with arguments that can be compared."""
    return [(call.tool, canonical(call.args)) for call in result.calls if call.error is None]


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def wanted(case: Case) -> list[tuple[str, str]]:
    """The calls that the engine found; some suites give arguments as JSON in a string."""
    return [(tool, canonical(_object(args))) for tool, args in case.expected]


def _object(args: Any) -> Any:
    if isinstance(args, str):
        try:
            return json.loads(args)
        except ValueError:
            return args
    return {} if args is None else args


def is_equal(case: Case, result: ParseResult) -> bool:
    return readable(result) == wanted(case)


@cache
def cases() -> list[Case]:
    lines = CASES.read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        Case(
            row["format"],
            row["source"],
            row["text"],
            row["tools"],
            row["expected_calls"] or [],
            row["outcome"],
        )
        for row in rows
    ]
