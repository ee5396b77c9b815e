"""The schema that a user has written for a tool is corrected, and parts that mislead models are refused."""

import copy
from typing import Any

import pytest

from torchrl_agentic.tools.options import OptionError
from torchrl_agentic.tools.verl.stated_schema import checked_parameters


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_the_schema_itself_stays_as_it_is():
    schema = _object(names={"type": "array", "item": {"type": "string"}, "enum": None})
    before = copy.deepcopy(schema)
    corrected, remarks = checked_parameters(schema)
    assert schema == before
    assert corrected == _object(names={"type": "array", "items": {"type": "string"}})
    assert remarks == [
        (("properties", "names", "item"), "'item' is not a JSON Schema keyword; it is read as 'items'")
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
    with pytest.raises(OptionError) as raised:
        checked_parameters(schema)
    assert raised.value.steps == path
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        _object(x={"type": "integer", "nullable": True, "enum": [1, None]}, y={"type": ["string", "null"]}),
        {**_object(x={}), "required": ["y"], "additionalProperties": {"type": "string"}},
        _object(x={"x-order": 1, "madeUpKeyword": 2, "default": None}),
        {},
    ],
)
def test_a_valid_schema_stays_the_same_without_remarks(schema: dict[str, Any]):
    assert checked_parameters(schema) == (schema, [])
