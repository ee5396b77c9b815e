"""The docstring of each format shows a message that its parser reads, and names the source of the format."""

import inspect
import re
import textwrap

import pytest

from torchrl_agentic.parsers import ToolCallParser, get_parser
from torchrl_agentic.parsers.registry import FORMATS


def first_example(parser: type[ToolCallParser]) -> str:
    """Return the first indented block of a docstring."""
    block = re.search(r"(?:^    .*\n?)+", inspect.getdoc(parser) or "", re.MULTILINE)
    assert block
    return textwrap.dedent(block[0]).strip()


@pytest.mark.parametrize("parser", FORMATS, ids=lambda parser: parser.name)
def test_the_first_example_is_read(parser: type[ToolCallParser]):
    result = get_parser(parser.name).parse(first_example(parser))
    assert result.calls
    assert [(call.error, call.notes) for call in result.calls] == [(None, ())] * len(result.calls)


@pytest.mark.parametrize("parser", FORMATS, ids=lambda parser: parser.name)
def test_the_source_is_named(parser: type[ToolCallParser]):
    assert "Source: " in " ".join((inspect.getdoc(parser) or "").split())
