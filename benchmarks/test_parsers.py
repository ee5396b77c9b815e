"""The cost of parsing, compared with the parsers of engines, and its growth with the text."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, HermesParser, Limits, TextParser, get_parser

CODE = {"code": "x" * 150}
BIG = {"code": "".join(f"value_{n} = compute({n}, 'a')\n" for n in range(34_000))}
TOOLS = {"f": {"type": "object", "properties": {"code": {"type": "string"}}}}
SPECS = [{"type": "function", "function": {"name": "f", "parameters": TOOLS["f"]}}]
MANY = Limits(calls=10_000)
_REGEX = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def inputs(name: str) -> dict[str, str]:
    """Return the messages that every parser reads."""
    parser = get_parser(name)
    one, big = ParsedCall("f", CODE, "call_0_0"), ParsedCall("f", BIG, "call_0_0")
    return {
        "1 call of 200 B": parser.render_call(one),
        "1 call after reasoning": f"<think>\nLet me see.\n</think>\n\n{parser.render_call(one)}",
        "8 calls": parser.render_calls([one] * 8),
        "1,000 calls": parser.render_calls([one] * 1000),
        "a 1 MB argument": parser.render_call(big),
        "100 KB, no call": "hello " * 17_000,
    }


def engine(name: str) -> Callable[[str], Any]:
    """Return a parser of an engine, called as by its server: a new instance per message."""
    package, _, format = name.partition(":")
    if package == "vllm":
        kind = importlib.import_module("vllm.tool_parsers").ToolParserManager.get_tool_parser(format)
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        cached = importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer
        tokenizer = cached(importlib.import_module("torchrl_agentic.testing.tokenizers").byte_tokenizer())
        tools = [protocol.ChatCompletionToolsParam(**spec) for spec in SPECS]
        request = importlib.import_module("types").SimpleNamespace(tools=tools, tool_choice="auto")
        return lambda text: kind(tokenizer, tools).extract_tool_calls(text, request)
    kind = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    tools = [protocol.Tool(type="function", function=protocol.Function(**SPECS[0]["function"]))]
    return lambda text: kind(tools=tools, tool_call_parser=format).parse_non_stream(text)


def contenders(name: str, engines: tuple[str, ...]) -> list[str]:
    """Return our parsers, and those of installed engines (see `make test-vllm`)."""
    return [name, *(other for other in engines if importlib.util.find_spec(other.partition(":")[0]))]


def run(benchmark: Callable[..., Any], which: str, text: str) -> None:
    """Time one contender; those that take a second or more, once."""
    if ":" in which:
        parse = engine(which)
    elif which == "regex and json.loads":
        parse = lambda text: [json.loads(body) for body in _REGEX.findall(text)]  # noqa: E731  a contender
    else:
        parser = get_parser(which, limits=MANY)
        parse = functools.partial(parser.parse, tools=TOOLS)
    if len(text) > 50_000 and which.startswith("vllm:qwen3"):
        benchmark.pedantic(parse, args=(text,), rounds=1)
    else:
        benchmark(parse, text)


@pytest.mark.parametrize("size", list(inputs("hermes")))
@pytest.mark.parametrize(
    "which", ["regex and json.loads", *contenders("hermes", ("vllm:hermes", "sglang:qwen25"))]
)
def test_hermes(benchmark: Callable[..., Any], which: str, size: str) -> None:
    benchmark.group = f"parse: hermes, {size}"
    run(benchmark, which, inputs("hermes")[size])


@pytest.mark.parametrize("size", list(inputs("qwen3_coder")))
@pytest.mark.parametrize("which", contenders("qwen3_coder", ("vllm:qwen3_coder", "sglang:qwen3_coder")))
def test_qwen3_coder(benchmark: Callable[..., Any], which: str, size: str) -> None:
    benchmark.group = f"parse: qwen3_coder, {size}"
    text = inputs("qwen3_coder")[size]
    if which == "vllm:qwen3_coder" and size == "a 1 MB argument":
        benchmark.extra_info["which"] = "vllm:qwen3_coder, of 20 KB alone"  # it grows with the square
        call = ParsedCall("f", {"code": BIG["code"][:20_000]}, "call_0_0")
        text = get_parser("qwen3_coder").render_call(call)
    run(benchmark, which, text)


SIZES = (250_000, 500_000, 1_000_000)


def hostile(name: str) -> dict[str, str]:
    """Texts that made parsers slow, each as a prefix and a repeated part."""
    parser = get_parser(name)
    tool, args = {"tags": ("search", {"query": "x"}), "fence": ("python", CODE)}.get(name, ("f", CODE))
    one = parser.render_call(ParsedCall(tool, args, "call_0_0"))
    if not isinstance(parser, TextParser):
        return {"half a call, many times": "\0" + one[: len(one) // 2]}
    value_end = getattr(parser.format, "parameter_end", "") or parser.format.closer or "]"
    return {
        "openers": f"\0{parser.format.openers[0]}\n",
        "half a call, many times": f"\0{one[: len(one) // 2]}\n",
        "unclosed calls": f"\0{one[: len(one) * 9 // 10]}\n",
        "white space behind an opener": f"{parser.format.openers[0]}\0 ",
        "closers in a value": f"{one[: len(one) // 2]}\0{value_end}",
        "brackets": f"{one[: len(one) // 2]}\0[",
        "brackets in prose": "x\0[f(",
        "quotes": f"{one[: len(one) // 2]}\0', a='",
        "reasoning": "\0<think>",
        "fences": "\0```x\n",
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in PARSERS if name not in ("openai", "anthropic")])
def test_slope(benchmark: Callable[..., Any], name: str, size: int) -> None:
    """Parse all hostile texts of a format; the input doubles from row to row."""
    benchmark.group = f"parse: {name}, hostile texts"
    benchmark.extra_info["which"] = f"{size // 1000} KB each"
    parser, texts = get_parser(name), list[str]()
    for pattern in hostile(name).values():
        begin, _, piece = pattern.partition("\0")
        texts.append(begin + piece * (size // len(piece)))
    benchmark.pedantic(lambda: [parser.parse(text) for text in texts], rounds=3)


@pytest.mark.parametrize("size", [20_000, 200_000, 1_000_000])
@pytest.mark.parametrize(
    "which",
    [*contenders("hermes", ("sglang:qwen25",)), *contenders("qwen3_coder", ("sglang:qwen3_coder",))],
)
def test_stream(benchmark: Callable[..., Any], which: str, size: int) -> None:
    """Stream one call in steps of four characters."""
    native = "hermes" if which in ("hermes", "sglang:qwen25") else "qwen3_coder"
    benchmark.group = f"stream: {native}, {size // 1000} KB in steps of 4 characters"
    text = get_parser(native).render_call(ParsedCall("f", {"code": BIG["code"][:size]}, "call_0_0"))
    chunks = [text[start : start + 4] for start in range(0, len(text), 4)]
    if ":" in which:
        if size > 20_000:
            pytest.skip("grows with the square")
        kind = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        tools = [protocol.Tool(type="function", function=protocol.Function(**SPECS[0]["function"]))]

        def read() -> None:
            parser = kind(tools=tools, tool_call_parser=which.partition(":")[2])
            for chunk in chunks:
                parser.parse_stream_chunk(chunk)
    else:

        def read() -> None:
            stream = get_parser(which).stream(tools=TOOLS)
            for chunk in chunks:
                stream.feed(chunk)
            stream.close()

    benchmark.pedantic(read, rounds=1 if ":" in which else 3)


PROSE = ("I will look at the file first, then run the tests and see what they say about it. " * 60).rstrip()
FORMATS = [name for name in PARSERS if isinstance(get_parser(name), TextParser)]


@pytest.mark.parametrize("what", ["plain text", "reasoning", "call"])
@pytest.mark.parametrize("name", FORMATS)
def test_token_by_token(benchmark: Callable[..., Any], name: str, what: str) -> None:
    """Measure feeding one token of four characters, as a streaming engine does."""
    parser = get_parser(name)
    tool, args = {"tags": ("search", {"query": PROSE}), "fence": ("python", {"code": PROSE})}.get(
        name, ("f", {"code": PROSE})
    )
    texts = {
        "plain text": PROSE,
        "reasoning": parser.format.think[0] + PROSE,
        "call": parser.render_call(ParsedCall(tool, args, "call_0_0")),
    }
    chunks = [texts[what][start : start + 4] for start in range(0, len(texts[what]), 4)]
    benchmark.group = f"stream token by token: {what}"
    benchmark.extra_info["tokens"] = len(chunks)

    def read() -> None:
        feed = parser.stream(tools=TOOLS).feed
        for chunk in chunks:
            feed(chunk)

    benchmark.pedantic(read, rounds=20, warmup_rounds=1)
    benchmark.extra_info["µs per token"] = round(benchmark.stats.stats.min / len(chunks) * 1e6, 2)


def test_a_new_parser(benchmark: Callable[..., Any]) -> None:
    """Measure creating a parser: microseconds, so that sharing is not needed."""
    benchmark.group = "make a parser"
    benchmark(HermesParser)
