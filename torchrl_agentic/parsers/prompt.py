"""Show tools to a model: in its chat template, or in words in the system message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, content_text
from torchrl_agentic.parsers.base import ToolCallParser, Tools, escaper, specs_of
from torchrl_agentic.parsers.control_tokens import FAMILY_MARKERS, AddedTokens, control_tokens_of
from torchrl_agentic.parsers.engine.json_text import dumps


def with_tools(chat_template: str, tools: Tools, *, tokenizer: AddedTokens | None = None) -> str:
    """Return a chat template that shows these tools without a `tools=` argument.

    TorchRL's wrappers pass no `tools=` to the tokenizer. Pass the returned template as `chat_template=`
    wherever the conversation is rendered: the policy, the reference model, the tokens transform.

    Args:
        chat_template: A template that reads `tools`.
        tools: Tools to show. Control tokens in them are escaped, since descriptions may come from a server.
        tokenizer: Tokenizer whose control tokens are escaped; None escapes those of all known families.

    Raises:
        ValueError: If the template does not read `tools`; use `with_tools_message` for such a model.
    """
    if "tools" not in chat_template:
        raise ValueError("this chat template does not read `tools`; use with_tools_message(…)")
    # `trim_blocks` drops the newline with the tag, so the template still begins a line.
    known = None if tokenizer is None else tuple(control_tokens_of(tokenizer).values())
    control = escaper(FAMILY_MARKERS if known is None else known)
    return f"{{% set tools = {_jinja(control.json(specs_of(tools)))} %}}\n{chat_template}"


def _jinja(value: JSON) -> str:
    """Write a JSON value as a Jinja expression; Jinja has neither null nor surrogate pairs."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        # Jinja turns raw \r\n and \r in literals into \n, so everything but printable ASCII is escaped.
        plain = "".join(
            c if " " <= c <= "~" else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
            for c in escaped
        )
        return f'"{plain}"'
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, JSON]", value)
        return "{" + ", ".join(f"{_jinja(str(key))}: {_jinja(item)}" for key, item in fields.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja, cast("Sequence[JSON]", value))) + "]"
    return repr(value)


def tool_instructions(tools: Tools, parser: ToolCallParser) -> str:
    """Return text that lists the tools and shows how to call one in the parser's format.

    Args:
        tools: Tools to list. Control tokens in them are escaped, since descriptions may come from a server.
        parser: Parser of the format that the model must use.
    """
    shape = getattr(parser, "shape", "") or parser.name
    control = getattr(parser, "control_escaper", None) or escaper(FAMILY_MARKERS)
    specs = "\n".join(control.escape(dumps(spec)) for spec in specs_of(tools))
    return (
        "# Tools\n\nYou may call one or more of these tools. Each is described by a JSON Schema:\n"
        f"<tools>\n{specs}\n</tools>\n\nTo call a tool, write:\n{shape}"
    )


def with_tools_message(
    messages: Sequence[Mapping[str, JSON]], tools: Tools, parser: ToolCallParser
) -> list[dict[str, JSON]]:
    """Return a conversation whose system message lists the tools, for templates that show none.

    Args:
        messages: The conversation. An existing system message keeps its text, followed by the tools.
        tools: Tools to list.
        parser: Parser of the format that the model must use.
    """
    instructions = tool_instructions(tools, parser)
    conversation = [dict(message) for message in messages]
    if conversation and conversation[0].get("role") == "system":
        before = content_text(conversation[0].get("content"))
        conversation[0]["content"] = f"{before}\n\n{instructions}"
        return conversation
    return [{"role": "system", "content": instructions}, *conversation]
