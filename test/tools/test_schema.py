"""Schemas are exact; checks name what to mend; nothing that a model writes makes a check fall over."""

import dataclasses
import enum
import functools
import json
import socket
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema_rs
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from torchrl_agentic.text import count_values
from torchrl_agentic.tools.schema import (
    SchemaValidationError,
    Validator,
    json_schema_from_pydantic,
    schema_of,
    validate_args,
)
from torchrl_agentic.tools.schema_simplify import MAX_DEPTH, MAX_INLINED, MAX_NODES, simplify_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Box:
    width: int
    name: str = "box"


class Place(TypedDict):
    city: str
    zip: int


class Leaf(pydantic.BaseModel):
    size: int


class Branch(pydantic.BaseModel):
    leaf: Leaf
    leaves: list[Leaf] = []


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


LEAF = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (int, INT),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list[int], {"type": "array", "items": INT}),
        (list[list[str]], {"type": "array", "items": {"type": "array", "items": STR}}),
        (dict[str, int], {"type": "object", "additionalProperties": INT}),
        (Optional[int], {"anyOf": [INT, NULL]}),  # noqa: UP045  the old way of writing it
        (int | None, {"anyOf": [INT, NULL]}),
        (Union[int, str], {"anyOf": [INT, STR]}),  # noqa: UP007  the old way of writing it
        (list[int | None], {"type": "array", "items": {"anyOf": [INT, NULL]}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (
            Box,
            {
                "type": "object",
                "properties": {"width": INT, "name": {"type": "string", "default": "box"}},
                "required": ["width"],
            },
        ),
        (Place, {"type": "object", "properties": {"city": STR, "zip": INT}, "required": ["city", "zip"]}),
        (Leaf, LEAF),
        (
            Branch,
            {
                "type": "object",
                "properties": {"leaf": LEAF, "leaves": {"type": "array", "items": LEAF, "default": []}},
                "required": ["leaf"],
            },
        ),
        (Annotated[int, pydantic.Field(ge=0)], {"type": "integer", "minimum": 0}),
    ],
)
def test_a_parameter_has_exactly_this_schema(hint: Any, schema: dict[str, Any]):
    def function(x): ...

    function.__annotations__ = {"x": hint}
    assert schema_of(function).input_schema == {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
    }


def test_a_recursive_model_keeps_its_definition():
    """And the reference in it leads somewhere: a nested mistake is found."""

    def grow(tree: Tree) -> None: ...

    schema = schema_of(grow).input_schema
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    good = {"tree": {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}}
    validator = Validator(schema)
    validator.check(good)
    good["tree"]["children"][0]["children"][0]["value"] = "three"
    with pytest.raises(SchemaValidationError, match=r"tree.children\[0\].children\[0\].value"):
        validator.check(good)


def test_schema_has_defaults_and_descriptions():
    no_json = object()

    def search(query: str, limit: int = 5, mode: Colour = Colour.RED, sentinel: Any = no_json) -> str:
        """Search the web.

        It looks far and wide.

        Args:
            query: What to look for.
            limit: How many,
                at most.
        """
        return query

    found = schema_of(search)
    assert found.name == "search"
    assert found.description == "Search the web.\n\nIt looks far and wide."
    assert found.input_schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer", "default": 5, "description": "How many,\nat most."},
            "mode": {"type": "string", "enum": ["red", "blue"], "default": "red"},
            "sentinel": {},
        },
        "required": ["query"],
    }


def test_arguments_become_python_values():
    def function(box: Box, colour: Colour, leaf: Leaf) -> None: ...

    made = schema_of(function).arguments({"box": {"width": 2}, "colour": "blue", "leaf": {"size": 3}})
    assert made == {"box": Box(2), "colour": Colour.BLUE, "leaf": Leaf(size=3)}


def _star(*numbers: int): ...
def _kw(**numbers: int): ...
def _positional(number: int, /): ...
def _bare(number): ...
def _unresolved(number: "NoSuchName"): ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (_star, "numbers"),
        (_kw, "numbers"),
        (_positional, "number"),
        (_bare, "number"),
        (_unresolved, "NoSuchName"),
    ],
)
def test_a_signature_that_calls_cannot_fill_names_function_and_parameter(function: Any, parameter: str):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*{parameter}"):
        schema_of(function)


def test_a_parameter_without_a_schema_is_named():
    def function(loop: type[int] | memoryview): ...

    with pytest.raises(TypeError, match=r"function\(\): parameter 'loop'"):
        schema_of(function)


def test_a_builtin_without_signature_is_a_type_error():
    """`schema_of` raises TypeError with the name of a function that has no usable signature."""
    with pytest.raises(TypeError, match="max"):
        schema_of(max)


def test_a_partial_of_a_typed_function_has_its_schema():
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    assert schema_of(functools.partial(add, b=3)).input_schema["properties"]["a"] == INT


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "args", "words"),
    [
        (NUMBER, {"a": True}, ["a", "true", "integer"]),
        (NUMBER, {"a": "x"}, ["a", '"x"', "integer"]),
        (NUMBER, {"a": 1.5}, ["a", "1.5", "integer"]),
        (NUMBER, {}, ["a", "required"]),
        (
            {"properties": {"l": {"type": "array", "items": {"type": "object", "properties": {"k": STR}}}}},
            {"l": [{}, {"k": 3}]},
            ["l[1].k", "3", "string"],
        ),
        ({"properties": {"o": {"anyOf": [INT, NULL]}}}, {"o": "x"}, ["o", '"x"', "integer", "null"]),
        ({"properties": {"c": {"enum": ["red", "blue"]}}}, {"c": "green"}, ["c", "green", "red", "blue"]),
        ({"properties": {"n": {"type": "integer", "minimum": 0}}}, {"n": -1}, ["n", "-1", "0"]),
    ],
)
def test_validation_error_has_path_value_and_expectation(schema, args, words):
    with pytest.raises(SchemaValidationError) as caught:
        validate_args(args, schema)
    for word in words:
        assert word in str(caught.value)


def test_at_most_three_validation_errors_are_listed():
    schema = {"properties": dict.fromkeys("abcde", INT)}
    with pytest.raises(SchemaValidationError, match="and 2 more"):
        validate_args(dict.fromkeys("abcde", "x"), schema)


def test_null_keywords_of_chat_apis_are_dropped():
    """`"enum": null` is what API servers send for no enum; JSON Schema has no such keyword value."""
    schema = {"type": "object", "properties": {"code": {"type": "string", "enum": None}}}
    assert simplify_schema(schema)["properties"]["code"] == {"type": "string"}
    Validator(schema).check({"code": "x"})


def test_a_null_default_and_a_property_called_title_survive():
    schema = {
        "title": "T",
        "properties": {"title": {"title": "X", "type": "string"}, "x": {"default": None}, "enum": STR},
    }
    assert simplify_schema(schema) == {"properties": {"title": STR, "x": {"default": None}, "enum": STR}}


A = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
B = {"properties": {"b": INT}, "required": ["b"]}


def test_keywords_next_to_a_reference_apply_with_its_definition():
    validator = Validator({"type": "object", "$defs": {"A": A}, "$ref": "#/$defs/A", **B})
    assert validator.accept({"a": 1, "b": 2}) == ({"a": 1, "b": 2}, ())
    for args in ({"b": 2}, {"a": 1}, {"a": "x", "b": 2}):
        with pytest.raises(SchemaValidationError):
            validator.check(args)
    limits = {"Limit": {"type": "integer", "minimum": 10}}
    tight = {"$defs": limits, "properties": {"n": {"$ref": "#/$defs/Limit", "minimum": 5}}}
    assert simplify_schema(tight) == {"properties": {"n": {"minimum": 5, "allOf": [limits["Limit"]]}}}


def test_annotations_next_to_a_reference_replace_those_of_its_definition():
    named = {
        "$defs": {"S": {**STR, "description": "any"}},
        "items": {"$ref": "#/$defs/S", "description": "one"},
    }
    assert simplify_schema(named) == {"items": {**STR, "description": "one"}}


@pytest.mark.parametrize(
    ("pointer", "where"),
    [
        ("#/definitions/S", {"definitions": {"S": STR}}),
        ("#/$defs/A/properties/x", {"$defs": {"A": {"properties": {"x": STR}}}}),
        ("#/$defs/List%5Bint%5D", {"$defs": {"List[int]": STR}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": STR}}),
        ("#/properties/p/$defs/S", {"properties": {"p": {"$defs": {"S": STR}}}}),
    ],
)
def test_a_reference_into_the_schema_is_replaced_by_its_definition(pointer: str, where: dict[str, Any]):
    """Chat templates follow none."""
    schema = {"type": "object", **where, "patternProperties": {"x": {"$ref": pointer}}}
    assert simplify_schema(schema)["patternProperties"] == {"x": STR}
    assert "$defs" not in str(simplify_schema(schema))
    assert "definitions" not in simplify_schema(schema)
    with pytest.raises(SchemaValidationError):
        validate_args({"x": 1}, schema)


@pytest.mark.parametrize(
    ("reference", "definition"),
    [
        ({"$ref": "#s"}, {"$anchor": "s", **STR}),
        ({"$ref": "urn:example:s"}, {"$id": "urn:example:s", **STR}),
        ({"$dynamicRef": "#s"}, {"$dynamicAnchor": "s", **STR}),
    ],
)
def test_a_reference_that_only_a_validator_can_follow_keeps_its_definition(reference, definition):
    schema = {"type": "object", "properties": {"x": reference}, "$defs": {"s": definition, "other": INT}}
    assert simplify_schema(schema) == schema
    validate_args({"x": "s"}, schema)
    with pytest.raises(SchemaValidationError):
        validate_args({"x": 1}, schema)


def test_a_property_or_a_dependency_may_be_called_like_a_keyword():
    schema = {
        "type": "object",
        "properties": {"$ref": STR, "$defs": STR, "title": STR},
        "dependentSchemas": {"$defs": {"required": ["title"]}},
    }
    assert simplify_schema(schema) == schema


def test_unknown_keywords_are_kept():
    schema = {"x-unit": {"title": "m", "y": None}, "items": {"enum": [{"title": "t"}, None]}}
    assert simplify_schema(schema) == schema


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Pack(pydantic.BaseModel):
    kind: Literal["pack"]
    inner: "list[Annotated[Dog | Pack, pydantic.Field(discriminator='kind')]]"


@pytest.mark.parametrize("union", [Cat | Dog, Cat | Pack])
def test_the_discriminator_of_a_union_does_not_point_to_definitions_that_are_inlined(union: Any):
    def feed(pet: Annotated[union, pydantic.Field(discriminator="kind")]):
        """Feed."""

    schema = schema_of(feed).input_schema
    assert schema["properties"]["pet"]["discriminator"] == {"propertyName": "kind"}
    assert "mapping" not in json.dumps(schema)


def test_pointers_of_other_keywords_go_with_the_definitions():
    schema = {
        "definitions": {"A": STR},
        "x-of": "#/definitions/A",
        "x-all": [{"at": "#/definitions/A"}, "#/properties/a"],
        "default": {"a": "#/definitions/A"},
        "properties": {"a": {"$ref": "#/definitions/A", "x-see": {"also": ["#/definitions/A"]}}},
    }
    kept = {key: schema[key] for key in ("default",)}
    assert simplify_schema(schema) == {**kept, "x-all": ["#/properties/a"], "properties": {"a": STR}}
    anchored = {**schema, "items": {"$anchor": "b", "type": "string"}, "contains": {"$ref": "#b"}}
    assert simplify_schema(anchored)["x-of"] == "#/definitions/A"
    assert simplify_schema(anchored)["definitions"] == {"A": STR}


def test_only_recursive_definitions_are_kept():
    schema = {
        "$defs": {
            "T": {"items": {"$ref": "#/$defs/T"}, "contains": {"$ref": "#/$defs/S"}},
            "S": STR,
            "U": INT,
        },
        "properties": {"t": {"$ref": "#/$defs/T"}, "u": {"$ref": "#/$defs/U"}},
    }
    tree = {"items": {"$ref": "#/$defs/T"}, "contains": STR}
    assert simplify_schema(schema) == {"properties": {"t": tree, "u": INT}, "$defs": {"T": tree}}


def test_definitions_that_refer_to_each_other_are_not_multiplied():
    """Twenty definitions, each with all of them as properties."""
    names = [f"d{number}" for number in range(20)]
    each = {"properties": {name: {"$ref": f"#/$defs/{name}"} for name in names}}
    schema = {"$defs": dict.fromkeys(names, each), "items": {"$ref": "#/$defs/d0"}}
    assert len(json.dumps(simplify_schema(schema))) < 1.2 * len(json.dumps(schema))


def test_a_schema_that_would_grow_without_bound_keeps_references_and_meaning():
    """Each of thirty definitions has the next one twice: 2**30 copies."""
    defs: dict[str, Any] = {
        f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}} for n in range(30)
    }
    schema = {"type": "object", "$defs": {**defs, "d30": STR}, "$ref": "#/$defs/d0"}
    assert str(simplify_schema(schema)).count("properties") < 2 * MAX_INLINED
    args: Any = 3
    for _ in range(30):
        args = {"b": args}
    with pytest.raises(SchemaValidationError, match="string"):
        Validator(schema).check(args)


def test_a_long_chain_of_references_is_followed():
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}
    schema = {"type": "object", "$defs": {**defs, "d3000": STR}, "properties": {"x": {"$ref": "#/$defs/d0"}}}
    with pytest.raises(SchemaValidationError, match="string"):
        Validator(schema).check({"x": 1})


def test_a_definition_that_is_only_itself_is_kept():
    schema = {
        "type": "object",
        "$defs": {"A": {"$ref": "#/$defs/A"}},
        "properties": {"a": {"$ref": "#/$defs/A"}},
    }
    assert simplify_schema(schema) == schema


@pytest.mark.parametrize("levels", [MAX_DEPTH, 100_000])
def test_a_schema_that_is_nested_too_deep_is_a_value_error(levels: int):
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    for check in (simplify_schema, Validator, lambda deep: validate_args({}, deep)):
        with pytest.raises(ValueError, match="nested"):
            check({"items": schema})


def test_a_schema_that_is_nested_as_deep_as_allowed_is_one():
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"not": schema}
    assert simplify_schema(schema) == schema
    Validator(schema).check({})


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_a_schema_whose_references_multiply_is_refused(keyword: str):
    """2 kB, for which a validator would look at the same value four million times."""
    defs: dict[str, Any] = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(22)}
    schema = {"type": "object", "$defs": {**defs, "d22": STR}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    assert len(json.dumps(schema)) < 2048
    assert len(json.dumps(simplify_schema(schema))) < 40 * MAX_INLINED
    with pytest.raises(ValueError, match="more than 100000 times"):
        Validator(schema)


def test_a_schema_whose_anchors_multiply_is_refused():
    defs: dict[str, Any] = {
        f"d{n}": {"$anchor": f"a{n}", "anyOf": [{"$ref": f"#a{n + 1}"}] * 2} for n in range(22)
    }
    schema = {"$defs": {**defs, "d22": {"$anchor": "a22", **STR}}, "properties": {"a": {"$ref": "#a0"}}}
    with pytest.raises(ValueError, match="more than 100000 times"):
        Validator(schema)


def test_a_schema_of_too_many_subschemas_or_values_is_refused():
    with pytest.raises(ValueError, match="subschemas"):
        simplify_schema({"properties": {f"a{n}": {} for n in range(MAX_NODES + 1)}})
    many: list[Any] = []
    for _ in range(30):
        many = [many, many]
    with pytest.raises(ValueError, match="values"):
        simplify_schema({"enum": many})


@given(data=st.data(), count=st.integers(1, 40))
def test_schemas_of_any_references_are_tidied_checked_or_refused_at_once(data: st.DataObject, count: int):
    """Without bounds, most of these are exponential in the number of their definitions."""
    reference = st.integers(0, count - 1).map(lambda n: {"$ref": f"#/$defs/{n}"})
    node = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["array", "object", "string"]),
            "items": reference,
            "properties": st.fixed_dictionaries({}, optional=dict.fromkeys("ab", reference)),
            **dict.fromkeys(("anyOf", "oneOf", "allOf"), st.lists(reference, min_size=1, max_size=4)),
        },
    )
    nodes = data.draw(st.lists(node, min_size=count, max_size=count))
    schema = {"$defs": {str(n): made for n, made in enumerate(nodes)}, "properties": {"a": nodes[0]}}
    assert count_values(simplify_schema(schema)) < 4 * count_values(schema) + 40 * MAX_INLINED
    try:
        validator = Validator(schema)
    except ValueError:
        return
    value: Any = 3
    for kind in data.draw(st.lists(st.sampled_from("[ab"), max_size=150)):
        value = [value] if kind == "[" else {kind: value}
    try:
        validator.check({"a": value})
    except SchemaValidationError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("kind", ["anyOf", "oneOf"])
def test_alternatives_that_recur_do_not_multiply_mistakes(kind: str):
    """A mistake 150 levels down, with two errors for each on the way: 2**150."""
    node = {kind: [{"type": "array", "items": {"$ref": "#/$defs/N"}}] * 2}
    schema = {"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": node}}
    value: Any = 3
    for _ in range(150):
        value = [value]
    with pytest.raises(SchemaValidationError, match=r"a: .* fits none of .*; there may be more"):
        Validator(schema).check({"a": value})


ITEMS = {"properties": {"a": {"items": INT}}}
EITHER = {"properties": {"a": {"items": {"anyOf": [INT, {"type": "boolean"}]}}}}
LISTS = {"properties": {"a": {"anyOf": [{"anyOf": [{"items": INT}] * 3}] * 3}}}


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        (ITEMS, ["x"] * 5, "a[0]: \"x\" is not of type"),
        (ITEMS, ["x"] * 200_000, "the arguments hold more than 100000 values; pass fewer"),
        (ITEMS, ["x"] * 90_000, "a[0]: \"x\" is not of type \"integer\"; there may be more"),
        (ITEMS, [*range(90_000), "x"], "a[90000]: \"x\" is not of type \"integer\"; there may be more"),
        (EITHER, [*range(60_000), "x"], "a[60000]: \"x\" is not of type \"integer\"; or "),
        (LISTS, ["x"] * 60_000, "a: ['x', 'x', 'x'"),
        (ITEMS, _nested(300), "the arguments are nested more than 200 levels deep; make it flatter"),
    ],
    ids=["few", "too many", "all wrong", "last wrong", "alternatives", "nested alternatives", "deep"],
)  # fmt: skip
def test_first_of_many_validation_errors_is_shown(schema: dict[str, Any], value: Any, said: str):
    """Looking for all of 60,000 took eight seconds and 333 MiB."""
    with pytest.raises(SchemaValidationError) as caught:
        Validator(schema).check({"a": value})
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 1000


BLOCKS = (
    "paragraph",
    "heading",
    "list_item",
    "to_do",
    "toggle",
    "quote",
    "callout",
    "code",
    "image",
    "table",
)


def _pages(levels: int, union: str = "anyOf") -> dict[str, Any]:
    """A schema of pages as APIs of note-taking services have them: blocks of blocks of rich text."""
    texts: list[Any] = [
        _object(kind, {kind: {"type": "object", "properties": {"content": STR}}})
        for kind in ("text", "mention", "equation")
    ]
    defs: dict[str, Any] = {"rich": {union: texts}}
    for level in range(levels + 1):
        inner: dict[str, Any] = {"rich_text": {"type": "array", "items": {"$ref": "#/$defs/rich"}}}
        if level:
            inner["children"] = {"type": "array", "items": {"$ref": f"#/$defs/block{level - 1}"}}
        body = {"type": "object", "properties": inner}
        defs[f"block{level}"] = {
            union: [_object(kind, {kind: body}) for kind in (*BLOCKS, *map(str.upper, BLOCKS))]
        }
    blocks = {"type": "array", "items": {"$ref": f"#/$defs/block{levels}"}}
    return {"type": "object", "properties": {"children": blocks}, "$defs": defs}


def _object(kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": kind}, **properties}, "required": ["type"]}


def _block(level: int, content: Any = "text") -> dict[str, Any]:
    body: dict[str, Any] = {"rich_text": [{"type": "text", "text": {"content": content}}]}
    if level:
        body["children"] = [_block(level - 1)] * 7 + [_block(level - 1, content)]
    return {"type": "quote", "quote": body}


@pytest.mark.parametrize("union", ["anyOf", "oneOf"])
@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_nested_blocks_are_validated_and_their_errors_shown(levels: int, union: str):
    """A validator that looks at all alternatives would look at a value 20 times more at each level."""
    validator = Validator(_pages(levels, union))
    validator.check({"children": [_block(min(levels, 2))] * 20})
    with pytest.raises(SchemaValidationError, match=r'text\.content: 5 is not of type "string"'):
        validator.check({"children": [*[_block(0)] * 3, _block(min(levels, 2), 5)]})
    with pytest.raises(SchemaValidationError, match=r'^children\[1\]\.type: "quota" is not one of "para'):
        validator.check({"children": [_block(0), {**_block(0), "type": "quota"}]})


def test_large_call_shows_the_alternatives_of_one_value():
    kinds = [{"type": "array", "items": {"type": kind}, "maxItems": 9} for kind in ("integer", "boolean")]
    schema = {"properties": {"a": {"type": "array", "items": {"anyOf": [*kinds, {"type": "null"}]}}}}
    with pytest.raises(
        SchemaValidationError, match=r'^a\[700\]\[0\]: "x" is not of type "integer"; there may'
    ):
        Validator(schema).check({"a": [*[[1, 2]] * 700, ["x"]]})


def test_alternatives_that_overlap_still_multiply():
    """None has the property for certain, or all have the same."""
    for required in ([], ["type"]):
        defs: dict[str, Any] = {
            f"d{n}": {
                "anyOf": [{**_object("a", {"v": {"$ref": f"#/$defs/d{n + 1}"}}), "required": required}] * 3
            }
            for n in range(13)
        }
        with pytest.raises(ValueError, match="more than 100000 times"):
            Validator({"$defs": {**defs, "d13": STR}, "properties": {"a": {"$ref": "#/$defs/d0"}}})


KINDS = st.sampled_from(["a", "b", "c"])


@given(
    kinds=st.lists(KINDS, min_size=2, max_size=4),
    options=st.lists(st.sampled_from(["ref", "loose", "enum", "untyped", ""]), min_size=4, max_size=4),
    union=st.sampled_from(["anyOf", "oneOf"]),
    others=st.lists(st.sampled_from([{"type": "null"}, {"type": "object"}, True]), max_size=2),
    beside=st.sampled_from([{}, {"unevaluatedProperties": False}, {"not": {"minProperties": 2}}]),
    draft=st.sampled_from(["", "draft-07", "draft-06"]),
    value=st.one_of(
        st.none(),
        st.just([1]),
        st.dictionaries(st.sampled_from(["type", "x", "y"]), st.one_of(KINDS, st.just(1))),
    ),
)  # fmt: skip
def test_discriminated_alternatives_accept_the_same_values(
    kinds, options, union, others, beside, draft, value
):
    branches: list[Any] = []
    defs: dict[str, Any] = {}
    for index, (kind, option) in enumerate(zip(kinds, options, strict=False)):
        branch = _object(kind, {"x": STR if index % 2 else INT})
        if option == "loose":
            del branch["required"]
        elif option == "untyped":
            del branch["type"]
        elif option == "enum":
            branch["properties"]["type"] = {"enum": [kind, f"{kind}{kind}"]}
        elif option == "ref":
            defs[str(index)] = branch
            branch = {"$ref": f"#/$defs/{index}"}
        branches.append(branch)
    schema: dict[str, Any] = {
        "$defs": defs,
        "properties": {"a": {union: [*branches, *others], **beside}},
        **({"$schema": f"http://json-schema.org/{draft}/schema#"} if draft else {}),
    }
    expected = jsonschema_rs.validator_for(schema).is_valid({"a": value})
    if expected:
        Validator(schema).check({"a": value})
    else:
        with pytest.raises(SchemaValidationError):
            Validator(schema).check({"a": value})


def test_many_arguments_that_are_right_are_accepted():
    Validator(ITEMS).check({"a": list(range(99_000))})
    Validator(EITHER).check({"a": [True] * 99_000})


_references = st.sampled_from(["#/$defs/0", "#/$defs/1", "#/definitions/2", "#/$defs/0/properties/a", "#"])
_leaves = st.sampled_from(
    [{"type": "integer"}, {"type": "object"}, {"minimum": 2}, {"required": ["a"]}, True]
)
_schemas = st.recursive(
    _leaves,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "integer", ["object", "integer"]]),
            "properties": st.fixed_dictionaries({}, optional=dict.fromkeys("ab", st.builds(
                lambda schema, ref: {**(schema if isinstance(schema, dict) else {}), "$ref": ref},
                inner, _references) | inner)),
            "required": st.sampled_from([["a"], ["b"]]),
            "additionalProperties": inner,
            "unevaluatedProperties": st.booleans(),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "minProperties": st.integers(0, 2),
            "description": st.just("text"),
        },
    ),
    max_leaves=6,
)  # fmt: skip
_values = st.recursive(
    st.integers(1, 3) | st.just("s"), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


@given(
    root=_schemas.filter(lambda schema: isinstance(schema, dict)),
    definitions=st.tuples(_schemas, _schemas, _schemas),
    draft=st.sampled_from([{}, {"$schema": "http://json-schema.org/draft-07/schema#"}]),
    values=st.lists(_values, max_size=5),
)
def test_a_tidied_schema_accepts_the_same_values(root, definitions, draft, values):
    first, second, third = definitions
    schema = {**draft, **root, "$defs": {"0": first, "1": second}, "definitions": {"2": third}}
    try:
        whole = jsonschema_rs.validator_for(schema)
    except (jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError):  # there is no such property
        return
    shown = jsonschema_rs.validator_for(simplify_schema(schema))
    for value in values:
        assert shown.is_valid(value) is whole.is_valid(value)


def test_undeclared_arguments_are_dropped_with_a_note():
    args, notes = Validator(NUMBER).accept({"a": 1, "executes": "True"})
    assert args == {"a": 1}
    assert len(notes) == 1
    assert "executes" in notes[0]


@pytest.mark.parametrize(
    "keywords",
    [
        {"$defs": {"B": B}, "$ref": "#/$defs/B"},
        {"$defs": {"B": {"$anchor": "b", **B}}, "$ref": "#b"},
        {"allOf": [B]},
        {"anyOf": [B]},
        {"if": {"required": ["a"]}, "then": B},
        {"dependentSchemas": {"a": B}},
        {"dependentRequired": {"b": ["a"]}},
        {"patternProperties": {"^b$": INT}},
        {"propertyNames": {"enum": ["a", "b"]}},
        {"minProperties": 2},
        {"required": ["b"]},
        {"additionalProperties": True},
        {"unevaluatedProperties": INT},
        {"x-unknown": True},
    ],
    ids=lambda keywords: next(reversed(keywords)),
)
def test_arguments_that_another_keyword_may_declare_are_kept(keywords: dict[str, Any]):
    validator = Validator({"type": "object", "properties": {"a": INT}, **keywords})
    assert validator.accept({"a": 1, "b": 2}) == ({"a": 1, "b": 2}, ())


@pytest.mark.parametrize("value", [False, {"type": "string"}])
def test_additional_properties_rule_where_they_are_given(value: Any):
    validator = Validator({**NUMBER, "additionalProperties": value})
    with pytest.raises(SchemaValidationError):
        validator.accept({"a": 1, "b": 2})


def test_arguments_of_a_tool_may_be_an_object_or_something_else():
    """They are an object always."""
    assert Validator({**NUMBER, "type": ["object", "null"]}).accept({"a": 1}) == ({"a": 1}, ())
    with pytest.raises(ValueError, match="input schema of type 'object'"):
        Validator({"type": ["array", "null"]})


@pytest.mark.parametrize(
    "value",
    ["\ud800", float("nan"), float("inf"), 10**5000, _nested(100_000), _nested(300), {"\ud800": 1}, object()],
    ids=["surrogate", "nan", "inf", "huge", "deep", "rather deep", "surrogate key", "no JSON"],
)
@pytest.mark.parametrize("kind", [{"type": "integer"}, {}, {"type": "string", "maxLength": 3}, {"enum": [1]}])
def test_odd_values_are_accepted_or_refused_but_nothing_else(value: Any, kind: dict[str, Any]):
    validator = Validator({"type": "object", "properties": {"a": kind}})
    try:
        args, notes = validator.accept({"a": value})
    except SchemaValidationError as error:
        assert len(str(error)) < 1000
    else:
        assert args.keys() == {"a"}
        assert notes == ()


def test_odd_values_in_typed_functions_are_accepted_or_refused_but_nothing_else():
    def function(a: int = 0, b: list[str] | None = None, c: str = "", d: Tree | None = None) -> None: ...

    schema = schema_of(function)
    for value in ("\ud800", float("nan"), 10**5000, _nested(100_000), {"value": 1}):
        for name in "abcd":
            try:
                schema.arguments({name: value})
            except SchemaValidationError as error:
                assert len(str(error)) < 1000


@given(st.integers() | st.booleans() | st.floats() | st.text() | st.none())
def test_only_whole_numbers_are_integers(value: Any):
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    whole = whole and (isinstance(value, int) or value.is_integer())
    try:
        validate_args({"a": value}, NUMBER)
    except SchemaValidationError:
        assert not whole
    else:
        assert whole


@pytest.mark.parametrize(
    "schema", [{"type": "array"}, {"type": "objekt"}, {"properties": 3}, {"required": "a"}]
)
def test_schema_of_another_type_than_object_is_a_value_error(schema: dict[str, Any]):
    with pytest.raises(ValueError, match="schema"):
        Validator(schema)


def test_missing_schema_disables_the_check():
    validate_args({"a": object()}, None)
    validate_args({"a": object()}, {})


def test_a_pydantic_model_gives_its_schema_in_place():
    assert json_schema_from_pydantic(Branch)["properties"]["leaf"] == LEAF
    for value in (Leaf(size=1), int, "Leaf", None):
        with pytest.raises(TypeError, match="BaseModel"):
            json_schema_from_pydantic(value)


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_schema_that_refers_elsewhere_is_refused_and_nothing_is_fetched(scheme, tmp_path):
    """A server's schema would have us ask for any address, and read any file."""
    (tmp_path / "schema.json").write_text('{"type": "string"}')
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        addresses = {
            "http": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json",
            "file": (tmp_path / "schema.json").as_uri(),
        }
        with pytest.raises(ValueError, match="put the definition into the schema itself"):
            Validator({"type": "object", "properties": {"a": {"$ref": addresses[scheme]}}})
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": ["string", "null"], "nullable": True}, ["x", None]),
        ({"type": "string", "enum": ["x", None], "nullable": True}, ["x", None]),
        ({"const": 3, "nullable": True}, [3, None]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}], "nullable": True}, [1, True, None]),
        ({"allOf": [{"type": "integer"}], "nullable": True}, [1, None]),
        ({"type": "array", "items": {"type": "integer", "nullable": True}}, [[1, None]]),
    ],
)
def test_nullable_schema_additionally_accepts_null(schema, values):
    whole = {"type": "object", "properties": {"a": schema}, "dependentSchemas": {"enum": {}}}
    for value in values:
        validate_args({"a": value}, whole)
    with pytest.raises(SchemaValidationError):
        validate_args({"a": {"other": 1}}, whole)


def test_nullable_is_read_below_names_that_are_keywords():
    schema = {"dependentSchemas": {"enum": {"properties": {"y": {"type": "string", "nullable": True}}}}}
    validate_args({"enum": 1, "y": None}, {"type": "object", **schema})
