"""Write records as lines of valid JSON without secrets."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import pydantic_core

from torchrl_agentic.messages import JSON, Message, Turn, fields_of
from torchrl_agentic.records.record import TrajectoryRecord, plain_text, question_in
from torchrl_agentic.records.record_json import fields_to_json, record_to_json, turns_to_bytes
from torchrl_agentic.text import MAX_INT_BITS, read_json

SECRET_NAMES = (
    "password", "passwd", "passphrase", "secret", "client_secret", "api_key", "access_key", "secret_key",
    "private_key", "token", "access_token", "auth_token", "refresh_token", "bearer_token", "authorization",
    "cookie", "credentials",
)  # fmt: skip
"""Names of arguments, and endings of names of environment variables, whose values are not written."""
REDACTED = "[redacted]"
_SHORTEST = 6  # a shorter value occurs in many unrelated texts
_MOST_TEXTS = 16  # that are searched for in other text
_SLICE = 1 << 20  # characters that are searched while no other thread runs
_DEEPEST = 100
_MOST_KNOWN = 10_000


class Secrets:
    """Finds the values that must not be written: arguments by name, and values of environment variables.

    Names are compared without case, "-" and "_". The model may choose the name and the value of an argument,
    so the value is removed only from the call, in its arguments and in the text of the message. A value is
    removed from all other text, such as the result of the tool, and with it the tokens of the trajectory, if

    - it is that of an environment variable with a secret name,
    - it is that of an extra of the record with a secret name, or
    - the schema of the tool declares the argument secret, by `"writeOnly": true` or `"format": "password"`,
      as pydantic's `SecretStr` does;

    and if it has 6 characters or more. At most 16 arguments and extras of a trajectory are searched for.

    Args:
        names: Names of arguments, and endings of names of environment variables.
    """

    def __init__(self, names: Iterable[str] = SECRET_NAMES) -> None:
        self.names = frozenset(map(_plain_name, names))
        self._known: dict[str, bool] = {}

    def variables(self) -> frozenset[str]:
        """Return the values of this process's environment variables whose names end with a secret name."""
        endings = tuple(self.names)
        return frozenset(
            value
            for name, value in os.environ.items()
            if len(value) >= _SHORTEST and endings and _plain_name(name).endswith(endings)
        )

    def found_in(
        self, value: JSON, found: dict[str, None], declared: Sequence[str] = (), depth: int = 0
    ) -> bool:
        """Return whether a JSON value has a secret name.

        Args:
            value: The value.
            found: Texts of secret names are added to it, in order.
            declared: More secret names, as they are written.
            depth: Depth of the value in the record.
        """
        if depth >= _DEEPEST:
            return False  # values at this depth are not written
        here = False
        if isinstance(value, Mapping):
            for name, item in cast("Mapping[Any, Any]", value).items():
                if isinstance(name, str) and (name in declared or self.is_secret(name)):
                    here = True
                    _add_texts(item, found)
                elif isinstance(item, Mapping | list):
                    here |= self.found_in(item, found, declared, depth + 1)
        elif isinstance(value, list):
            for item in cast("list[Any]", value):
                here |= self.found_in(item, found, declared, depth + 1)
        return here

    def is_secret(self, name: str) -> bool:
        """Return whether the value of a name must not be written."""
        if name not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[name] = _plain_name(name) in self.names
        return self._known[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Secrets, (tuple(self.names),))


def _plain_name(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _add_texts(value: JSON, found: dict[str, None], depth: int = 0) -> None:
    if isinstance(value, str):
        if len(value) >= _SHORTEST:
            found[value] = None
    elif depth >= _DEEPEST:
        return  # values at this depth are not written
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            _add_texts(item, found, depth + 1)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            _add_texts(item, found, depth + 1)


def json_line(record: TrajectoryRecord, secrets: Secrets, variables: frozenset[str]) -> bytes:
    """Return a trajectory as one line of JSON, its newline included.

    Args:
        record: The trajectory.
        secrets: Finds secret names.
        variables: Secret values of environment variables, from `Secrets.variables`.
    """
    known = dict[str, None]()
    named = secrets.found_in(record.extras, known)
    for turn, call, _ in record.calls:
        declared = turn.secret_args.get(call.tool, ())
        named |= secrets.found_in(call.args, {}, declared)
        if declared:  # by the host, unlike a name that the model has chosen
            Secrets(()).found_in(call.args, known, declared)
    metrics = [result.metrics for _, _, result in record.calls if result.metrics]
    try:
        if not all(map(_is_plain, (record.gts, record.extras, *metrics))):
            raise ValueError("an annotation is not plain JSON")
        fields = fields_to_json(record)
        head = pydantic_core.to_json(fields, inf_nan_mode="strings", bytes_mode="base64", fallback=str)
        encoded = head[:-1] + b',"turns":' + turns_to_bytes(record.turns) + b"}"
    except (pydantic_core.PydanticSerializationError, ValueError, RecursionError):
        encoded = _encoded(plain(record_to_json(_with_plain_metrics(record))))
    printed = {value for value in variables if _escaped(value).encode("utf-8", "surrogatepass") in encoded}
    if named or printed:
        hidden = _Redaction(secrets, [*sorted(printed), *islice(known, _MOST_TEXTS)])
        encoded = _encoded(hidden.of(json.loads(encoded), record))
    return encoded + b"\n"


def _with_plain_metrics(record: TrajectoryRecord) -> TrajectoryRecord:
    """Return a record whose metrics, which may be nested deeply, any reader can read."""

    def shown(turn: Turn) -> Turn:
        results = (replace(one, metrics=plain(one.metrics)) for one in turn.outcome.results)
        return replace(turn, outcome=replace(turn.outcome, results=tuple(results)))

    return replace(record, turns=tuple(map(shown, record.turns)))


def _encoded(data: JSON) -> bytes:
    """Return plain data as JSON; lone surrogates of model text become escapes."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(data).encode()


def _escaped(value: str) -> str:
    """Return a text as it appears inside JSON."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether any reader can read the JSON of a value; values that no parser made are not bounded."""
    if isinstance(value, int):
        return value.bit_length() <= MAX_INT_BITS
    if isinstance(value, Mapping):
        return depth < _DEEPEST and all(_is_plain(item, depth + 1) for item in cast("Any", value).values())
    if isinstance(value, list | tuple):
        return depth < _DEEPEST and all(_is_plain(item, depth + 1) for item in cast("Any", value))
    return True


def plain(value: Any, depth: int = 0) -> JSON:
    """Convert a value to JSON that any reader can read: without NaN, very long integers and deep nesting.

    Args:
        value: Any value; objects that JSON does not know become text.
        depth: Depth of the value in the record.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_INT_BITS else f"[an integer of {value.bit_length()} bits]"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= _DEEPEST:
        return "[nested too deeply]"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): plain(item, depth + 1) for name, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in cast("Iterable[Any]", value)]
    return str(value)


class _Remover:
    """Replaces some texts, also escaped as inside JSON, in other texts; the longest are replaced first.

    Args:
        texts: Texts to remove.

    Attributes:
        count: Number of replaced places so far.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        forms = {
            form
            for text in texts
            if text not in REDACTED
            for form in (text, json.dumps(text)[1:-1], _escaped(text))
        }
        self._forms = sorted(forms, key=len, reverse=True)
        self.count = 0

    def __call__(self, text: str) -> str:
        pieces = [text]
        for form in self._forms:
            pieces = [
                part for one in pieces for part in (_split(one, form) if len(one) >= len(form) else (one,))
            ]
        self.count += len(pieces) - 1
        return REDACTED.join(pieces)


def _split(text: str, separator: str) -> list[str]:
    """Split a text as `str.split` does, in slices, so that other threads run in between."""
    if len(text) <= _SLICE:
        return text.split(separator)
    pieces: list[str] = []
    begin = start = 0
    while start < len(text):
        found = text.find(separator, start, start + _SLICE + len(separator))
        if found < 0:
            start += _SLICE
        else:
            pieces.append(text[begin:found])
            begin = start = found + len(separator)
    return [*pieces, text[begin:]]


class _Redaction:
    """Removes the secrets of one record, and counts them.

    Args:
        secrets: Finds secret names.
        known: Values that are removed from all text.

    Attributes:
        count: Number of removed values so far.
    """

    def __init__(self, secrets: Secrets, known: Sequence[str]) -> None:
        self._secrets, self._known = secrets, known
        self.count = 0

    def of(self, data: dict[str, JSON], record: TrajectoryRecord) -> dict[str, JSON]:
        """Return the fields of a record without secrets.

        Args:
            data: The fields; changed.
            record: The record that they were made of.
        """
        for written, turn in zip(data["turns"], record.turns, strict=True):
            self._blank_calls(written, turn)
        remove = _Remover(self._known)
        tokens = data["tokens"]
        kept = {name: data[name] for name in ("statuses", "tools")}  # their keys are statuses and tools
        whole = self._clean({**data, **dict.fromkeys((*kept, "tokens", "input", "output"))}, remove)
        prompt: list[Message] = []
        later: list[Message] = []
        for number, turn in enumerate(whole["turns"]):
            (later if number else prompt).extend(map(_message, turn.get("context", ())))
            later += map(_message, (turn["message"], *turn.get("messages", ())))
        text = plain_text(prompt)
        # The short text may end inside of a secret.
        origin = {**whole["origin"], "question": question_in(text)}
        if tokens is not None:  # ids may spell a known value, texts any
            tokens = None if self._known else cast("JSON", {**tokens, "texts": []})
        written: dict[str, JSON] = {
            "input": text,
            "output": plain_text(later),
            "origin": origin,
            "tokens": tokens,
        }
        return {**whole, **kept, **written, "redactions": data["redactions"] + self.count + remove.count}

    def _blank_calls(self, written: dict[str, JSON], turn: Turn) -> None:
        """Remove the values of secret names from the calls of a turn, and from the text of the calls."""
        calls, message = written["outcome"].get("calls", ()), written["message"]
        content, declared = message["content"], set[str]()
        whole: dict[str, None] = {}  # texts of secret names in calls whose place in the message is unknown
        places: list[tuple[int, int, dict[str, None]]] = []
        for shown, call in zip(calls, turn.outcome.calls, strict=True):
            names = turn.secret_args.get(call.tool, ())
            texts = dict[str, None]()
            if self._secrets.found_in(call.args, texts, names):
                shown["args"] = self._clean(shown["args"], None, names)
                declared.update(names)
                if call.span is None:
                    whole.update(texts)
                elif texts:
                    places.append((*call.span, texts))
        sent = message.get("tool_calls", ())
        if isinstance(content, str) and not sent:
            said = self._in_places(content, places)
            message["content"] = self._without(self._clean_json(said, declared), whole) if whole else said
        elif not isinstance(content, str):
            message["content"] = self._clean(content, None, declared)
        for one in sent:
            function = cast("dict[str, JSON] | None", fields_of(one.get("function")))
            if function is not None and isinstance(function.get("arguments"), str):
                function["arguments"] = self._clean_json(function["arguments"], declared)
        message.update({"tool_calls": self._clean(sent, None, declared)} if sent else {})
        if self._known or message["content"] != content:
            for shown in calls:
                shown.pop("span", None)

    def _in_places(self, text: str, places: list[tuple[int, int, dict[str, None]]]) -> str:
        """Remove from each place, given by its start and end, its texts."""
        pieces: list[str] = []
        done = 0
        for start, end, texts in sorted(places, key=lambda place: place[:2]):
            if start >= done:
                pieces += (text[done:start], self._without(text[start:end], texts))
                done = end
        return "".join((*pieces, text[done:]))

    def _without(self, text: str, texts: dict[str, None]) -> str:
        """Remove some texts, or the whole text if they are too many to search for each."""
        if len(texts) > _MOST_TEXTS:
            return self._blank(text)
        remove = _Remover(texts)
        text = remove(text)
        self.count += remove.count
        return text

    def _clean_json(self, text: str, declared: Container[str]) -> str:
        """Remove the values of secret names from a text if it is JSON."""
        try:
            value = read_json(text)
        except ValueError:
            return text
        count = self.count
        value = self._clean(value, None, declared)
        return text if self.count == count else json.dumps(value, ensure_ascii=False)

    def _blank(self, value: JSON) -> JSON:
        self.count += value != REDACTED
        return REDACTED

    def _clean(self, value: JSON, remove: _Remover | None, declared: Container[str] = ()) -> JSON:
        """Remove the values of secret names, and what `remove` finds in texts."""
        if isinstance(value, str):
            return value if remove is None or value == REDACTED else remove(value)
        if isinstance(value, dict):
            return {
                name: self._blank(item)
                if name in declared or self._secrets.is_secret(name)
                else self._clean(item, remove, declared)
                for name, item in cast("dict[str, Any]", value).items()
            }
        if isinstance(value, list):
            return [self._clean(item, remove, declared) for item in cast("list[Any]", value)]
        return value


def _message(written: Mapping[str, JSON]) -> Message:
    return Message(written["role"], written["content"])
