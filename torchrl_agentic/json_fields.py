"""Annotations of fields of frozen dataclasses that have a form of their own in JSON; see `codec`."""

from __future__ import annotations

import base64
from typing import Any

from pydantic_core import core_schema


class AsBase64:
    """Annotation of bytes that are base64 in JSON."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, bytes) else base64.b64decode(value, validate=True),
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda data: base64.b64encode(data).decode()
            ),
        )


class AsText:
    """Annotation of an enum that is a plain text in JSON, which `pydantic_core.to_json` writes faster."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        schema = handler(source)
        schema["serialization"] = core_schema.to_string_ser_schema(when_used="always")
        return schema


class AsTuple:
    """Annotation of a sequence that is a list in JSON, and is read as a tuple."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        written = core_schema.wrap_serializer_function_ser_schema(lambda items, inner: list(inner(items)))
        return core_schema.no_info_after_validator_function(tuple, handler(source), serialization=written)


class AsFinite:
    """Annotation of a number that is finite."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.float_schema(allow_inf_nan=False)


class AsMicroseconds:
    """Annotation of a finite time in seconds, which JSON has to the microsecond."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> core_schema.CoreSchema:
        rounded = core_schema.plain_serializer_function_ser_schema(lambda seconds: round(seconds, 6))
        return core_schema.float_schema(allow_inf_nan=False, serialization=rounded)
