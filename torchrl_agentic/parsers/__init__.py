"""Parsers of tool calls: one file per model family in `formats/`; `registry` maps names to parsers.

To add a parser, subclass `JSONBlockParser`, `TextParser` or another base from `engine/` in `formats/` and
give it a `format`, the description of its markers; add its name to the table in `registry`, and write a test
class that inherits `testing.ParserContract`.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
