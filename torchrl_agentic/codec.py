"""JSON of frozen dataclasses: the one form in which records, cassettes and saved states hold their values.

pydantic converts by the annotations of the fields; a field that has its default is left out. `json_fields`
annotates fields with a form of their own. pydantic is imported by the first conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

_NAMES = {"reasoning": "reasoning_content"}
"""Names in JSON that other programs know, by the names of the fields."""
_MOST_ERRORS = 3


@functools.cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a list of dataclasses; an adapter of one would take no configuration."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(
        cast("Any", list)[kind],
        config=ConfigDict(
            alias_generator=lambda name: _NAMES.get(name, name),
            serialize_by_alias=True,
            ser_json_inf_nan="strings",
            ser_json_bytes="base64",
        ),
    )


def to_json(value: object, *, exclude: Any = None) -> dict[str, Any]:
    """Convert a dataclass to JSON; fields with their default are left out.

    Args:
        value: The value. What a field of any type holds is copied as it is.
        exclude: Fields to leave out, as pydantic takes them.

    Raises:
        ValueError: If a value contains itself.
    """
    return list_to_json(type(value), (value,), exclude=exclude)[0]


def list_to_json(kind: type, values: Sequence[Any], *, exclude: Any = None) -> list[dict[str, Any]]:
    """Convert dataclasses of one kind to JSON, as `to_json` does.

    Args:
        kind: The dataclass.
        values: The values.
        exclude: Fields of each to leave out, as pydantic takes them.
    """
    everywhere = None if exclude is None else {"__all__": exclude}
    return adapter(kind).dump_python(list(values), exclude_defaults=True, exclude=everywhere, warnings=False)


def from_json(kind: type[T], data: Any) -> T:
    """Read a value that `to_json` wrote; unknown fields are ignored.

    Args:
        kind: The dataclass.
        data: The parsed JSON.

    Raises:
        ValueError: If a field is missing or has another type; the message names the first ones.
    """
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_python([data])[0]
    except ValidationError as error:
        raise ValueError(_reasons(error)) from None


def _reasons(error: Any) -> str:
    """Return the first errors of a value on one line, each with the path of its field."""
    found = [
        f"{'.'.join(map(str, one['loc'][1:])) or 'the value'}: {one['msg'][:1].lower()}{one['msg'][1:]}"
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = f"; and {len(found) - _MOST_ERRORS} more" if len(found) > _MOST_ERRORS else ""
    return "; ".join(found[:_MOST_ERRORS]) + more


def line_from_json(kind: type[T], data: Any, version: int) -> T:
    """Read a line of a file, an object with "schema_version" and the fields of a dataclass.

    Args:
        kind: The dataclass.
        data: The parsed JSON.
        version: The version that this package reads.

    Raises:
        ValueError: If it is no object, another version wrote it, or a field is missing or has another type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a line must be a JSON object; got {type(data).__name__}")
    found: Any = data.get("schema_version")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if found != version:
        raise ValueError(f"the line has version {found!r:.40}; this package reads version {version}")
    return from_json(kind, data)


def json_schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a dataclass, which is in its "$defs" by name."""
    import docstring_parser
    from pydantic.json_schema import GenerateJsonSchema

    class Schema(GenerateJsonSchema):
        def float_schema(self, schema: Any) -> dict[str, Any]:
            """Describe a number; those that JSON lacks are texts."""
            return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}

        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            """Describe the fields by the docstring of the class."""
            made = super().dataclass_schema(schema)
            described = docstring_parser.parse(schema["cls"].__doc__)
            made["description"] = described.short_description
            for field in described.params:
                name = _NAMES.get(field.arg_name, field.arg_name)
                if name in made["properties"]:
                    made["properties"][name]["description"] = field.description
            return made

    return adapter(kind).json_schema(schema_generator=Schema)
