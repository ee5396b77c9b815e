"""Convert values that a format writes without quotes to the types of the tool's schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.json_text import decode_any, fits
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.tools.schema_simplify import TYPES, meant_types

_NO_STRINGS = frozenset(("null", "integer", "number", "boolean", "object", "array"))
_WORDS: dict[str, JSON] = {"true": True, "false": False, "none": None, "null": None}
_MAX_REFERENCES = 16


def property_schema(schema: Fields | None, key: str) -> Fields | None:
    """Return the schema of one argument, or None if it is not described.

    Args:
        schema: Schema of the tool's input.
        key: Name of the argument.
    """
    return None if schema is None else _property(schema, key, schema, set())


def _property(schema: Fields, key: str, root: Fields, seen: set[int], depth: int = 0) -> Fields | None:
    if id(schema) in seen:  # references may be cyclic
        return None
    seen.add(id(schema))
    found = (fields_of(schema.get("properties")) or {}).get(key)
    branches = schema.get("allOf")
    if found is None and isinstance(branches, list) and depth < _MAX_REFERENCES:
        for branch in cast("list[JSON]", branches):
            fields = _resolved(fields_of(branch), root)
            inner = None if fields is None else _property(fields, key, root, seen, depth + 1)
            if inner is not None:
                return inner
    if found is None:
        found = schema.get("additionalProperties")
    return _resolved(fields_of(found), root)


def inner_schema(schema: Fields | None, key: str | int, root: Fields | None) -> Fields | None:
    """Return the schema of a value inside of another value, or None if it is not described.

    Args:
        schema: Schema of the outer value.
        key: Name of a field, or index of a list item.
        root: Schema that references are relative to.
    """
    for branch in _branches(schema, root or {}):
        found = _property(branch, key, root or {}, set()) if isinstance(key, str) else _item(branch, key)
        if found is not None:
            return _resolved(found, root or {})
    return None


def _branches(schema: Fields | None, root: Fields) -> Iterable[Fields]:
    """Yield a schema and all its alternatives, each once."""
    seen, left = set[int](), [schema]
    while left:
        found = _resolved(left.pop(), root)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        for key in ("allOf", "oneOf", "anyOf"):
            branches = found.get(key)
            if isinstance(branches, list):
                left += [fields_of(branch) for branch in reversed(cast("list[JSON]", branches))]


def _item(schema: Fields, index: int) -> Fields | None:
    first = schema.get("prefixItems")
    if isinstance(first, list) and index < len(cast("list[JSON]", first)):
        return fields_of(cast("list[JSON]", first)[index])
    return fields_of(schema.get("items"))


def _resolved(schema: Fields | None, root: Fields) -> Fields | None:
    for _ in range(_MAX_REFERENCES):
        reference = None if schema is None else schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: JSON = root
        for step in reference[2:].split("/"):
            found = (fields_of(found) or {}).get(step)
        schema = fields_of(found)
    return None


def types_of(schema: Fields | None, root: Fields | None) -> tuple[frozenset[str] | None, bool]:
    """Return the JSON types that a schema allows, and whether it names one as another language does.

    Args:
        schema: Schema of one argument; None if it is unknown.
        root: Schema that its references are relative to.

    Returns:
        The types, or None if the schema names none, and whether one of the names is not from JSON Schema.
    """
    names = _types(schema, root, set())
    if names is None or names.issubset(TYPES):
        return names, False
    meant = {name: meant_types(name) for name in names}
    is_odd = any(name != kind for name, kind in meant.items())
    return None if None in meant.values() else frozenset(map(str, meant.values())), is_odd


def _types(
    schema: Fields | None, root: Fields | None, seen: set[int], depth: int = 0
) -> frozenset[str] | None:
    if schema is None or depth > _MAX_REFERENCES:
        return None
    if id(schema) in seen:  # a cycle; its types are collected elsewhere
        return frozenset()
    seen.add(id(schema))
    found = _declared_types(schema, root, seen, depth)
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _declared_types(schema: Fields, root: Fields | None, seen: set[int], depth: int) -> frozenset[str] | None:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(item for item in cast("list[JSON]", kind) if isinstance(item, str))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            found = [_resolved(fields_of(branch), root or {}) for branch in cast("list[JSON]", branches)]
            known = [_types(branch, root, seen, depth + 1) for branch in found]
            if all(types is not None for types in known):
                return frozenset[str]().union(*(types for types in known if types is not None))
            return None
    values = schema.get("enum")
    if isinstance(values, list):
        return _types_of_values(cast("list[JSON]", values))
    return _types_of_values([schema["const"]]) if "const" in schema else None


def _types_of_values(values: Iterable[JSON]) -> frozenset[str]:
    return frozenset(kind for value in values for kind in kinds_of(value)[:1])


def kinds_of(value: JSON) -> Sequence[str]:
    """Return the JSON types of a value, the narrowest first."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    if isinstance(value, float):
        return ("integer", "number") if value.is_integer() else ("number",)
    if isinstance(value, str):
        return ("string",)
    return ("object",) if isinstance(value, dict) else ("array",)


def json_or_text(text: str, limits: Limits) -> JSON:
    """Return the JSON value of a text, or the text itself if it is not JSON.

    Args:
        text: The text.
        limits: Bounds on size and depth.
    """
    try:
        return decode_any(text, limits)
    except CallParseError:
        return text


def typed_value(text: str, types: frozenset[str] | None, limits: Limits) -> tuple[JSON, bool]:
    """Return the value of a text, given the allowed JSON types.

    If only strings are allowed, the text is returned unchanged. Otherwise JSON of an allowed type counts, or
    a Python literal if no string is allowed, since templates write `True` and `None`. Any other text stays
    text, so that validation reports the error.

    Args:
        text: Text that the model wrote.
        types: The allowed types; None if they are unknown, in which case JSON counts, else the text.
        limits: Bounds on size and depth.

    Returns:
        The value, and whether it was read as a Python literal.
    """
    if types is not None and types.isdisjoint(_NO_STRINGS):
        return text, False
    value = json_or_text(text, limits)
    if types is None:
        return (text if isinstance(value, str) else value), False
    if not isinstance(value, str) and not types.isdisjoint(kinds_of(value)):
        # "007" and " 5" may be strings; the first is not valid JSON.
        return (value if "string" not in types or text == text.strip() else text), False
    if "string" not in types:
        literal = _python_literal(text, limits)
        if literal is not None and not types.isdisjoint(kinds_of(literal[0])):
            return literal[0], True
    return text, False


def _python_literal(text: str, limits: Limits) -> tuple[JSON] | None:
    """Return the Python word (in any case), list or dict of a text in a tuple; None for other texts."""
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return (_WORDS[stripped.lower()],)
    if not stripped.startswith(("[", "{", "(")) or not fits(text, 0, len(text), limits):
        return None
    reader = LiteralReader(stripped, limits)
    try:
        value, end = reader.value(0)
    except CallParseError:
        return None
    is_whole = end == len(stripped) and isinstance(value, dict | list)
    return (cast("JSON", value),) if is_whole else None


def only_string(schema: Fields | None) -> str | None:
    """Return the name of a tool's only argument if it is a string, else None."""
    properties = fields_of((schema or {}).get("properties")) or {}
    required = (schema or {}).get("required")
    names = list(properties)
    if len(names) > 1 and isinstance(required, list) and len(cast("list[JSON]", required)) == 1:
        names = cast("list[str]", required)
    if len(names) != 1:
        return None
    types, _ = types_of(property_schema(schema, names[0]), schema)
    return names[0] if types == frozenset(("string",)) else None
