"""JSON Schemas from signatures and pydantic models, and `Validator`, which checks arguments against one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, cast

import docstring_parser
import jsonschema_rs
import pydantic
from annotated_types import BaseMetadata, GroupedMetadata
from pydantic.fields import FieldInfo

from torchrl_agentic.errors import SchemaValidationError
from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.text import TooDeepError, TooManyValuesError, are_scalars, count_values, shorten
from torchrl_agentic.tools.schema_cost import MAX_EVALUATIONS, CaseFinder, cost_of
from torchrl_agentic.tools.schema_simplify import (
    ANNOTATIONS,
    BY_NAME,
    DEFINITIONS,
    ONE_OR_MANY,
    Schema,
    simplify_schema,
)

MAX_REPORTED = 3
"""Number of mistakes in one error message; a model corrects the first ones first."""
MAX_CONVERTED = 20
"""Number of mistakes in the message about values that fit the schema, but cannot be converted."""
MAX_VALUES = 100_000
"""Most values in the arguments of one call."""
MAX_WORK = 10_000_000
"""Most evaluations in one check, values times evaluations of each; an evaluation takes about 30 ns."""
MAX_ERRORS = 1_000
"""Most possible errors for which all are collected; an error takes about 30 µs."""
_MOST_ALTERNATIVES = 100  # that are searched for a secret in the schema of one argument
_DECLARING = frozenset((
    "type", "properties", "required", "$schema", "$id", "strict", *DEFINITIONS, *ANNOTATIONS,
))  # fmt: skip
"""Keywords of a schema whose "properties" and "required" name all its properties."""


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    """Schema of a function's signature, which also converts JSON arguments to Python values.

    Attributes:
        name: Name of the function.
        description: Description in the docstring, without its sections.
        input_schema: JSON Schema of the parameters that the model sees.
        adapters: A pydantic adapter for each of these parameters, by name.
        hidden: Annotations of the parameters that the model does not see, by name; the caller fills them.
        defaults: The `Field`s that have to fill in the default of a parameter, by its name.
    """

    name: str
    description: str
    input_schema: dict[str, JSON]
    adapters: Mapping[str, pydantic.TypeAdapter[Any]]
    hidden: Mapping[str, Any]
    defaults: Mapping[str, FieldInfo]

    def arguments(self, args: Mapping[str, JSON]) -> dict[str, Any]:
        """Convert JSON arguments to the annotated types: dataclasses, enums, models, dates.

        Args:
            args: Arguments of a call.

        Raises:
            SchemaValidationError: If a value does not fit its annotation.
        """
        try:
            return {name: self.adapters[name].validate_python(value) for name, value in args.items()}
        except pydantic.ValidationError:
            raise SchemaValidationError(_reported(self._mistakes(args), MAX_CONVERTED)) from None
        except KeyError as error:
            if args.keys() <= self.adapters.keys():
                raise
            raise SchemaValidationError(f"unknown argument {error.args[0]!r}") from None

    def _mistakes(self, args: Mapping[str, JSON]) -> list[str]:
        found: list[str] = []
        for name, value in args.items():
            try:
                self.adapters[name].validate_python(value)
            except pydantic.ValidationError as error:
                found += _pydantic_mistakes(error, [name])
        return found


def refusal_of(error: pydantic.ValidationError, args: Mapping[str, JSON]) -> SchemaValidationError | None:
    """Return the mistakes in a call's arguments that a tool found with a pydantic model of its own.

    Args:
        error: What the tool raised.
        args: Arguments of the call.

    Returns:
        The mistakes, or None if the values that the model refused are not these arguments, or one of them.
    """
    for start, values in (((), args), *(((name,), value) for name, value in args.items())):
        if all(_is_found(values, mistake) for mistake in error.errors(include_url=False)):
            return SchemaValidationError(_reported(_pydantic_mistakes(error, start), MAX_CONVERTED))
    return None


def _is_found(values: JSON, mistake: Any) -> bool:
    """Return whether a value holds what pydantic refused, at the place that pydantic names."""
    for step in mistake["loc"]:  # a step may also name an alternative, or a property that is missing
        if isinstance(values, Mapping) and step in values:
            values = cast("Schema", values)[step]
        elif isinstance(values, list) and isinstance(step, int) and step < len(cast("list[JSON]", values)):
            values = cast("list[JSON]", values)[step]
    return type(cast(object, values)) is type(mistake["input"]) and values == mistake["input"]


def _pydantic_mistakes(error: pydantic.ValidationError, start: Sequence[str | int]) -> list[str]:
    return [
        f"{_placed([*start, *each['loc']], each['msg'])} (got {shorten(each['input'])})"
        for each in error.errors(include_url=False)
    ]


def _reported(mistakes: Sequence[str], most: int = MAX_REPORTED) -> str:
    more = f"; and {len(mistakes) - most} more" if len(mistakes) > most else ""
    return "; ".join(mistakes[:most]) + more


def schema_of(
    function: Callable[..., Any], *, hide: Callable[[Any], bool] = lambda _: False
) -> FunctionSchema:
    """Return name, description and schema of a function with type hints and a docstring in Google style.

    Args:
        function: The function.
        hide: Returns True for the annotation of a parameter that the model must not see.

    Raises:
        TypeError: If a parameter has no annotation, is `*args`, `**kwargs` or positional-only, or if its
            annotation has no JSON Schema. The message names the function and the parameter.
    """
    inner = _inner(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    try:
        signature = inspect.signature(function)
        hints = _hints(function)
    except ValueError:
        raise TypeError(
            f"{name}() has no readable signature; wrap it in a function with type hints"
        ) from None
    except NameError as error:
        raise TypeError(f"{name}(): cannot resolve its annotations: {error}") from None
    doc = docstring_parser.parse(inspect.getdoc(inner) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    described = {param.arg_name: param.description for param in doc.params}

    required: list[str] = []
    adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
    hidden: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        hint = _hint(name, parameter, hints)
        if hide(hint):
            hidden[parameter.name] = hint
            continue
        adapters[parameter.name] = _adapter(name, parameter.name, hint)
        if is_required(parameter, hint):
            required.append(parameter.name)
    schemas, shared = pydantic.TypeAdapter.json_schemas(
        [(key, "validation", it) for key, it in adapters.items()]
    )
    texts = {key: _text_of(hints[key]) or described.get(key) for key in adapters}
    properties = {
        key: {**of, **_extras(signature.parameters[key], adapters[key], texts[key], of)}
        for (key, _), of in schemas.items()
    }
    schema = {"type": "object", "properties": properties, "required": required, **shared}
    description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
    defaults = _defaults_of(signature.parameters, hints)
    return FunctionSchema(name, description, simplify_schema(schema), adapters, hidden, defaults)


def hidden_of(function: Any, hide: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the parameters that the model must not see, with their annotations; empty if unreadable.

    Args:
        function: Any callable.
        hide: Returns True for the annotation of a parameter that the model must not see.
    """
    try:
        hints, names = _hints(function), inspect.signature(function).parameters
    except (ValueError, TypeError, NameError):
        return {}
    return {name: hint for name, hint in hints.items() if name in names and hide(hint)}


def _inner(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function


def _hints(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's parameters, each with the `Field` that is its default, if any.

    Those of an object's `__signature__` count where they differ from those of its `__call__`.
    """
    inner = _inner(function)
    routine = inner if inspect.isroutine(inner) else type(inner).__call__
    hints = typing.get_type_hints(routine, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        stated = parameter.annotation
        if stated is not parameter.empty and (name not in hints or not isinstance(stated, str)):
            space = getattr(inspect.unwrap(inner), "__globals__", None)
            one = types.SimpleNamespace(__annotations__={name: stated})
            hints.update(typing.get_type_hints(one, space, include_extras=True))
        default = parameter.default
        if isinstance(default, FieldInfo) and name in hints:
            hints[name] = Annotated[hints[name], default]
        where = f"{getattr(inner, '__name__', type(inner).__name__)}(): parameter {name!r}"
        if not isinstance(default, FieldInfo) and _is_metadata(default):
            raise TypeError(
                f"{where}: its default is {shorten(repr(default), 60)}, which describes a parameter; "
                f"write it into the annotation: {name}: Annotated[…, {type(default).__name__}(…)]"
            )
        for field in _fields_of(hints.get(name)):
            if field.alias or field.validation_alias:
                raise TypeError(f"{where} has an alias; rename it instead: models pass it by its name")
            if field.default_factory_takes_validated_data:
                raise TypeError(f"{where}: its default_factory takes other arguments, which are not known")
    return hints


_METADATA = frozenset((
    "typing", "dataclasses", "annotated_types", "pydantic.fields", "pydantic.aliases",
    "pydantic.json_schema", "pydantic.functional_validators", "pydantic.functional_serializers",
    "torchrl_agentic.tools.function",
))  # fmt: skip
"""Modules whose objects describe a parameter and are no values of one."""


def _is_metadata(default: Any) -> bool:
    is_known = type(cast("object", default)).__module__ in _METADATA and not inspect.isroutine(default)
    described = BaseMetadata | GroupedMetadata | types.GenericAlias | types.UnionType
    return is_known or isinstance(default, described)


def _metadata_of(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()


def _fields_of(hint: Any) -> list[FieldInfo]:
    return [item for item in _metadata_of(hint) if isinstance(item, FieldInfo)]


def _field_with_default(parameter: inspect.Parameter, hint: Any) -> FieldInfo | None:
    """Return the `Field` that has the default of a parameter; None if it has none, or one of its own."""
    if parameter.default is not parameter.empty and not isinstance(parameter.default, FieldInfo):
        return None
    return next((field for field in reversed(_fields_of(hint)) if not field.is_required()), None)


def is_required(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether a parameter has neither a default nor a `Field` with one.

    Args:
        parameter: The parameter.
        hint: Its annotation, with the `Field` that is its default.
    """
    is_unset = parameter.default is parameter.empty or isinstance(parameter.default, FieldInfo)
    return is_unset and _field_with_default(parameter, hint) is None


def field_defaults(function: Any) -> dict[str, FieldInfo]:
    """Return the `Field`s that have to fill in the default of a parameter, by its name.

    Args:
        function: Any callable; one without a readable signature has none.
    """
    try:
        return _defaults_of(inspect.signature(function).parameters, _hints(function))
    except (ValueError, NameError):
        return {}


def _defaults_of(
    parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]
) -> dict[str, FieldInfo]:
    found = {name: _field_with_default(parameters[name], hints.get(name)) for name in parameters}
    return {name: field for name, field in found.items() if field is not None}


def _text_of(hint: Any) -> str | None:
    """Return the text in an annotation: `Annotated[int, "How many."]`, or `Annotated[int, Doc("…")]`."""
    texts = (
        item if isinstance(item, str) else getattr(item, "documentation", None) for item in _metadata_of(hint)
    )
    return next((text for text in texts if isinstance(text, str)), None)


def _hint(function: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise TypeError(
            f"{function}(): a model cannot fill {parameter}; name each parameter, or pass a schema"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise TypeError(
            f"{function}(): parameter {parameter.name!r} is positional-only; models pass arguments by name"
        )
    if parameter.name not in hints:
        raise TypeError(
            f"{function}(): parameter {parameter.name!r} has no type annotation, e.g. {parameter.name}: str"
        )
    return hints[parameter.name]


def _adapter(function: str, parameter: str, hint: Any) -> pydantic.TypeAdapter[Any]:
    try:
        adapter = pydantic.TypeAdapter[Any](hint)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        text = error.message.splitlines()[0]
        raise TypeError(f"{function}(): parameter {parameter!r}: no JSON Schema for {hint}: {text}") from None
    return adapter


def _extras(
    parameter: inspect.Parameter, adapter: pydantic.TypeAdapter[Any], text: str | None, schema: Schema
) -> dict[str, JSON]:
    """Return the default and the description of one parameter, as far as it has them."""
    extras: dict[str, JSON] = {}
    if text and "description" not in schema:
        extras["description"] = text
    if parameter.default is not parameter.empty and not isinstance(parameter.default, FieldInfo):
        # A default without a JSON form, such as a sentinel object, is not shown to the model.
        with contextlib.suppress(ValueError, TypeError):
            extras["default"] = adapter.dump_python(parameter.default, mode="json", warnings=False)
    return extras


def json_schema_from_pydantic(model: Any) -> dict[str, JSON]:
    """Return the JSON Schema of a pydantic model class, with definitions inlined unless they are recursive.

    Args:
        model: A subclass of `pydantic.BaseModel`.

    Raises:
        TypeError: If `model` is not such a class.
    """
    if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
        raise TypeError(f"expected a subclass of pydantic.BaseModel, got {model!r}")
    return simplify_schema(model.model_json_schema())


def secret_args(schema: Schema) -> tuple[str, ...]:
    """Return the names of the arguments, at any depth, that a schema declares secret.

    Such an argument is `writeOnly`, or has the `format` "password"; pydantic writes both for `SecretStr`.
    """
    found: set[str] = set()
    left: list[JSON] = [dict(schema)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += cast("list[JSON]", value)
        elif (node := fields_of(value)) is not None:
            properties = fields_of(node.get("properties")) or {}
            found.update(name for name, inner in properties.items() if _is_secret(inner, schema))
            left += node.values()
    return tuple(sorted(found))


def _is_secret(value: JSON, schema: Schema) -> bool:
    left: list[JSON] = [value]
    for _ in range(_MOST_ALTERNATIVES):  # definitions may refer to each other
        node = fields_of(left.pop()) if left else None
        if node is None:
            continue
        if node.get("writeOnly") is True or node.get("format") == "password":
            return True
        for key in ("anyOf", "oneOf", "allOf"):
            inner: JSON = node.get(key)
            left += cast("list[JSON]", inner)[:_MOST_ALTERNATIVES] if isinstance(inner, list) else ()
        kind, _, name = str(node.get("$ref", "")).removeprefix("#/").partition("/")
        left.append((fields_of(schema.get(kind)) or {}).get(name))
    return False


def with_null(schema: Schema) -> dict[str, JSON]:
    """Replace `nullable: true`, a keyword of OpenAPI, by JSON Schema that allows null.

    Arguments are checked against the result; the model still reads `nullable`. A nullable schema keeps its
    place, so that JSON pointers find it, unless it combines others.
    """
    made = _mapped(schema, with_null)
    if made.get("nullable") is not True:
        return made
    if not made.keys().isdisjoint(_COMBINING):
        return {"anyOf": [{"type": "null"}, made]}
    for key, null in (("type", "null"), ("enum", None), ("anyOf", {"type": "null"})):
        known = made.get(key)
        values = cast("list[JSON]", known) if isinstance(known, list) else [known]
        if key in made and null not in values:
            made[key] = [*values, null]
    if "const" in made:
        made["enum"] = [made.pop("const"), None]
    return made


_COMBINING = ("oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "$recursiveRef")
"""Keywords through which a schema may refuse null wherever else it is allowed."""


def _mapped(schema: Schema, change: Callable[[Schema], Schema]) -> dict[str, JSON]:
    """Return a schema with its subschemas changed."""

    def changed(node: JSON) -> JSON:
        return change(cast("Schema", node)) if isinstance(node, Mapping) else node

    made: dict[str, JSON] = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            made[key] = {name: changed(inner) for name, inner in cast("Schema", value).items()}
        elif key in ONE_OR_MANY:
            many = cast("list[JSON]", value) if isinstance(value, list | tuple) else None
            made[key] = changed(value) if many is None else list(map(changed, many))
        else:
            made[key] = value
    return made


def with_cases(schema: Schema) -> dict[str, JSON]:
    """Return a schema that accepts the same values, but checks only the alternative that a value selects.

    Where a property distinguishes the alternatives of `anyOf` or `oneOf`, such as `type` in blocks of a page,
    the result uses `if` and `then`. Checks are faster, and errors are those of the selected alternative.

    Args:
        schema: A JSON Schema.
    """
    return _in_cases(schema, CaseFinder(schema))


def _in_cases(schema: Schema, finder: CaseFinder) -> dict[str, JSON]:
    made = _mapped(schema, lambda node: _in_cases(node, finder))
    for key in ("anyOf", "oneOf"):
        cases = finder.find(schema.get(key))
        if cases is None:
            continue
        branches = made.pop(key)
        chosen = [{"if": cases.guard([index]), "then": branches[index]} for index in cases.values]
        union: dict[str, JSON] = {**cases.guard([*cases.values]), "allOf": chosen}
        others = [branch for index, branch in enumerate(branches) if index not in cases.values]
        if len(others) == 1 and others[0] == {"type": "null"}:
            union = {"if": others[0], "else": union}
        elif others:
            union = {key: [*others, union]}
        made["allOf"] = [*made.get("allOf", ()), union]
    return made


def _with_closed_alternatives(schema: Schema) -> dict[str, JSON]:
    """Return a schema that accepts the same values, but whose errors have no details about alternatives.

    An error of anyOf or oneOf contains the errors of all branches, recursively; an error of `not` contains
    none. Drops unevaluatedProperties and unevaluatedItems, because `not` hides from them which properties and
    items were evaluated.
    """
    made = _mapped(schema, _with_closed_alternatives)
    closed = [{"not": {"not": {key: schema[key]}}} for key in ("anyOf", "oneOf") if made.pop(key, None)]
    if closed:
        made["allOf"] = [*made.get("allOf", ()), *closed]
    return {key: value for key, value in made.items() if not key.startswith("unevaluated")}


class Validator:
    """A compiled schema that checks arguments, with error messages from which a model can correct them.

    Compiles the schema that the model sees, `simplify_schema(schema)`. Booleans are not numbers. `format` is
    not checked. The time of a check is bounded for any schema and arguments: too many values are refused,
    and if there could be many errors, only the first one is searched.

    Args:
        schema: The JSON Schema of an object.

    Attributes:
        schema: The schema that the model sees.

    Raises:
        ValueError: If `schema` is not a JSON Schema, does not describe an object, or would check one value
            more than `MAX_EVALUATIONS` times.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema: Schema = simplify_schema(schema)
        plain = self.schema
        kind = plain.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ValueError(f"expected an input schema of type 'object'; got type {kind!r}")
        nullable = with_null(plain)
        self._cost = cost_of(nullable)
        if self._cost.evaluations > MAX_EVALUATIONS:
            raise ValueError(
                f"the schema checks one value more than {MAX_EVALUATIONS} times, because its alternatives or "
                "the references in them multiply; make it simpler"
            )
        self._max_values = min(MAX_VALUES, MAX_WORK // self._cost.evaluations)
        try:
            self._compiled = jsonschema_rs.validator_for(with_cases(nullable), retriever=_refuse)
        except (jsonschema_rs.ValidationError, ValueError, jsonschema_rs.ReferencingError) as error:
            raise ValueError(f"invalid JSON Schema: {error.args[0] if error.args else error}") from None
        names = (*plain.get("properties", ()), *plain.get("required", ()))
        declares_all = "properties" in plain and plain.keys() <= _DECLARING
        self._declared: frozenset[str] | None = frozenset(names) if declares_all else None

    def accept(self, args: Mapping[str, JSON]) -> tuple[Mapping[str, JSON], tuple[str, ...]]:
        """Check arguments, and drop those that the schema does not declare.

        Drops nothing if a keyword other than `properties` and `required` may allow other names:
        `additionalProperties`, `patternProperties`, `allOf`, a reference, and so on.

        Args:
            args: The arguments of a call.

        Returns:
            The arguments for the tool, and one note per dropped argument.

        Raises:
            SchemaValidationError: If the arguments do not fit the schema.
        """
        self._check_size(args)
        notes: tuple[str, ...] = ()
        declared = self._declared
        if declared is not None and not args.keys() <= declared:
            notes = tuple(f"undeclared argument: {name}" for name in args if name not in declared)
            args = {name: value for name, value in args.items() if name in declared}
        self._check(args)
        return args, notes

    def check(self, args: Mapping[str, JSON]) -> None:
        """Check arguments as they are.

        Args:
            args: The arguments of a call.

        Raises:
            SchemaValidationError: If they do not fit the schema, hold more than `MAX_VALUES` values, or are
                nested deeper than `nesting.MAX_DEPTH`.
        """
        self._check_size(args)
        self._check(args)

    def _check_size(self, args: Mapping[str, JSON]) -> None:
        """Raise SchemaValidationError if the arguments are too large to be checked in bounded time."""
        if len(args) <= self._max_values and are_scalars(map(type, args.values())):
            return
        try:
            count_values(args if isinstance(args, dict) else dict(args), max_values=self._max_values)
        except TooDeepError as error:
            raise SchemaValidationError(f"the arguments are {error}") from None
        except TooManyValuesError as error:
            raise SchemaValidationError(f"the arguments hold {error}; pass fewer") from None

    def _check(self, args: Mapping[str, JSON]) -> None:
        plain = args if isinstance(args, dict) else dict(args)
        try:
            if self._compiled.is_valid(plain):
                return
            n_errors = count_values(plain) * self._cost.evaluations
            if self._cost.is_recursive or n_errors > MAX_ERRORS:
                mistakes = [f"{self._first_mistake(plain)}; there may be more"]
            else:
                mistakes = list(map(_mistake, self._compiled.iter_errors(plain)))
        except Exception as error:
            raise SchemaValidationError(f"the arguments cannot be checked: {shorten(str(error))}") from None
        raise SchemaValidationError(_reported(mistakes))

    def _first_mistake(self, args: dict[str, JSON]) -> str:
        """Return the first mistake in linear time; `iter_errors` collects all errors before it yields one."""
        try:
            self._closed.validate(args)
        except jsonschema_rs.ValidationError as error:
            return self._mistake_within(error) or _mistake(error)
        except (ValueError, jsonschema_rs.ReferencingError):  # a reference led into alternatives
            pass
        return "the arguments do not fit the schema"

    def _mistake_within(self, error: jsonschema_rs.ValidationError) -> str | None:
        """Return why a value fits no alternative, or None if that takes too much work to find out."""
        schema = _closed_alternatives(error.kind)
        if schema is None:
            return None
        whole = with_cases(with_null(self.schema))
        schema |= {key: whole[key] for key in ("$schema", *DEFINITIONS) if key in whole}
        value = error.instance
        n_values = 1 + (count_values(value) if isinstance(value, dict | list) else 0)
        cost = cost_of(schema)
        if cost.is_recursive or n_values * cost.evaluations > MAX_ERRORS:
            return None
        try:
            compiled = jsonschema_rs.validator_for(schema, retriever=_refuse)
            first = next(compiled.iter_errors(value), None)
        except (ValueError, jsonschema_rs.ReferencingError):  # a reference led out of the definitions
            return None
        return None if first is None else _mistake(first, error.instance_path)

    @functools.cached_property
    def _closed(self) -> jsonschema_rs.Validator:
        schema = _with_closed_alternatives(with_cases(with_null(self.schema)))
        return jsonschema_rs.validator_for(schema, retriever=_refuse)


def _refuse(uri: str) -> JSON:
    """Refuse to fetch a reference: a schema from a server could make us read any address or file."""
    raise ValueError(f"it refers to {uri}; put the definition into the schema itself")


def _mistake(error: Any, start: Sequence[str | int] = ()) -> str:
    """Return one mistake with its path, value and expectation; of alternatives, the one that matched most."""
    kind = error.kind
    if isinstance(
        kind, jsonschema_rs.ValidationErrorKind.AnyOf | jsonschema_rs.ValidationErrorKind.OneOfNotValid
    ):
        branches = [branch[0] for branch in kind.context if branch]
        deepest = max(branches, key=lambda branch: len(branch.instance_path), default=error)
        if len(deepest.instance_path) > len(error.instance_path):
            return _mistake(deepest, start)
        messages = dict.fromkeys(shorten(branch.message, 60) for branch in branches)
        return _at(error, "; or ".join(messages), start)
    if (alternatives := _closed_alternatives(kind)) is not None:
        met = repr(error.instance) if isinstance(error.instance, str) else error.instance
        return _at(error, f"{shorten(met, 40)} fits none of {shorten(*alternatives.values())}", start)
    return _at(error, error.message, start)


def _closed_alternatives(kind: Any) -> dict[str, JSON] | None:
    """Return the alternatives behind an error of `_with_closed_alternatives`, by keyword; None for others."""
    if not isinstance(kind, jsonschema_rs.ValidationErrorKind.Not):
        return None
    inner = fields_of((fields_of(kind.schema) or {}).get("not")) or {}
    return dict(inner) if len(inner) == 1 and not inner.keys().isdisjoint(("anyOf", "oneOf")) else None


def _at(error: Any, message: str, start: Sequence[str | int] = ()) -> str:
    return _placed([*start, *error.instance_path], message)


def _placed(steps: Sequence[str | int], message: str) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    return f"{path}: {shorten(message, 160)}" if path else shorten(message, 160)


def validate_args(args: Mapping[str, JSON], schema: Schema | None) -> None:
    """Check arguments against a JSON Schema. Compiled schemas are cached.

    Args:
        args: The arguments of a call.
        schema: The JSON Schema of an object; None or empty accepts anything.

    Raises:
        SchemaValidationError: If the arguments do not fit the schema.
        ValueError: If `schema` is not a JSON Schema, or not that of an object.
    """
    if schema:
        try:
            key = json.dumps(schema, sort_keys=True)
        except RecursionError:
            raise ValueError("invalid JSON Schema: it is nested too deep; make it flatter") from None
        _compiled(key).check(args)


@lru_cache(maxsize=256)
def _compiled(schema: str) -> Validator:
    return Validator(json.loads(schema))
