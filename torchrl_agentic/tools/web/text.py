"""From the bytes of a body to what the model reads: what kind it is, its charset, JSON set out in lines."""

from __future__ import annotations

import codecs
import json
import re

from torchrl_agentic.messages import image_type
from torchrl_agentic.nesting import read_json

MAX_IMAGE_BYTES = 1 << 19

SNIFFED = 1024
"""How many bytes are looked at to tell text from other data, and for the charset of a page."""

_TEXT_TYPES = re.compile(
    r"text/.+|application/(?:.+\+)?(?:json|xml|yaml|x-yaml|toml|javascript|ecmascript|graphql|sql|rtf"
    r"|x-www-form-urlencoded|x-ndjson|ndjson|jsonl|jsonlines|json-seq|xhtml|x-sh|x-tex|x-httpd-php)|image/svg\+xml"
)
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,60}/[a-z0-9][a-z0-9!#$&^_.+-]{0,60}")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_OBEYED = "\x1b\x9b\b\0\x0e\x0f"
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# They read escapes, or take quadratic time, or hide ASCII in what looks like other text.
_REFUSED_CODECS = frozenset(
    {
        "idna",
        "punycode",
        "unicode_escape",
        "raw_unicode_escape",
        "unicode-escape",
        "raw-unicode-escape",
        "utf-7",
    }
)


def media_type(content_type: str) -> str:
    """Give the media type of a Content-Type; empty where it names none."""
    found = content_type.partition(";")[0].strip().lower()
    return found if _MEDIA_TYPE.fullmatch(found) else ""


def is_json(kind: str) -> bool:
    """Whether a media type says that a body is JSON."""
    return kind == "application/json" or kind.endswith("+json") or kind == "text/json"


def is_html(kind: str) -> bool:
    """Whether a media type says that a body is a page."""
    return kind in ("text/html", "application/xhtml+xml")


def is_image(kind: str, body: bytes | bytearray) -> bool:
    """Whether a body is an image, by its media type and its first bytes, small enough to be handed on."""
    return image_type(body) == kind and len(body) <= MAX_IMAGE_BYTES


def text_of(body: bytes | bytearray, content_type: str, *, whole: bool) -> str | None:
    """Decode a body; None if it is no text, by its media type or by what it holds.

    whole: a character cut off at the end is then a fault, and shown as one.
    """
    kind = media_type(content_type)
    if kind and not _TEXT_TYPES.fullmatch(kind):
        return None
    name = _charset(body, content_type, is_html(kind))
    if b"\0" in body[:SNIFFED] and not (name or "").startswith(("utf-16", "utf-32")):
        return None
    text = _decoded(body, name or "utf-8", "strict" if name is None else "replace", whole)
    if text is None:  # what browsers take for bytes that are no UTF-8 and say nothing else
        text = _decoded(body, "cp1252", "replace", whole) or ""
    return text


def without_controls(text: str) -> str:
    """Drop control characters where a terminal that shows the text would obey one of them."""
    if not any(mark in text for mark in _OBEYED):  # much faster than to drop none
        return text
    kept = text.replace("\x9b", "").encode("utf-8", "replace")
    return kept.translate(None, _CONTROLS).decode()


def pretty_json(text: str, limit: int) -> str:
    """Set JSON out in lines, if it is JSON and that fits; otherwise as it came."""
    if len(text) > limit:
        return text
    try:
        data = read_json(text)
        shown, size = list[str](), 0
        # Step by step: the lines of a deep nest are mostly indentation, and grow with its square.
        for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(data):
            shown.append(piece)
            size += len(piece)
            if size > limit:
                return text
    except (ValueError, RecursionError):
        return text
    return "".join(shown)


def _charset(body: bytes | bytearray, content_type: str, page: bool) -> str | None:
    """Give the name of the charset that a body says it has, if Python has it and it is harmless."""
    for mark, name in _MARKS:
        if body.startswith(mark):
            return name
    found = _CHARSET.search(content_type)
    said = found.group(1) if found else None
    if said is None and page and (meta := _META_CHARSET.search(body[:SNIFFED])):
        said = meta.group(1).decode("ascii")
    if said is None:
        return None
    try:
        codec = codecs.lookup(said)
    except LookupError:
        return None
    return None if not codec._is_text_encoding or codec.name in _REFUSED_CODECS else codec.name


def _decoded(body: bytes | bytearray, name: str, errors: str, whole: bool) -> str | None:
    try:
        return codecs.getincrementaldecoder(name)(errors).decode(bytes(body), whole)
    except (UnicodeError, LookupError, TypeError):
        return None
