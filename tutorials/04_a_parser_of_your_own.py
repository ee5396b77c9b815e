"""
4 · A parser of your own
========================

A model speaks a format that no registered parser reads. A parser for it is one file of a few lines, one line
in the registry, and one test class. This tutorial writes two: one for a format that holds JSON, where all is
there already, and one for a format with a syntax of its own.
"""

# %%
# JSON between markers
# --------------------
#
# Suppose a model writes ``<|call|>{"name": "f", "parameters": {…}}<|/call|>``; this format is made up. JSON
# between an opener and a closer is what :class:`JSONBlockParser` reads, so the parser only names the markers.
# ``parsers/formats/longcat.py`` does the same for a real model. What it gets for that: one entry per attempt,
# errors that tell the model what to fix, thoughts and fences left alone, streaming, reading by tokens,
# structural tags.

from torchrl_agentic.parsers import PARSERS, JSONBlockParser, get_parser


class MineParser(JSONBlockParser):
    """`<|call|>{"name": …, "parameters": {…}}<|/call|>`."""

    name = "mine"
    stop = ("<|im_end|>",)
    openers = ("<|call|>",)
    closer = "<|/call|>"
    turn_end = ("<|im_end|>",)
    arguments_key = "parameters"
    shape = '<|call|>{"name": "tool name", "parameters": {"argument": "value"}}<|/call|>'


PARSERS["mine"] = MineParser  # in the project itself: a line in parsers/registry.py

text = 'Let me see. <|call|>{"name": "add", "parameters": {"a": 1}}<|/call|>'
result = get_parser("mine").parse(text)
print(result.text, result.calls[0].tool, result.calls[0].args)
assert (result.calls[0].tool, result.calls[0].args) == ("add", {"a": 1})

# %%
# A broken call is an entry too, and says what the model should do.

(broken,) = get_parser("mine").parse("<|call|>{oops}<|/call|>").calls
print(broken.error.code, "|", broken.error.message)
assert broken.error.code == "invalid_json"

# %%
# A syntax of its own
# -------------------
#
# Suppose a model writes ``@add a=1 b=2 .`` on a line of its own. A :class:`TextParser` says what opens a
# call, whether an opener is meant, how to read the block, and how to write one. ``read`` is a generator:
# where it asks the reader for something that has not been written yet, it waits, and so the same lines read
# a stream.

import re

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import TextParser
from torchrl_agentic.parsers.engine.partial_call import PartialCall, CallParseError
from torchrl_agentic.parsers.engine.reader import Reader, Incremental
from torchrl_agentic.parsers.engine.structural_tag import Frame


class AtParser(TextParser):
    """`@tool key=word key=word .` on a line of its own."""

    name = "at"
    openers = ("@",)
    closer = " ."
    shape = "@tool argument=value ."

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Only at the start of a line: elsewhere it is an address."""
        return reader.is_line_start(start)
        yield

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read the words up to the closer."""
        end = yield from reader.find(self.closer, start)
        if end < 0:
            raise CallParseError("unclosed", "the message ends before ' .'", start)
        name, *words = reader.text[start + 1 : end].split(" ")
        if not name or not all(re.fullmatch(r"\w+=\w*", word) for word in words):
            raise CallParseError("not_literal", "expecting a name and argument=value", start)
        end += len(self.closer)
        reader.add(PartialCall(name, dict(word.split("=") for word in words)), start, end)
        return end

    def write(self, call: ParsedCall) -> str:
        """Write one call; what the format cannot say is a ValueError."""
        words = [call.tool, *(f"{key}={value}" for key, value in call.args.items())]
        if not all(isinstance(v, str) and re.fullmatch(r"\w*", v) for v in call.args.values()):
            raise ValueError("this format holds words alone")
        return f"@{' '.join(words)}{self.closer}"

    def frame(self, name: str) -> Frame | None:
        """No grammar is at hand for such arguments."""
        return None


# %%
# The contract
# ------------
#
# What every parser promises is a class of tests. Inherit it, name the parser, a few markers for random
# messages to be made of, and messages that must become errors. In a project this stands in a test file, and
# pytest runs it; here its tests are called one by one.

from hypothesis import strategies as st

from torchrl_agentic.testing import ParserContract

words = st.from_regex(r"[a-z]{0,5}", fullmatch=True)


class TestMine(ParserContract):
    parser = MineParser()
    markers = ("<|call|>", "<|/call|>", '{"name": "f", "parameters": {}}')
    malformed = ("<|call|>", "<|call|>{}<|/call|>")


class TestAt(ParserContract):
    parser = AtParser()
    at_line_start = True
    markers = ("@f", " a=1", " .", "@")
    malformed = ("@f", "@ .", "@f 1 .")
    calls = st.tuples(st.from_regex("[a-z]{1,5}", fullmatch=True), st.dictionaries(st.just("a"), words))

    def example(self) -> tuple[str, dict[str, str]]:
        return "f", {"a": "x"}


for contract in (TestMine(), TestAt()):
    tests = [name for name in dir(contract) if name.startswith("test_")]
    for name in tests:
        getattr(contract, name)()
    print(f"{type(contract).__name__}: {len(tests)} promises kept")
