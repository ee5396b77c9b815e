"""transformers' response templates: how a model's tokenizer says that its answers are to be read."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.adapters.base import EngineParser, Found


class TransformersParser(EngineParser):
    """A response template: the tokenizer's own, or one that is given.

    Its cost grows with the square of the text, and one bad block loses all: such a message is one error.
    """

    engine = "transformers"

    def __init__(
        self, format: str = "", *, tokenizer: Any = None, template: Fields | None = None, **options: Any
    ) -> None:
        super().__init__(format, **options)
        found = template if template is not None else getattr(tokenizer, "response_template", None)
        if not isinstance(found, Mapping):
            raise ValueError("the tokenizer has no response_template; give one: template={…}")
        self.template = dict(cast("Fields", found))

    def prepare(self) -> None:
        """Import the reader of templates."""
        self._reader()

    def _reader(self) -> Any:
        return importlib.import_module("transformers.utils.chat_parsing").parse_response

    def extract(self, text: str, specs: Sequence[Fields]) -> tuple[str | None, list[Found]]:
        """Read by the template; the prompt is taken to end where the template's anchor says."""
        prefix = self.template.get("start_anchor") or ""
        fields = self._reader()(text, self.template, prefix=prefix, tools=list(specs) or None)
        calls: JSON = fields.get("tool_calls") or []
        functions = [(fields_of(call) or {}).get("function", call) for call in calls]
        found = [
            Found((fields_of(f) or {}).get("name"), (fields_of(f) or {}).get("arguments")) for f in functions
        ]
        return fields.get("content"), found
