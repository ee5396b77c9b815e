"""Names of verl's classes, those of the classes here that do the same, and defaults of verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_agentic.text import did_you_mean

EQUIVALENTS: Mapping[str, str] = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "torchrl_agentic.tools.SandboxFusionTool",
    "verl.tools.search_tool.SearchTool": "torchrl_agentic.tools.SearchTool",
    "verl.tools.gsm8k_tool.Gsm8kTool": "torchrl_agentic.tools.Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool": "torchrl_agentic.tools.Geo3kTool",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "torchrl_agentic.interactions.Gsm8kInteraction",
}
"""Verl's classes → ours that do the same."""
EXAMPLES: Mapping[str, str] = {
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": "image_zoom.py:ImageZoomTool",
}
"""Verl's classes → ours in the folder `examples` of the repository."""
DEFAULTS: dict[str, Any] = {
    "max_tool_response_chars": 256,
    "tool_response_truncate_side": "middle",
    "use_inference_chat_template": False,
    "tokenization_sanity_check_mode": "strict",
}
"""Arguments of `TurnTokenizer` that mean what verl does by default."""


def equivalent_of(name: str) -> str:
    """Return the name of the class here that does what a class of verl does; any other name unchanged.

    Args:
        name: Dotted name of a class.

    Raises:
        ImportError: If it is a misspelt name of a class of verl, or one that only an example replaces.
    """
    if example := EXAMPLES.get(name):
        raise ImportError(
            f"copy examples/{example.partition(':')[0]} of the repository, and write {example!r}"
        )
    is_unknown = name.startswith("verl.") and name not in EQUIVALENTS
    if is_unknown and (hint := did_you_mean(name, EQUIVALENTS)):
        raise ImportError(f"no class {name!r}{hint}")
    return EQUIVALENTS.get(name, name)
