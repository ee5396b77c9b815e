"""What the model asks for, made safe: method, headers, body; and what becomes of it at a redirect."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.schema import shorten
from torchrl_agentic.tools.web.policy import Target

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing on the server."""

OURS = frozenset(
    {
        "accept-encoding", "connection", "content-encoding", "content-length", "expect", "forwarded", "host",
        "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "via", "x-real-ip",
    }
)  # fmt: skip
"""Headers that frame the message, or say who is asking: never the model's."""
OURS_BY_PREFIX = ("proxy-", "x-forwarded-", "sec-")
ONLY_IF_NAMED = frozenset({"cookie", "cookie2", "metadata", "metadata-flavor"})
"""Headers that open other people's sessions, or the metadata of a cloud."""
HARMLESS = frozenset(
    {
        "accept", "accept-language", "content-language", "content-type", "if-modified-since", "if-none-match",
        "range", "user-agent",
    }
)  # fmt: skip
"""Headers that may follow a redirect to another site; any other one may be a secret."""

MAX_HEADERS = 50
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. headers: with names in lower case."""

    method: str
    target: Target
    headers: Mapping[str, str]
    content: bytes | None = None


def checked_headers(value: JSON, allowed: Collection[str] | None) -> dict[str, str]:
    """Give the model's headers, names in lower case.

    allowed: the only ones, None for any but those that are ours.

    Raises:
        ToolError: one of them is not the model's to set, or is no header.
    """
    fields = fields_of(value)
    if fields is None or len(fields) > MAX_HEADERS:
        raise ToolError(f"'headers' takes an object of at most {MAX_HEADERS} names and their texts")
    headers: dict[str, str] = {}
    for name, text in fields.items():
        lower = name.lower()
        shown = ascii(shorten(name))
        if not _TOKEN.fullmatch(name):
            raise ToolError(f"{shown} is no name of a header; letters, digits and hyphens are, e.g. Accept")
        if lower in OURS or lower.startswith(OURS_BY_PREFIX):
            raise ToolError(f"header {shown} is set by the tool; leave it out")
        if (lower not in allowed) if allowed is not None else lower in ONLY_IF_NAMED:
            hint = f"; allowed: {', '.join(sorted(allowed)) or 'none'}" if allowed is not None else ""
            raise ToolError(f"header {shown} is not allowed{hint}")
        if not isinstance(text, str) or not _VALUE.fullmatch(text):
            raise ToolError(
                f"the value of header {shown} must be one line of plain ASCII text, at most 4096 characters"
            )
        headers[lower] = text.strip()
    return headers


def checked_body(args: Mapping[str, JSON], method: str) -> tuple[bytes | None, str | None]:
    """Give the body and the media type that it brings along.

    Raises:
        ToolError: there are two, or the method takes none.
    """
    body, data = args.get("body"), args.get("json")
    if body is None and data is None:
        return None, None
    if body is not None and data is not None:
        raise ToolError("give either 'body' or 'json', not both")
    if method in READING:
        raise ToolError(f"a {method} request has no body; put what you want to say into the URL")
    if data is None:
        return str(body).encode("utf-8", "replace"), "text/plain; charset=utf-8"
    try:
        return json.dumps(data).encode(), "application/json"
    except (TypeError, ValueError, RecursionError):
        raise ToolError("'json' is nested too deep, or is no JSON") from None


def redirected(ask: Ask, status: int, target: Target) -> Ask:
    """Give the request that follows a redirect, as browsers do: POST becomes GET, but for 307 and 308.

    Headers that may be secrets are dropped where it leads to another origin, and so is the body: whoever
    redirects could have it sent to anyone in our name.

    Raises:
        ToolError: it leads from https to http, or would send a body elsewhere.
    """
    if ask.target.url.scheme == "https" and target.url.scheme == "http":
        raise ToolError("it leads from https to http, where anyone could read and change what is sent")
    same = ask.target.origin == target.origin
    headers = ask.headers if same else {name: ask.headers[name] for name in ask.headers if name in HARMLESS}
    if (status == 303 and ask.method != "HEAD") or (status in (301, 302) and ask.method == "POST"):
        headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
        return Ask("GET", target, headers)
    if ask.content is not None and not same:
        raise ToolError("it wants the body sent to another site; ask that site yourself if that is meant")
    return replace(ask, target=target, headers=headers)
