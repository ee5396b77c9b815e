"""Transforms of people's own: all that is known of them is `_process_batch_item(content, index)`."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, TextPart, ToolResult
from torchrl_agentic.tools.legacy.base import Call, ThreadLayer

RenderCall = Callable[[str, Mapping[str, JSON]], str]


class TextLayer(ThreadLayer):
    """Writes the call as text again, for the transform to parse.

    render_call: how to write it; None: in TorchRL's tags.
    """

    def __init__(self, transform: Any, render_call: RenderCall | None = None) -> None:
        super().__init__(transform)
        self.render_call = render_call

    def answer(self, call: Call) -> ToolResult:
        """Let the transform read the call and answer."""
        rendered = self.render_call(call.name, call.args) if self.render_call else _rendered(call)
        found: Any = self.transform._process_batch_item(rendered, call.row)
        if found is None:
            raise ToolError(
                f"the transform found no call in {rendered[:80]!r}; give as_tool a render_call that suits it"
            )
        written = getattr(self.transform, "_format_result", str)
        texts: list[str] = [written(item) for item in ([found] if isinstance(found, str) else found)]
        failed = any(" failed:\n" in text[:200] for text in texts)
        return ToolResult(tuple(map(TextPart, texts)), failed)


def _rendered(call: Call) -> str:
    tag = f' tag="{html.escape(call.ctx.tag)}"' if call.ctx.tag else ""
    return f'<tool name="{call.name}"{tag}>{json.dumps(call.args, ensure_ascii=False)}</tool>'
