"""Parsers of Tencent's Hy3 and Hy4."""

from __future__ import annotations

import copy
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self, cast

from torchrl_agentic.parsers.control_tokens import AddedTokens, control_tokens_of
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, end_of
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.engine.xml_params import XMLFormat, XMLParamsParser
from torchrl_agentic.parsers.formats.glm import KeyTags

_SUFFIX = r"(:[^\s<>:]{1,40}+)?+>"
_CALL = re.compile(rf"<tool_calls?+{_SUFFIX}")
_SECTION = re.compile(rf"<tool_calls{_SUFFIX}")
_THINK = re.compile(rf"</?+think{_SUFFIX}")
_LONGEST = 64


class _SuffixedTags(TextParser):
    """Support of a suffix that all tags of a checkpoint have, such as `<tool_call:opensource>`.

    Args:
        suffix: The suffix with its colon, "" for none, or None to detect it.
        **options: Options of `TextParser`.
    """

    default_suffix: ClassVar[str] = ""

    def __init__(self, *, suffix: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._spell(suffix)

    @property
    def _spelled(self) -> str:
        """Return the suffix for writing."""
        return self.default_suffix if self.suffix is None else self.suffix

    def _with_suffix(self, suffix: str) -> Self:
        made = copy.copy(self)
        made._spell(suffix)
        return made

    def _spell(self, suffix: str | None) -> None:
        """Set a suffix in all markers."""
        self.suffix = suffix
        kind, spelled = type(self), self._spelled
        self.format, self.stop = _spelled(kind.format, spelled), _spelled(kind.stop, spelled)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy for the suffix of a tokenizer; see `ToolCallParser.with_tokenizer`.

        Args:
            tokenizer: The model's tokenizer.
            **template_kwargs: Options of its chat template.
        """
        tokens = control_tokens_of(tokenizer).values()
        match = next(filter(None, map(_SECTION.fullmatch, tokens)), None) if self.suffix is None else None
        spelled = self if match is None else self._with_suffix(match[1] or "")
        return super(_SuffixedTags, spelled).with_tokenizer(tokenizer, **template_kwargs)

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format, with and without suffix unless the suffix is known."""
        if self.suffix is not None or not self.default_suffix:
            return super().control_markers()
        return (*super().control_markers(), *self._with_suffix("").control_markers())

    def scan(self, reader: Reader) -> Incremental[None]:
        """Read the message."""
        suffix = self.suffix
        if suffix is None:
            suffix = yield from self._suffix_of(reader)
        if suffix == self._spelled:
            yield from super().scan(reader)
        else:
            yield from self._with_suffix(suffix).scan(reader)

    def _suffix_of(self, reader: Reader) -> Incremental[str]:
        """Return the suffix of the tags in a message, and emit the text before the first call."""
        for suffix in (self.default_suffix, ""):
            if f"<tool_calls{suffix}>" in reader.exact:
                return suffix
        at = 0
        while end_of(_CALL.search(reader.text, at), -1) < 0 and not reader.is_whole:
            begun = reader.text.rfind("<", max(at, len(reader.text) - _LONGEST))
            at = len(reader.text) if begun < 0 or reader.text.find(">", begun) >= 0 else begun
            reader.emit_text(at)
            yield
        match = _CALL.search(reader.text, at) or _THINK.search(reader.text)
        return self.default_suffix if match is None else match[1] or ""

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments in a call; None where the tags have a suffix."""
        return None if self._spelled else super().frame(name)


class HyV4Parser(_SuffixedTags, XMLParamsParser):
    """The format of Hy4: any number of calls in one section.

        <tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>

    All tags of a checkpoint may have the same suffix, such as `<tool_call:opensource>`. `with_tokenizer`
    takes it from the tokenizer; otherwise the first opening tag of a message sets it. Source: the parsers of
    vLLM and SGLang.
    """

    name = "hy_v4"
    aliases = ("hy4",)
    models = "Tencent Hy4"
    example = "<tool_calls><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>…"
    stop = ("<｜hy_eos｜>",)
    format = XMLFormat(
        openers=("<tool_call>",),
        closer="</tool_call>",
        section=("<tool_calls>", "</tool_calls>"),
        around=("<tool_calls>", "", "</tool_calls>"),
        turn_end=("<｜hy_eos｜>", "<｜hy_User｜>"),
        result_tags=("<tool_responses>", "</tool_responses>"),
        parameter="<arg_key>",
        parameter_end="</arg_value>",
        style="glm_xml",
        tags=KeyTags(gap=""),
    )


class HyV3Parser(_SuffixedTags, XMLParamsParser):
    """The format of Hy3: each tag begins a line, and a tag follows the name.

        <tool_calls:opensource>
        <tool_call:opensource>f<tool_sep:opensource>
        <arg_key:opensource>a</arg_key:opensource>
        <arg_value:opensource>1</arg_value:opensource>
        </tool_call:opensource>
        </tool_calls:opensource>

    The suffix is handled as in Hy4. Source: the chat template.
    """

    name = "hy_v3"
    aliases = ("hy3", "hunyuan")
    models = "Tencent Hy3"
    example = "<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>…"
    stop = ("<｜hy_eos｜>",)
    default_suffix: ClassVar[str] = ":opensource"
    format = replace(
        HyV4Parser.format,
        around=("<tool_calls>\n", "\n", "\n</tool_calls>"),
        tags=KeyTags(separator="<tool_sep>"),
    )


def _spelled(value: Any, suffix: str) -> Any:
    """Return a text, or a value with texts, with the suffix in each tag."""
    if not suffix:
        return value
    if isinstance(value, str):
        return value.replace("｜>", f"{suffix}｜>") if "｜>" in value else value.replace(">", f"{suffix}>")
    if isinstance(value, tuple):
        return tuple(_spelled(item, suffix) for item in cast("tuple[Any, ...]", value))
    if not is_dataclass(value):
        return value
    fields_of_it = {field.name: _spelled(getattr(value, field.name), suffix) for field in fields(value)}
    return replace(cast("Any", value), **fields_of_it)
