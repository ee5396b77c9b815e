"""Write records as lines of valid JSON without secrets."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pydantic_core

from torchrl_agentic.messages import JSON, Turn
from torchrl_agentic.records.record import TrajectoryRecord, question_in
from torchrl_agentic.records.record_json import fields_to_json, record_to_json, turns_to_bytes
from torchrl_agentic.text import MAX_INT_BITS

SECRET_NAMES = (
    "password", "passwd", "passphrase", "secret", "client_secret", "api_key", "access_key", "secret_key",
    "private_key", "token", "access_token", "auth_token", "refresh_token", "bearer_token", "authorization",
    "cookie", "credentials",
)  # fmt: skip
"""Names of arguments, and endings of names of environment variables, whose values are not written."""
REDACTED = "[redacted]"
_SHORTEST = 6  # a shorter value occurs in many unrelated texts
_DEEPEST = 100
_MOST_KNOWN = 10_000


class Secrets:
    """Finds the values that must not be written: arguments by name, and values of environment variables.

    Names are compared without case, "-" and "_". A value of 6 characters or more is also removed from other
    text, such as the message with the call and the result of the tool.

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

    def found_in(self, value: JSON, found: set[str], depth: int = 0) -> bool:
        """Return whether a JSON value has a secret name.

        Args:
            value: The value.
            found: Set that the texts of secret names are added to.
            depth: Depth of the value in the record.
        """
        if depth >= _DEEPEST:
            return False  # values at this depth are not written
        if isinstance(value, Mapping):
            here = False
            for name, item in cast("Mapping[Any, Any]", value).items():
                if isinstance(name, str) and self.is_secret(name):
                    here = True
                    _add_texts(item, found)
                elif isinstance(item, Mapping | list) and self.found_in(item, found, depth + 1):
                    here = True
            return here
        if isinstance(value, list):
            hits = [
                self.found_in(item, found, depth + 1) for item in cast("list[Any]", value)
            ]  # no early exit
            return any(hits)
        return False

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


def _add_texts(value: JSON, found: set[str]) -> None:
    if isinstance(value, str):
        if len(value) >= _SHORTEST:
            found.add(value)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            _add_texts(item, found)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            _add_texts(item, found)


def json_line(record: TrajectoryRecord, secrets: Secrets, variables: frozenset[str]) -> bytes:
    """Return a trajectory as one line of JSON, its newline included.

    Args:
        record: The trajectory.
        secrets: Finds secret names.
        variables: Secret values of environment variables, from `Secrets.variables`.
    """
    found = set[str]()
    named = [secrets.found_in(call.args, found) for _, call, _ in record.calls]
    named.append(secrets.found_in(record.extras, found))
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
    if any(named) or printed:
        encoded = _encoded(_without(json.loads(encoded), secrets, _pattern(found | printed)))
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


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches secret texts, also escaped as inside JSON; the longest come first."""
    forms = set[str]()
    for text in texts:
        forms.update((text, json.dumps(text)[1:-1], _escaped(text)))
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _without(data: dict[str, JSON], secrets: Secrets, pattern: re.Pattern[str] | None) -> dict[str, JSON]:
    """Remove secrets. Tokens, which may spell them, and spans, which no longer fit, are removed too."""

    def clean(value: JSON) -> JSON:
        if isinstance(value, str):
            return value if pattern is None else pattern.sub(REDACTED, value)
        if isinstance(value, dict):
            return {
                name: REDACTED if secrets.is_secret(name) else clean(item)
                for name, item in cast("dict[str, Any]", value).items()
            }
        if isinstance(value, list):
            return [clean(item) for item in cast("list[Any]", value)]
        return value

    for turn in data["turns"]:
        for call in turn["outcome"].get("calls", ()):
            call.pop("span", None)
    whole = clean({**data, "tokens": None})
    whole["origin"]["question"] = question_in(whole["input"])  # the short text may end inside of a secret
    return {
        **whole,
        **{name: data[name] for name in ("statuses", "tools")},
    }  # their keys are statuses and tools
