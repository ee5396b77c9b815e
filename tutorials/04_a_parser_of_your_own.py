"""
4 · A parser of your own
========================

Suppose that a model uses a format that no registered parser reads. A parser for it takes one file of a few
lines, one line in the registry and one test class. This tutorial writes two parsers: one for a format that
contains JSON, which needs almost no code, and one for a format with a syntax of its own.
"""

# %%
# JSON between markers
# --------------------
#
# Suppose a model writes ``<|call|>{"name": "f", "parameters": {…}}<|/call|>`` (an invented format).
# :class:`JSONBlockParser` reads JSON between an opener and a closer, so the parser only has to name the
# markers, in a :class:`JSONFormat`. ``parsers/formats/longcat.py`` does the same for a real model. The base
# class provides the rest: one entry per attempted call, errors that tell the model what to correct, reasoning
# and code fences that are left alone, streaming, parsing of tokens, and structural tags.

from torchrl_agentic.parsers import PARSERS, JSONBlockParser, JSONFormat, get_parser


class MineParser(JSONBlockParser):
    """`<|call|>{"name": …, "parameters": {…}}<|/call|>`."""

    name = "mine"
    stop = ("<|im_end|>",)
    format = JSONFormat(
        openers=("<|call|>",), closer="<|/call|>", turn_end=("<|im_end|>",), arguments_key="parameters"
    )


PARSERS["mine"] = MineParser  # in the project itself: a line in parsers/registry.py

text = 'Let me see. <|call|>{"name": "add", "parameters": {"a": 1}}<|/call|>'
result = get_parser("mine").parse(text)
print(result.text, result.calls[0].tool, result.calls[0].args)
assert (result.calls[0].tool, result.calls[0].args) == ("add", {"a": 1})

# %%
# A malformed call is an entry too, and its error tells the model what to do.

(broken,) = get_parser("mine").parse("<|call|>{oops}<|/call|>").calls
print(broken.error.code, "|", broken.error.message)
assert broken.error.code == "invalid_json"

# %%
# A syntax of its own
# -------------------
#
# Suppose a model writes ``@add a=1 b=2 .`` on a line of its own. The :class:`TextFormat` of a
# :class:`TextParser` names what opens a call; its methods tell whether an opener is meant as one, and read
# and write the block. ``read`` is a generator: if it asks the reader for text that has not arrived yet, it
# waits, so the same code reads a stream.

import re

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import TextFormat, TextParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader


class AtParser(TextParser):
    """`@tool key=word key=word .` on a line of its own."""

    name = "at"
    format = TextFormat(openers=("@",), closer=" .", has_grammar=False)

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Accept `@` only at the start of a line; elsewhere it may be an address."""
        return reader.is_line_start(start)
        yield

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read the words up to the closer."""
        end = yield from reader.find(self.format.closer, start)
        if end < 0:
            raise CallParseError("unclosed", "the message ends before ' .'", start)
        name, *words = reader.text[start + 1 : end].split(" ")
        if not name or not all(re.fullmatch(r"\w+=\w*", word) for word in words):
            raise CallParseError("not_literal", "expecting a name and argument=value", start)
        end += len(self.format.closer)
        reader.add(PartialCall(name, dict(word.split("=") for word in words)), start, end)
        return end

    def write(self, call: ParsedCall) -> str:
        """Return the text of a call; raise ValueError if the format cannot express it."""
        words = [call.tool, *(f"{key}={value}" for key, value in call.args.items())]
        if not all(isinstance(v, str) and re.fullmatch(r"\w*", v) for v in call.args.values()):
            raise ValueError("arguments of this format are words")
        return f"@{' '.join(words)}{self.format.closer}"


# %%
# The contract
# ------------
#
# `ParserContract` is a class of tests that every parser must pass. Inherit it and name the parser, some
# markers from which random messages are built, and messages that must become errors. In a project the class
# belongs in a test file, where pytest runs it; here its tests are called one by one.

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
