"""Adapter of transformers' response templates, which describe how to read a model's answers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.adapters.base import EngineParser, Found


class TransformersParser(EngineParser):
    """A response template, that of the tokenizer or a given one.

    Reading takes time quadratic in the length of the text. One malformed block makes the whole message one
    error.

    Args:
        format: Unused; accepted like by the other adapters.
        tokenizer: Tokenizer with a `response_template`.
        template: A response template to use instead.
        **options: Options of `EngineParser`.
    """

    engine = "transformers"

    def __init__(
        self, format: str = "", *, tokenizer: Any = None, template: Fields | None = None, **options: Any
    ) -> None:
        super().__init__(format, **options)
        found = template if template is not None else getattr(tokenizer, "response_template", None)
        if not isinstance(found, Mapping):
            raise ValueError("the tokenizer has no response_template; pass one: template={…}")
        self.template = dict(cast("Fields", found))

    def prepare(self) -> None:
        """Import the template reader."""
        self._reader()

    def _reader(self) -> Any:
        return importlib.import_module("transformers.utils.chat_parsing").parse_response

    def extract(self, text: str, specs: Sequence[Fields]) -> tuple[str | None, list[Found]]:
        """Read the text with the template; the template's anchor marks the end of the prompt."""
        prefix = self.template.get("start_anchor") or ""
        fields = self._reader()(text, self.template, prefix=prefix, tools=list(specs) or None)
        calls: JSON = fields.get("tool_calls") or []
        functions = [(fields_of(call) or {}).get("function", call) for call in calls]
        found = [
            Found((fields_of(f) or {}).get("name"), (fields_of(f) or {}).get("arguments")) for f in functions
        ]
        return fields.get("content"), found
