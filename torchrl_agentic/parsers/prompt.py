"""How the tools get into the prompt, for policy, reference model and tokenizer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, content_text
from torchrl_agentic.parsers.base import ToolCallParser, Tools, specs_of
from torchrl_agentic.parsers.control_tokens import FAMILY_MARKERS, AddedTokens, control_tokens_of, escaper
from torchrl_agentic.parsers.engine.json_text import dumps


def with_tools(chat_template: str, tools: Tools, *, tokenizer: AddedTokens | None = None) -> str:
    """Give a chat template that shows these tools without being told of them.

    TorchRL's wrappers pass no `tools=` to the tokenizer. Give the same template to each that renders the
    conversation, as `chat_template=`: the policy, the reference model, the tokens transform.

    Args:
        chat_template: One that shows `tools`.
        tools: What it is to show. Their descriptions may come from a server, so control tokens are escaped.
        tokenizer: Whose control tokens those are; None: of all families.

    Raises:
        ValueError: the template shows no tools; `with_tools_message` puts them into a message.
    """
    if "tools" not in chat_template:
        raise ValueError("this chat template shows no tools; put them into a message: with_tools_message(…)")
    # The newline goes with the tag (trim_blocks), and leaves the template at the start of a line.
    known = None if tokenizer is None else tuple(control_tokens_of(tokenizer).values())
    control = escaper(FAMILY_MARKERS if known is None else known)
    return f"{{% set tools = {_jinja(control.json(specs_of(tools)))} %}}\n{chat_template}"


def _jinja(value: JSON) -> str:
    """Write a JSON value as a Jinja expression: Jinja has no null, and knows no surrogate pairs."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        # Jinja turns bare \r\n and \r inside literals into \n, so all that is not plain is escaped.
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
    """Tell a model in words what tools there are, and how the parser wants them called.

    Control tokens are escaped: the descriptions may come from a server.
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
    """Give a conversation whose system message tells of the tools, for templates that show none.

    A system message that there is keeps its text and gets the tools behind it.
    """
    instructions = tool_instructions(tools, parser)
    conversation = [dict(message) for message in messages]
    if conversation and conversation[0].get("role") == "system":
        before = content_text(conversation[0].get("content"))
        conversation[0]["content"] = f"{before}\n\n{instructions}"
        return conversation
    return [{"role": "system", "content": instructions}, *conversation]
