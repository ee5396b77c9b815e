"""`Completion`: the answer of a chat completions API, whole or in pieces; `api_messages`: what it is asked.

The form is that of OpenAI's API reference; servers that imitate it deviate in ways that are accepted here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torchrl_agentic.messages import (
    JSON,
    Fields,
    Message,
    claim_id,
    content_text,
    encodable,
    fields_of,
    image_part,
)
from torchrl_agentic.text import read_json

_CUT_OFF = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded"})
"""Finish reasons of answers that a bound cut off; the last two are of Mistral and of Z.ai."""
_FILTERED = frozenset(
    {
        "content_filter",
        "refusal",
        "sensitive",
        "safety",
        "recitation",
        "blocklist",
        "prohibited_content",
        "spii",
    }
)
"""Finish reasons of answers that a service withholds: of OpenAI, Anthropic and Z.ai; the others of Gemini."""
_FAILED = frozenset({"error", "abort", "network_error", "insufficient_system_resource"})
"""Finish reasons of answers that the service could not complete; the last two are of Z.ai and of DeepSeek."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields with reasoning: of DeepSeek and SGLang; of vLLM, Ollama and OpenRouter; of parts of Mistral's."""


_MAX_NAME = 1000
"""Characters of the name of a tool after which no more pieces are added."""


class InvalidCompletion(ValueError):
    """A server sent something else than a chat completion."""


@dataclass(slots=True)
class _CallPieces:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])

    def add(self, item: JSON) -> None:
        """Add a call or a piece of one; what is not a call becomes its arguments, which no parser reads."""
        fields = fields_of(item)
        function = fields_of((fields or {}).get("function")) or fields
        if fields is None or function is None:
            self.arguments.append(_text_of(item))
            return
        self.call_id = self.call_id or _string(fields.get("id"))
        name = _string(function.get("name"))
        if name != self.name and len(self.name) < _MAX_NAME:  # some servers repeat it in each piece
            self.name += name
        if (arguments := function.get("arguments")) is not None:
            self.arguments.append(_text_of(arguments))


@dataclass(slots=True)
class Completion:
    """An answer that is put together from a response, or from the pieces of a stream.

    Attributes:
        finish: The finish reason; None if there was none yet.
        usage: The field "usage" of the response; None if there was none yet.
    """

    finish: str | None = None
    usage: JSON = None
    _text: list[str] = field(default_factory=list[str])
    _reasoning: list[str] = field(default_factory=list[str])
    _refusal: list[str] = field(default_factory=list[str])
    _calls: list[_CallPieces] = field(default_factory=list[_CallPieces])
    _latest: dict[str, _CallPieces] = field(default_factory=dict[str, _CallPieces])  # by index

    @property
    def has_failed(self) -> bool:
        """True if the service could not complete the answer, so that asking again may help."""
        return self._ended_by in _FAILED

    @property
    def _ended_by(self) -> str:
        """The finish reason as most services write it: some write capitals, or the details behind a colon."""
        return (self.finish or "").lower().partition(":")[0].strip().replace("-", "_")

    def add(self, data: JSON, *, is_whole: bool) -> None:
        """Add a response, or a piece of a stream.

        Args:
            data: The JSON of the server.
            is_whole: Whether it is a whole response.

        Raises:
            InvalidCompletion: If it is neither.
        """
        fields = fields_of(data)
        if fields is None:
            raise InvalidCompletion(f"expected an object; got {data!r:.200}")
        if fields_of(fields.get("usage")) is not None:
            self.usage = fields["usage"]
        choices = fields.get("choices")
        if not is_whole and (choices is None or choices == []):
            return  # the usage, or a sign of life
        choice = fields_of(choices[0]) if isinstance(choices, list) and choices else None
        said = fields_of((choice or {}).get("message" if is_whole else "delta"))
        if choice is None or (said is None and (is_whole or "finish_reason" not in choice)):
            raise InvalidCompletion(f"expected choices with a message; got {data!r:.200}")
        self._add_message(said or {}, is_whole=is_whole)
        if isinstance(finish := choice.get("finish_reason"), str):
            self.finish = finish

    def _add_message(self, said: Fields, *, is_whole: bool) -> None:
        content = said.get("content")
        if isinstance(content, list):
            for part in cast("list[JSON]", content):
                self._add_part(fields_of(part) or {})
        elif isinstance(content, str):
            self._text.append(content)
        elif content is not None:
            raise InvalidCompletion(f"expected a content of text; got {content!r:.200}")
        self._reasoning.append(next((text for key in _REASONING if (text := _string(said.get(key)))), ""))
        self._refusal.append(_string(said.get("refusal")))
        calls: Any = said.get("tool_calls") or []
        for item in cast("list[JSON]", calls if isinstance(calls, list) else [calls]):
            (self._new_call(item) if is_whole else self._call_of(item)).add(item)

    def _add_part(self, part: Fields) -> None:
        kind = part.get("type")
        if kind == "text":
            self._text.append(_string(part.get("text")))
        elif kind == "refusal":
            self._refusal.append(_string(part.get("refusal")))
        elif kind in _REASONING:
            thought = part.get(kind)
            self._reasoning.append(thought if isinstance(thought, str) else content_text(thought))

    def _new_call(self, item: JSON) -> _CallPieces:
        call = _CallPieces()
        self._calls.append(call)
        self._latest[str((fields_of(item) or {}).get("index"))] = self._latest["None"] = call
        return call

    def _call_of(self, item: JSON) -> _CallPieces:
        """Return the call that a piece belongs to: by its index, unless a new id says otherwise."""
        fields = fields_of(item) or {}
        call_id, known = _string(fields.get("id")), self._latest.get(str(fields.get("index")))
        if known is not None and (not call_id or known.call_id in ("", call_id)):
            return known
        return self._new_call(item)

    def message(self, before: Sequence[Mapping[str, Any]]) -> Message:
        """Return the message; its calls have ids that are unique in the conversation.

        Args:
            before: The messages before it.
        """
        taken: dict[str, int] = {}
        asked = [message for message in before if message.get("role") == "assistant"]
        for message in asked:
            for call in message.get("tool_calls") or ():
                claim_id(_string(call.get("id")), taken)
        calls: list[Fields] = []
        for number, call in enumerate(self._calls):
            call_id = claim_id(encodable(call.call_id) or f"call_{len(asked)}_{number}", taken)
            function = {"name": encodable(call.name), "arguments": encodable("".join(call.arguments))}
            calls.append({"id": call_id, "type": "function", "function": function})
        text, refusal = encodable("".join(self._text)), encodable("".join(self._refusal))
        if self._ended_by in _FILTERED and not refusal:
            refusal = f"the service filtered the answer (finish_reason {self.finish})"
        return Message(
            "assistant",
            None if calls and not text else text,
            tuple(calls),
            is_complete=self._ended_by not in _CUT_OFF | _FILTERED,
            reasoning=encodable("".join(self._reasoning)),
            refusal=refusal,
        )


def _string(value: JSON) -> str:
    return value if isinstance(value, str) else ""


def _text_of(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def api_messages(
    messages: Sequence[Mapping[str, Any]], *, reasoning_field: str | None = None
) -> list[dict[str, JSON]]:
    """Return a conversation in the form of OpenAI's API.

    Calls without a result are left out, and a result without a call becomes a user's message, since services
    refuse both. Arguments that are no JSON object are wrapped in one, since servers read them for their chat
    template. Images become data URLs; those of tool results follow in a user's message.

    Args:
        messages: The messages, as chat templates take them.
        reasoning_field: Field in which the reasoning of earlier messages is sent; None: it is not sent.

    Raises:
        ValueError: If an image cannot be read.
    """
    made: list[dict[str, JSON]] = []
    images: list[JSON] = []
    open_calls: set[str] = set()
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role != "tool" and images:
            made.append({"role": "user", "content": images})
            images = []
        one: dict[str, JSON] = {"role": role}
        if isinstance(name := message.get("name"), str) and role != "tool":
            one["name"] = name
        if role == "assistant":
            answered = set(_answered(messages, number + 1))
            calls = [call for call in message.get("tool_calls") or () if call.get("id") in answered]
            open_calls = {call["id"] for call in calls}
            one["content"] = content_text(content) or (None if calls else "")
            if calls:
                one["tool_calls"] = [_api_call(call) for call in calls]
            if reasoning_field is not None and message.get("reasoning_content"):
                one[reasoning_field] = message["reasoning_content"]
        elif role == "tool":
            one["content"], found = _split(content)
            if found:
                images += [{"type": "text", "text": f"Images of {message.get('tool_call_id')}:"}, *found]
            if message.get("tool_call_id") in open_calls:
                one["tool_call_id"] = message["tool_call_id"]
            else:
                one["role"] = "user"
        else:
            one["content"] = content or ""
            if isinstance(content, list):
                one["content"] = [_api_part(part) for part in cast("list[JSON]", content)]
        made.append(one)
    if images:
        made.append({"role": "user", "content": images})
    return made


def _answered(messages: Sequence[Mapping[str, Any]], start: int) -> Iterator[str]:
    """Yield the ids of the calls that the tool messages from `start` on answer."""
    for message in messages[start:]:
        if message["role"] != "tool":
            return
        yield message.get("tool_call_id") or ""


def _api_call(call: Mapping[str, Any]) -> JSON:
    function = fields_of(call.get("function")) or {}
    given = function.get("arguments")
    arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    try:
        is_object = fields_of(read_json(arguments)) is not None
    except ValueError:
        is_object = False
    if not is_object:
        arguments = json.dumps({"unreadable": arguments}, ensure_ascii=False)
    sent = {"name": _string(function.get("name")) or "unknown", "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": sent}


def _split(content: Any) -> tuple[str, list[JSON]]:
    """Return the text of a tool message, and its images."""
    if not isinstance(content, list):
        return content_text(content), []
    parts = cast("list[JSON]", content)
    return content_text(parts), [_api_part(part) for part in parts if _kind(part) is not None]


def _kind(part: JSON) -> str | None:
    kind = (fields_of(part) or {}).get("type")
    kinds = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
    return kinds.get(kind) if isinstance(kind, str) else None


def _api_part(part: Any) -> JSON:
    """Return a part of a message in the form of the API: images as `image_url`, others unchanged."""
    kind = _kind(part)
    if kind is None:
        return {"type": "text", "text": part} if isinstance(part, str) else part
    own = f"{kind}_url"
    fields = dict(part)
    if fields.get("type") == own and fields_of(fields.get(own)) is not None:
        return fields
    if (data := fields.get("base64")) is not None:
        default = "image/png" if kind == "image" else "video/mp4"
        return {"type": own, own: {"url": f"data:{fields.get('media_type', default)};base64,{data}"}}
    value = next((fields[key] for key in (own, kind, "url", "path") if fields.get(key) is not None), None)
    if isinstance(value, str) and value.startswith(("http://", "https://", "data:")):
        return {"type": own, own: {"url": value}}
    if value is None or kind == "video":
        raise ValueError(f"a part of type {fields.get('type')!r} has no URL and no base64 data")
    if isinstance(value, str | Path):
        try:
            value = Path(value).read_bytes()
        except OSError as error:
            raise ValueError(f"an image cannot be read: {error}") from error
    try:
        image = image_part(value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    return {"type": own, own: {"url": url}}
