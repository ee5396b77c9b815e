"""Parsers of Tencent's Hy3 and Hy4."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.control_tokens import AddedTokens, control_tokens_of
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, end_of
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.formats.glm import GLM45Parser

_SUFFIX = r"(:[^\s<>:]{1,40}+)?+>"
_CALL = re.compile(rf"<tool_calls?+{_SUFFIX}")
_SECTION = re.compile(rf"<tool_calls{_SUFFIX}")
_THINK = re.compile(rf"</?+think{_SUFFIX}")
_LONGEST = 64
_MARKERS = ("openers", "section", "think", "result_tags", "turn_end", "stop", "around")
_MARKER = ("closer", "parameter", "parameter_end", "key_end", "value_begin", "separator", "shape")


class HyV4Parser(GLM45Parser):
    """The format of Hy4: any number of calls in one section.

        <tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call></tool_calls>

    All tags of a checkpoint may have the same suffix, such as `<tool_call:opensource>`. `with_tokenizer`
    takes it from the tokenizer; otherwise the first opening tag of a message sets it. Source: the parsers of
    vLLM and SGLang.

    Args:
        suffix: The suffix with its colon, "" for none, or None to detect it.
        **options: Options of `TextScanner`.
    """

    name: ClassVar[str] = "hy_v4"
    aliases = ("hy4",)
    models = "Tencent Hy4"
    example = "<tool_calls><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>…"
    default_suffix: ClassVar[str] = ""
    stop = ("<｜hy_eos｜>",)
    section = ("<tool_calls>", "</tool_calls>")
    around = (section[0], "", section[1])
    gap: ClassVar[str] = ""
    turn_end = ("<｜hy_eos｜>", "<｜hy_User｜>")
    result_tags = ("<tool_responses>", "</tool_responses>")
    shape = (
        "<tool_calls><tool_call>tool_name<arg_key>argument</arg_key><arg_value>value</arg_value></tool_call>"
        "</tool_calls>"
    )

    def __init__(self, *, suffix: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._spell(suffix)

    def _spell(self, suffix: str | None) -> None:
        """Set all markers of this object, with a suffix."""
        kind, self.suffix = type(self), suffix
        spelled = self._spelled
        vars(self).update({name: _spelled(getattr(kind, name), spelled) for name in _MARKER})
        for name in _MARKERS:
            setattr(self, name, tuple(_spelled(marker, spelled) for marker in getattr(kind, name)))

    @property
    def _spelled(self) -> str:
        """Return the suffix for writing."""
        return self.default_suffix if self.suffix is None else self.suffix

    def _with_suffix(self, suffix: str) -> Self:
        made = copy.copy(self)
        made._spell(suffix)
        return made

    def _state(self) -> dict[str, JSON]:
        return {key: value for key, value in super()._state().items() if key not in (*_MARKER, *_MARKERS)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._spell(self.suffix)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy for the suffix of a tokenizer; see `ToolCallParser.with_tokenizer`.

        Args:
            tokenizer: The model's tokenizer.
            **template_kwargs: Options of its chat template.
        """
        tokens = control_tokens_of(tokenizer).values()
        match = next(filter(None, map(_SECTION.fullmatch, tokens)), None) if self.suffix is None else None
        spelled = self if match is None else self._with_suffix(match[1] or "")
        return super(HyV4Parser, spelled).with_tokenizer(tokenizer, **template_kwargs)

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


class HyV3Parser(HyV4Parser):
    """The format of Hy3: each tag begins a line, and a tag follows the name.

        <tool_calls:opensource>
        <tool_call:opensource>f<tool_sep:opensource>
        <arg_key:opensource>a</arg_key:opensource>
        <arg_value:opensource>1</arg_value:opensource>
        </tool_call:opensource>
        </tool_calls:opensource>

    The suffix is handled as in Hy4. Source: the chat template.
    """

    name: ClassVar[str] = "hy_v3"
    aliases = ("hy3", "hunyuan")
    models = "Tencent Hy3"
    example = "<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>…"
    default_suffix: ClassVar[str] = ":opensource"
    around = ("<tool_calls>\n", "\n", "\n</tool_calls>")
    separator = "<tool_sep>"
    gap: ClassVar[str] = "\n"
    shape = (
        "<tool_calls>\n<tool_call>tool_name<tool_sep>\n<arg_key>argument</arg_key>\n"
        "<arg_value>value</arg_value>\n</tool_call>\n</tool_calls>"
    )


def _spelled(text: str, suffix: str) -> str:
    """Return a text with a suffix in each of its tags."""
    return text.replace("｜>", f"{suffix}｜>") if "｜>" in text else text.replace(">", f"{suffix}>")
