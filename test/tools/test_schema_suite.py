"""The JSON-Schema-Test-Suite: the shown and the checked schema accept the right values."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from torchrl_agentic.tools.schema import SchemaValidationError, Validator
from torchrl_agentic.tools.schema_simplify import simplify_schema

SUITE = Path(__file__).parents[1] / "data" / "json_schema_test_suite"
DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
NEEDS_NETWORK = "refers to a document of the suite's own web server, or to a meta-schema there"
EXCLUDED = {
    ("refRemote.json", None): NEEDS_NETWORK,
    ("vocabulary.json", None): NEEDS_NETWORK,
    ("optional/cross-draft.json", None): NEEDS_NETWORK,
    ("optional/format-assertion.json", None): NEEDS_NETWORK,
    ("dynamicRef.json", "strict-tree schema, guards against misspelled properties"): NEEDS_NETWORK,
    ("dynamicRef.json", "tests for implementation dynamic anchor and reference link"): NEEDS_NETWORK,
    ("dynamicRef.json", "$ref and $dynamicAnchor are independent of order - $defs first"): NEEDS_NETWORK,
    ("dynamicRef.json", "$ref and $dynamicAnchor are independent of order - $ref first"): NEEDS_NETWORK,
    ("dynamicRef.json", "$ref to $dynamicRef finds detached $dynamicAnchor"): NEEDS_NETWORK,
}
"""Groups that no validator without a network can compile: (file, group, or None for any), and why."""


def _groups() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for draft in DIALECTS:
        files = json.loads(gzip.decompress((SUITE / f"{draft}.json.gz").read_bytes()))
        for file, groups in files.items():
            for group in groups:
                yield draft, file, group


def _fetch(uri: str) -> Any:
    raise ValueError(f"no network for {uri}")


def _compiled(schema: Any) -> jsonschema_rs.Validator | None:
    try:
        return jsonschema_rs.validator_for(schema, retriever=_fetch)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
        return None


def _passes(check: Any, args: Mapping[str, Any]) -> bool:
    try:
        check(args)
    except SchemaValidationError:
        return False
    return True


def _validators(schema: Any, dialect: str) -> tuple[Validator | None, Validator]:
    """Make a check of arguments with a schema, None if it is not that of an object, and one of `{"x": …}`."""
    inner = {"$id": "urn:example:inner", **schema} if isinstance(schema, dict) else schema
    wrapped = Validator({"$schema": dialect, "type": "object", "properties": {"x": inner}})
    try:
        return Validator(schema) if isinstance(schema, dict) else None, wrapped
    except ValueError as error:
        assert "input schema of type 'object'" in str(error), (schema, error)
        return None, wrapped


def test_shown_and_checked_schemas_agree_with_the_test_suite():
    """Values that are not objects, or whose schema is not that of an object, are checked as an argument."""
    wrong: list[tuple[str, ...]] = []
    excluded: set[tuple[str, str | None]] = set()
    for draft, file, group in _groups():
        title, schema = group["description"], group["schema"]
        is_boolean = not isinstance(schema, dict)
        if not is_boolean:
            schema = {"$schema": DIALECTS[draft], **schema}
        if _compiled(schema) is None:
            excluded.add((file, None) if (file, None) in EXCLUDED else (file, title))
            with pytest.raises(ValueError, match=r"JSON Schema|input schema of type"):
                Validator(schema)
            continue
        shown = _compiled(schema if is_boolean else simplify_schema(schema))
        direct, wrapped = _validators(schema, DIALECTS[draft])
        for case in group["tests"]:
            data, valid, name = case["data"], case["valid"], (draft, file, title, case["description"])
            if shown is None or shown.is_valid(data) is not valid:
                wrong.append((*name, "shown"))
            is_direct = direct is not None and isinstance(data, dict)
            validator, args = (direct, data) if is_direct else (wrapped, {"x": data})
            if _passes(validator.check, args) is not valid or _passes(validator.accept, args) is not valid:
                wrong.append((*name, "checked"))
    assert wrong == []
    assert excluded == EXCLUDED.keys()
