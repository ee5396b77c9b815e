"""Typed functions as tools: `@tool`, `@function_tool`, and parameters that the environment fills in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_args, overload

import docstring_parser

from torchrl_agentic.messages import JSON, Fields, ToolResult, fields_of
from torchrl_agentic.text import shorten
from torchrl_agentic.tools import signatures
from torchrl_agentic.tools.base import AsyncCallable, Effects, Tool, ToolContext
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.schema import (
    FunctionSchema,
    Schema,
    SchemaValidationError,
    Validator,
    field_defaults,
    hidden_of,
    is_required,
    schema_of,
)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

registering: ContextVar[list[FunctionTool] | None] = ContextVar("registering", default=None)
"""Tools that the decorators of the file being loaded have created; None while no file is loaded."""


@dataclass(frozen=True, slots=True)
class Inject:
    """Marks a parameter that the environment fills in and the model does not see.

    Write `Annotated[str, Inject("ground_truth")]`, or `Injected[str]` if the source has the parameter's name.

    Args:
        source: "trajectory" (its name), "turn", "context" (the `ToolContext`), "state" (see
            `ToolContext.state`), "world" (see `Toolset`), "tools_kwargs" (the row's arguments for this
            tool), or else the name of one of the row's `execute_kwargs` for this tool, or of a column of the
            data set. None: the name of the parameter.
    """

    source: str | None = None


Injected = Annotated[T, Inject()]
"""`Injected[str]`: a parameter that the environment fills in; see `Inject`."""

_OF_CALL: Mapping[str, Callable[[ToolContext], Any]] = {
    "trajectory": lambda ctx: ctx.trajectory,
    "turn": lambda ctx: ctx.turn,
    "context": lambda ctx: ctx,
    "state": lambda ctx: ctx.state,
    "world": lambda ctx: ctx.world,
}
_KWARGS = "tools_kwargs"


class FunctionTool(Tool):
    """A typed function as a tool: name, description and schema come from its signature and docstring.

    A function that is not a coroutine function runs on a thread. Parameters annotated `ToolContext` or
    `Injected[…]` are filled in and hidden from the model.

    Args:
        function: The function. `ToolResult.from_value` converts what it returns.
        name: The name that the model calls; by default the function's name.
        description: The description that the model reads; by default that of the docstring.
        effects: Resources that a call reads and writes; see `Tool.effects`.
        schema: JSON Schema of the arguments, instead of the signature's. The arguments are then passed
            without conversion.
        returns_verl: Whether the function returns `response` or `(response[, reward[, metrics]])`, as verl's
            tools do; `ToolResult.from_verl` then converts it.

    Attributes:
        function: The function.
        reduced: Function and arguments that recreate the tool in another process; None: pickle the function.

    Raises:
        TypeError: If a parameter has no JSON Schema, or the function has no name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        effects: Effects | None = None,
        schema: Schema | None = None,
        returns_verl: bool = False,
    ) -> None:
        self.function = function
        self.returns_verl = returns_verl
        self.reduced: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._signature: FunctionSchema | None = (
            schema_of(function, hide=_is_hidden) if schema is None else None
        )
        fallback = getattr(function, "__name__", type(function).__name__)
        self.name = name or (self._signature.name if self._signature else fallback)
        if not name and self.name == "<lambda>":
            raise TypeError("a lambda has no name that a model could call; pass name=")
        documented = self._signature.description if self._signature else inspect.getdoc(function)
        self.description = description if description is not None else documented or ""
        self.input_schema = self._signature.input_schema if self._signature else schema or {"type": "object"}
        self.effects = effects
        hidden = self._signature.hidden if self._signature else hidden_of(function, _is_hidden)
        self._defaults = self._signature.defaults if self._signature else field_defaults(function)
        self._sources = {parameter: _source(parameter, hint) for parameter, hint in hidden.items()}
        self._needs = _without_default(function, hidden, self._sources)
        sources = set(self._sources.values())
        self.wants_state = "state" in sources
        self.needs_row = not sources <= _OF_CALL.keys()
        self._call_target = AsyncCallable(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without the tool around it."""
        return self.function(*args, **kwargs)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Call the function with the arguments by name."""
        try:
            kwargs = self._signature.arguments(args) if self._signature else dict(args)
        except SchemaValidationError as error:
            return ToolResult.from_error(error, self.name)
        if self._sources:
            kwargs.update(self._filled_in(ctx))
        if self._defaults:
            missing = self._defaults.keys() - kwargs.keys()
            kwargs.update(
                (name, self._defaults[name].get_default(call_default_factory=True)) for name in missing
            )
        value = await self._call_target(ctx.in_thread, **kwargs)
        return ToolResult.from_verl(value) if self.returns_verl and isinstance(value, tuple) else value

    def check_row(self, row: RowData) -> None:
        """Check that the row has a value for each parameter that is filled from it and has no default."""
        for parameter, source in self._needs.items():
            if source not in row.kwargs(self.name, "execute_kwargs") and source not in row.columns:
                known = ", ".join(map(str, row.columns)) or "none"
                raise ValueError(
                    f"tool {self.name!r} takes its {parameter!r} from the column {source!r}, which the data "
                    f"set does not have; columns: {known}. Tools see the rows of "
                    "DatasetChatEnv.from_dataloader, not the values that are passed to ChatEnv.reset"
                )

    def _filled_in(self, ctx: ToolContext) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parameter, source in self._sources.items():
            if source in _OF_CALL:
                found[parameter] = _OF_CALL[source](ctx)
            elif source == _KWARGS:
                found[parameter] = ctx.row.tools_kwargs.get(self.name, {})
            else:
                for place in (ctx.row.columns, ctx.row.kwargs(self.name, "execute_kwargs")):
                    if source in place:
                        found[parameter] = place[source]
        return found

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by reference to a file of tools or to a decorated module attribute, else by value."""
        if self.reduced is not None:
            return self.reduced
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", "")
        if module is not None and _found(module, name) is self:
            return (_found, (module, name))
        return self.reduce_by_value()

    def reduce_by_value(self) -> tuple[Any, ...]:
        """Return how to pickle it with its function, for a process that cannot import it."""
        rebuild = functools.partial(
            FunctionTool,
            name=self.name,
            description=self.description,
            effects=self.effects,
            schema=None if self._signature else self.input_schema,
            returns_verl=self.returns_verl,
        )
        state = {"input_schema": self.input_schema, "is_strict": self.is_strict}
        return (rebuild, (self.function,), state)


def _is_hidden(hint: Any) -> bool:
    return hint is ToolContext or _mark(hint) is not None


def _mark(hint: Any) -> Inject | None:
    return next((item for item in get_args(hint)[1:] if isinstance(item, Inject)), None)


def _source(parameter: str, hint: Any) -> str:
    mark = _mark(hint)
    return "context" if mark is None else mark.source or parameter


def _without_default(
    function: Callable[..., Any], hints: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, str]:
    """Return the parameters without a default that a column has to fill."""
    if not sources:
        return {}
    parameters = inspect.signature(function).parameters
    return {
        name: source
        for name, source in sources.items()
        if source not in _OF_CALL and source != _KWARGS and is_required(parameters[name], hints[name])
    }


def _found(module: str, qualname: str) -> Any:
    import importlib

    found: Any = importlib.import_module(module)
    for step in qualname.split("."):
        found = getattr(found, step, None)
    return found


@overload
def tool(function: Callable[..., Any], /, **options: Any) -> FunctionTool: ...
@overload
def tool(function: None = None, /, **options: Any) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Create a tool from a typed, documented function: `@tool`, `@tool(name="add")`, `tool(add)`.

    Args:
        function: The function; None if options are passed to the decorator.
        options: Keyword arguments of `FunctionTool`.

    Returns:
        The tool, or a decorator that creates it.
    """
    decorate = functools.partial(FunctionTool, **options)
    return decorate if function is None else decorate(function)


@overload
def function_tool(function: F, /) -> F: ...
@overload
def function_tool(name: str | None = None, /, *, schema: Any = None) -> Callable[[F], F]: ...
@overload
def function_tool(*, name: str | None = None, schema: Any = None) -> Callable[[F], F]: ...
def function_tool(function: Any = None, /, *, name: str | None = None, schema: Any = None) -> Any:
    """Mark a function as a tool, but leave it a function, as in verl's tool files.

    Write `@function_tool`, `@function_tool("name")` or `@function_tool(name=…, schema=…)`. The function is
    accepted wherever a tool is; `load_function_tools` finds those of a file. Without a schema, it needs type
    hints and a docstring that describes it and each parameter. The schema then has the form that
    `transformers.utils.get_json_schema` writes: `X | None` is `nullable`, and defaults are left out. As in
    verl, the function returns a response or `(response[, reward[, metrics]])`; for a function with `@tool`, a
    `tuple` is a JSON list.

    Args:
        function: The function, or the name of the tool.
        name: The name that the model calls; by default the function's name.
        schema: JSON Schema of the parameters, or a whole `{"type": "function", "function": {…}}`, instead of
            that of the signature and docstring; a mapping, or an object with `model_dump()`.

    Returns:
        The function, or a decorator that marks it.

    Raises:
        TypeError: If a hint or a description is missing: transformers' TypeHintParsingException or
            DocstringParsingException, which are TypeErrors here; the message begins with the file and line.
        ValueError: If the schema is not a JSON Schema of an object.
    """
    if isinstance(function, str):
        name, function = function, None

    def decorate(function: F) -> F:
        if not callable(function):
            raise TypeError(f"@function_tool takes a function; got {type(function).__name__}")
        made = _marked(function, name, schema)
        cast("Any", function).__tool__ = made
        made_here = registering.get()
        if made_here is not None:
            made_here.append(made)
        return function

    return decorate if function is None else decorate(function)


def _marked(function: Callable[..., Any], name: str | None, schema: Any) -> FunctionTool:
    place = place_of(function)
    if schema is not None:
        try:
            return _with_schema(function, name, schema)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{place}: {error}") from None
    doc = docstring_parser.parse(inspect.getdoc(function) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    shown = name or getattr(function, "__name__", type(function).__name__)
    if not doc.description:
        raise signatures.docstring_error(
            f"{place}: {shown}() has no docstring; the model needs a description of the tool"
        )
    try:
        made = FunctionTool(function, name=name, description=doc.description.strip(), returns_verl=True)
    except TypeError as error:
        raise signatures.type_hint_error(f"{place}: {error}") from None
    try:
        made.input_schema = _documented(
            function, made, {param.arg_name: param.description for param in doc.params}
        )
    except ValueError as error:
        raise signatures.docstring_error(f"{place}: {shown}(): {error}") from None
    return made


def _documented(
    function: Callable[..., Any], made: FunctionTool, descriptions: Mapping[str, str | None]
) -> dict[str, JSON]:
    """Write the schema of a function as `transformers.utils.get_json_schema` does.

    Types that it does not support, such as dataclasses and constraints, keep the schema that pydantic writes.

    Raises:
        ValueError: If the docstring does not describe a parameter, or its choices cannot be read.
    """
    hints = hidden_of(function, lambda _: True)
    written = cast("dict[str, Schema]", made.input_schema["properties"])
    properties: dict[str, JSON] = {}
    for name, of in written.items():
        schema = signatures.hint_schema(hints[name])
        if schema is None:
            schema = {key: value for key, value in of.items() if key != "default"}
        text = descriptions.get(name)
        if text is None and "description" not in schema:
            raise ValueError(
                f"the docstring does not describe {name!r}; add under 'Args:' the line '{name}: …'"
            )
        properties[name] = schema if text is None else signatures.described(schema, text)
    required = made.input_schema.get("required") or None
    found = {**made.input_schema, "properties": properties, "required": required}
    return {key: value for key, value in found.items() if value is not None}


def _with_schema(function: Callable[..., Any], name: str | None, schema: Any) -> FunctionTool:
    fields = schema_fields(schema)
    if fields is None:
        raise TypeError(
            f"expected schema as a mapping, or an object with model_dump(); got {type(schema).__name__}"
        )
    inner: Any = fields_of(fields.get("function")) if "function" in fields else {"parameters": fields}
    parameters: Any = None if inner is None else inner.get("parameters", {"type": "object"})
    if inner is None or not _describes_object(parameters):
        raise ValueError(
            'expected schema as {"type": "object", "properties": {…}}, or as '
            '{"type": "function", "function": {"name", "description", "parameters"}}; '
            f"got {shorten(fields)}"
        )
    Validator(parameters)
    made = FunctionTool(
        function,
        name=name or inner.get("name"),
        description=inner.get("description"),
        schema=parameters,
        returns_verl=True,
    )
    made.is_strict = inner.get("strict")
    return made


def schema_fields(schema: Any) -> Fields | None:
    """Return the fields of a schema as verl writes them into prompts: without unset fields and nulls.

    Args:
        schema: A mapping, or an object with pydantic's `model_dump`.

    Returns:
        The fields, or None if the schema is neither.
    """
    dump = getattr(schema, "model_dump", None)
    return fields_of(dump(exclude_unset=True, exclude_none=True) if callable(dump) else schema)


def _describes_object(schema: Any) -> bool:
    fields = fields_of(schema) or {}
    return not fields.keys().isdisjoint(("type", "properties", "$ref", "allOf", "anyOf", "oneOf"))


def place_of(target: Any) -> str:
    """Return the `file:line` where a function or class begins, or its name if there is no source."""
    target = inspect.unwrap(target)
    code = getattr(target, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return f"{target.__module__}.{target.__qualname__}" if inspect.isclass(target) else repr(target)
