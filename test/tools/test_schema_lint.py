"""`lint` corrects the schema of a tool and finds parts that mislead models."""

import copy
from typing import Any

import pytest

from torchrl_agentic.tools.schema_lint import Finding, lint


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_the_schema_itself_stays_as_it_is():
    schema = _object(names={"type": "array", "item": {"type": "string"}, "enum": None})
    before = copy.deepcopy(schema)
    corrected, findings = lint(schema)
    assert schema == before
    assert corrected == _object(names={"type": "array", "items": {"type": "string"}})
    assert findings == [
        Finding(
            ("properties", "names", "item"),
            "'item' is not a JSON Schema keyword; it is read as 'items'",
            is_error=False,
        )
    ]


@pytest.mark.parametrize(
    ("schema", "path", "message"),
    [
        (_object(x={"type": "str"}), ("properties", "x", "type"), "did you mean 'string'?"),
        (_object(type={"type": "string", "enum": [1]}), ("properties", "type", "enum"), "not of type string"),
        (_object(type="string"), ("properties", "type"), "expected a schema"),
        (_object(x={"anyOf": [{"typ": "string"}]}), ("properties", "x", "anyOf", "0", "typ"), "'type'?"),
        ({**_object(x={}), "required": ["y"]}, ("required",), "no property 'y' to require"),
        (_object(x={"minimum": "a"}), ("properties", "x", "minimum"), "number"),
        ({"type": "string"}, (), "input schema of type 'object'"),
    ],
)
def test_a_mistake_is_found_at_its_path(schema: dict[str, Any], path: tuple[str, ...], message: str):
    (finding,) = lint(schema)[1]
    assert finding.is_error
    assert finding.path == path
    assert message in finding.message


@pytest.mark.parametrize(
    "schema",
    [
        _object(x={"type": "integer", "nullable": True, "enum": [1, None]}, y={"type": ["string", "null"]}),
        {**_object(x={}), "required": ["y"], "additionalProperties": {"type": "string"}},
        _object(x={"x-order": 1, "madeUpKeyword": 2, "default": None}),
        {},
    ],
)
def test_a_valid_schema_has_no_findings_and_stays_the_same(schema: dict[str, Any]):
    assert lint(schema) == (schema, [])
