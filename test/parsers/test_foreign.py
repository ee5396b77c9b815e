"""The cases of the test suites of vLLM, SGLang and llama.cpp: equal calls, or a known reason to differ.

The cases are not part of this repository; they are read from `../shared/data`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.messages import ParseResult
from torchrl_agentic.parsers import get_parser
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
        """Return our parser of the format, or None."""
        if not self.format.startswith("unsupported:"):
            return self.format
        for part, name in READ_BY.items():
            if part in f"{self.format} {self.source}":
                return name
        raise AssertionError(f"say in READ_BY who reads {self.format}: {self.source}")

    @property
    def known(self) -> Mapping[str, Any]:
        """The tools by name."""
        return schemas_of(list(self.tools or ())) or {}


READ_BY: Mapping[str, str | None] = {
    "test_plamo3.py": "plamo3",
    "Plamo3Parser": "plamo3",
    "K2Horizon": "k2_horizon",
    "test_k2_horizon": "k2_horizon",
    "DotsToolParser": "dots",
    "command-r-plus": "command_r",
    "firefunction": "firefunction_v2",
    "gemma-2-2b": "functiongemma",
    "HunyuanA13B": "hunyuan_a13b",
    "HunyuanDetector": "hunyuan",
    "Apriel": "apriel",
    # Parts of "class or chat template, source" of cases that do not name a parser, the first that fits.
    "BeamParser": None,
    "muse-glimmer": None,
    "functionary": None,
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
    "Nemotron-Nano-v2": "nemotron_nano_v2",
    "Qwen3ReasoningHermes": "hermes",
    "test-chat.cpp": "lfm2",
}


@dataclass(frozen=True)
class Kind:
    """A reason to differ; `holds` checks that it applies to a case and to our result."""

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


def missing(case: Case, result: ParseResult) -> bool:
    """Whether ours are the engine's calls without some of them."""
    rest = iter(wanted(case))
    return all(call in rest for call in readable(result))


def errors(result: ParseResult) -> set[str]:
    return {call.error.code for call in result.calls if call.error}


def lacks(code: str) -> Callable[[Case, ParseResult], bool]:
    return lambda case, result: missing(case, result) and code in errors(result)


def loose(value: Any) -> Any:
    """Return the text of a value, without its type."""
    if isinstance(value, dict):
        return {key: loose(item) for key, item in value.items()}
    if isinstance(value, list):
        return [loose(item) for item in value]
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            return value.strip()
        return loose(inner) if not isinstance(inner, str) else inner.strip()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def only_types_differ(case: Case, result: ParseResult) -> bool:
    def untyped(calls: list[tuple[str, str]]) -> list[Any]:
        return [(tool, loose(json.loads(args))) for tool, args in calls]

    return untyped(readable(result)) == untyped(wanted(case))


def is_undeclared(case: Case, result: ParseResult) -> bool:
    """Whether a value whose type differs has no schema."""
    if not only_types_differ(case, result):
        return False
    for (tool, ours), (_, theirs) in zip(readable(result), wanted(case), strict=True):
        properties = case.known.get(tool, {}).get("properties", {})
        before, after = json.loads(ours), json.loads(theirs)
        if any(canonical(before[key]) != canonical(after[key]) and key in properties for key in before):
            return False
    return True


def without_unknown(case: Case, result: ParseResult) -> bool:
    known = [call for call in readable(result) if call[0] in case.known]
    return bool(case.known) and known == wanted(case)


def unwrapped(case: Case, result: ParseResult) -> bool:
    """Whether the engine takes the one argument "arguments" or "input" for all arguments."""

    def inner(args: str) -> str:
        value = json.loads(args)
        if (
            isinstance(value, dict)
            and len(value) == 1
            and (key := next(iter(value))) in ("arguments", "input")
        ):
            return canonical(loose(_object(value[key])))
        return canonical(loose(value))

    if only_types_differ(case, result):
        return False
    ours = [(tool, inner(args)) for tool, args in readable(result)]
    return ours == [(tool, canonical(loose(json.loads(args)))) for tool, args in wanted(case)]


def named(parts: str) -> Callable[[Case, ParseResult], bool]:
    """Cases that are known one by one: the parts of sources, white space between them."""
    return lambda case, _: any(part in case.source for part in parts.split())


KINDS: Mapping[str, Kind] = {
    "xfail": Kind("the engine's own test expects it to fail", lambda case, _: case.outcome == "xfail"),
    "unknown tool": Kind("a call of a tool that is not there is answered, not dropped", without_unknown),
    "no schema": Kind(
        "without a schema JSON is read as JSON, not as a string or the other way", is_undeclared
    ),
    "types": Kind(
        'a type that the format writes down counts (JSON, string="true"); validation says what is wrong',
        only_types_differ,
    ),
    "wrapper": Kind(
        "an argument 'arguments' or 'input' may be the tool's own: it is not unpacked", unwrapped
    ),
    "unfinished": Kind("what the model did not finish does not run", lacks("unclosed")),
    "broken JSON": Kind(
        "broken JSON is answered with an error, not repaired by a guess", lacks("invalid_json")
    ),
    "cut off": Kind(
        "cut off inside of the markers behind the arguments: several are missing, so it does not run",
        named("argument_closer_cutoffs test_every_cut_point test_missing_tool_request_start"),
    ),
    "one piece": Kind(
        "the text is one piece of a stream, or the expected calls are those of its first pieces",
        named("""
            batched_deltas TestDelegatingTwoPass test_args_buffer_flushed streaming_exception
            test_current_tool_id_increment test_streaming_with_list_structure exception_mid_drain
            test_streaming_split_next_parameter
        """),
    ),
    "forced": Kind(
        "the engine forced a tool, so that bare JSON is a call, or was told to read none",
        named("""
            named_tool_choice required_tool_choice guided test_parse_reasoning_only no_parser
            reasoning_only_adapter
        """),
    ),
    "other format": Kind(
        "the text is that of another format than the one under which the case is filed",
        named("""
            test_complete_tool_call_still_promoted test_think_block_preserved_alongside_tool_call
            test-chat.cpp:6846 test-chat.cpp:6852 test-chat.cpp:6107 mismatched_formats
        """),
    ),
    "prose": Kind(
        "a call behind prose on its line is noted, and does not run",
        named("PythonicDetector test_llama3_json_tool_parser.py"),
    ),
    "reasoning": Kind(
        "the engine was told that the answer begins in a thought: here that is `reasoning_open`",
        named("test_orphan_invoke_inside_reasoning test-chat.cpp:5447"),
    ),
    "complete": Kind(
        "the call is complete but for its list, closer or arguments: that is noted, and it runs",
        named("""
            test_malformed_input test_incomplete_input_is_content plete_input_is_content
            test-chat.cpp:5120 missing_arguments test_invoke_outside_tool_block
            test_gemma4_checkpoint_grammar_excludes_hyphenated_name
        """),
    ),
    "validation": Kind(
        "names of tools and arguments are for validation, which tells the model what is wrong",
        named("""
            case_sensitive_param_name test_properties_wrapped test_wrapped_arguments_still
            extra_arguments test_alias_
        """),
    ),
    "twice": Kind("of an argument that is written twice the last counts", named("duplicate_param_names")),
    "damaged": Kind(
        "the text is damaged in a way that no template or tokenizer of the model writes",
        named("""
            tokenizer_space test_array_argument_with_escaped_json invalid_python_escape
            pre_v11_regex_fallback test_drop_tokens_removed
        """),
    ),
    "no guess": Kind(
        "each attempt is one entry: what is no call, or has no name, is an error; its neighbours run",
        named("""
            unusual_calls[missing_name] multiple_bot_tokens empty_name_is_allowed TestInklingDetector
            bare_counter BareCounter BareAndMalformedOpeners issue_58227 arg_key_without_value
            orphan_key TestBaseFormatDetector streaming_type_stability nested_object_coerced
        """),
    ),
    "nested elements": Kind(
        "MiniMax M3's elements become what the schema says, and without one lists of items are lists; text "
        "beside elements is an error; numbers with leading zeros stay text; depth is bounded by `Limits`",
        named("minimax_m3 MiniMax-M3"),
    ),
}
"""Kinds of differences, the most telling first."""


@cache
def cases() -> list[Case]:
    rows = [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]
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


@pytest.mark.parametrize("chunks", [(), (1,), (7, 3, 11)], ids=["whole", "by character", "in pieces"])
def test_each_case_gives_the_same_calls_or_differs_for_a_reason(chunks):
    unexplained = list[str]()
    for case in cases():
        if case.parser is None:
            continue
        result = read(case, chunks)
        if not is_equal(case, result) and not any(kind.holds(case, result) for kind in KINDS.values()):
            unexplained.append(f"{case.source}: {wanted(case)}, not {readable(result)} {errors(result)}")
    assert unexplained == []


def read(case: Case, chunks: Sequence[int]) -> ParseResult:
    """Read a case as a whole, or in pieces of so many characters."""
    assert case.parser is not None
    parser, tools = get_parser(case.parser), case.tools or None
    if not chunks:
        return parser.parse(case.text, tools=tools)
    stream, start = parser.stream(tools=tools), 0
    for size in cycle(chunks):
        if start >= len(case.text):
            return stream.close()
        stream.feed(case.text[start : start + size])
        start += size
    raise AssertionError("a cycle ends")


@cache
def differences() -> list[tuple[Case, ParseResult]]:
    """The cases that give other calls here than in their engine."""
    found = [(case, read(case, ())) for case in cases() if case.parser is not None]
    return [(case, result) for case, result in found if not is_equal(case, result)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_difference_occurs(name):
    """A reason that no case needs any more is to be removed."""
    assert any(KINDS[name].holds(case, result) for case, result in differences())


def test_most_cases_give_the_same_calls():
    assert len(differences()) < 0.2 * len(cases())


def test_foreign_formats_without_a_parser_are_listed():
    unread = {part for part, name in READ_BY.items() if name is None}
    assert unread == {"BeamParser", "muse-glimmer", "functionary"}
