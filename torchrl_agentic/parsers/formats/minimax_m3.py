"""Calls of MiniMax M3: an argument is an element of its own name, and nested values are nested elements.

Format: the model's chat template. A namespace token precedes each tag, so that a value may hold other tags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size, dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.structural_tag import Frame
from torchrl_agentic.parsers.engine.typed_values import inner_schema, json_or_text, typed_value, types_of
from torchrl_agentic.parsers.formats.invoke import InvokeParser
from torchrl_agentic.text import one_line

_NS = "]<]minimax[>["
_CALL, _SECTION, _ITEM = "invoke", "tool_call", "item"
_SPACED = (f"{_NS} ", f"{_NS}\n")
_LIST, _OBJECT = frozenset(("array",)), frozenset(("object",))
_NAME = re.compile(r"[^<>\s/]|[^<>\s/][^<>\r\n]{0,198}+(?<!\s)")


@dataclass(slots=True)
class _Element:
    """An element that is being read.

    schema, types: of its value, as far as the schema of the tool says. text_at: where the text begins behind
    its opening tag or its last child. is_odd: whether the schema has a type's name of another language.
    children: names and values.
    """

    name: str
    schema: Fields | None
    types: frozenset[str] | None
    text_at: int
    is_odd: bool = False
    children: list[tuple[str, JSON]] = field(default_factory=list[tuple[str, JSON]])

    def is_list(self) -> bool:
        """Return whether its children are the items of a list.

        Raises:
            CallParseError: They should be, and one is not.
        """
        are_items = all(name == _ITEM for name, _ in self.children)
        kinds = (self.types or frozenset()) & (_LIST | _OBJECT)
        if kinds == _LIST and not are_items:
            raise CallParseError(
                "bad_arguments", f"{one_line(self.name, 40)} is a list of <{_ITEM}> elements"
            )
        return are_items and kinds != _OBJECT


class MiniMaxM3Parser(InvokeParser):
    """`<invoke name="f"><k>v</k></invoke>` in one `<tool_call>`, with a namespace token before each tag.

    An object has an element for each field, and a list an `item` for each of its items. Text is typed by the
    schema, at any depth. Where the schema does not say, elements that are all called `item` are a list.
    """

    name: ClassVar[str] = "minimax_m3"
    aliases = ("minimax-m3",)
    models = "MiniMax M3"
    example = f'{_NS}<invoke name="f">{_NS}<k>v{_NS}</k>…'
    stop = ("[e~[",)
    section = (f"{_NS}<{_SECTION}>", f"{_NS}</{_SECTION}>")
    openers = (f"{_NS}<{_CALL}",)
    closer = f"{_NS}</{_CALL}>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    think = ("<mm:think>", "</mm:think>")
    turn_end = ("[e~[",)
    result_tags = ("<response>", "</response>")
    other_openers = _SPACED
    more_markers = (_NS,)
    shape = (
        f'{section[0]}{openers[0]} name="tool_name">{_NS}<argument>value{_NS}</argument>{closer}{section[1]}'
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Step: return whether it begins a call, wherever it is, and not an element such as `<invoke_id>`."""
        after = start + len(self.openers[0])
        while after == len(reader.text) and not reader.is_whole:
            yield
        return reader.text[after : after + 1] in " \t\r\n>"

    def read_other_opener(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Step: report a namespace token apart from the tag of a call as an error; other tags are text."""
        tag = yield from reader.skip(place + len(marker))
        if reader.at(_NS, place) and (yield from reader.which((f"<{_SECTION}>", f"<{_CALL}"), tag)):
            return (yield from self.attempt(reader, place, self._read_spaced))
        return place + len(marker)

    def _read_spaced(self, reader: Reader, start: int) -> Incremental[int]:
        """Refuse a tag with white space between it and its namespace token.

        Raises:
            CallParseError: Always.
        """
        raise CallParseError("extra_data", f"white space parts {_NS} from its tag", start)
        yield

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call."""
        name, at = yield from self.read_name(reader, start)
        schema = None if reader.tools is None else reader.tools.get(name)
        return (yield from self.named_call(reader, start, name, self._read_elements(reader, at, schema)))

    def _read_elements(
        self, reader: Reader, body: int, root: Fields | None
    ) -> Incremental[tuple[PartialCall, int]]:
        stack = [_Element(_CALL, root, _OBJECT, body)]
        notes: tuple[str, ...] = ()
        while True:
            element = stack[-1]
            marker = yield from reader.find(_NS, element.text_at)
            end = yield from reader.find(">", max(marker, element.text_at) + len(_NS))
            tag = reader.text[marker + len(_NS) : end + 1]
            broke = yield from self.find_invented_turn(reader, element.text_at, marker)
            if broke < 0 and (marker < 0 or end < 0):
                broke = len(reader.text)
            if broke < 0 and self._ends_early(tag, element):
                broke = marker
            if broke >= 0:
                raise CallParseError("unclosed", f"{one_line(element.name, 40)} is not closed", broke)
            text = reader.text[element.text_at : marker]
            if (element.children or len(stack) == 1) and text.strip():
                raise CallParseError("extra_data", "expecting an element, not text", element.text_at)
            if tag == f"</{element.name}>":
                try:
                    value, more = self._element_value(element, None if len(stack) == 1 else text)
                except CallParseError as error:
                    error.at = marker
                    raise
                notes = (*notes, *(note for note in more if note not in notes))
                stack.pop()
                if not stack:
                    check_size(reader.text, body, end + 1, self.limits)
                    return PartialCall(args=cast("dict[str, JSON]", value), notes=notes), end + 1
                stack[-1].children.append((element.name, value))
                stack[-1].text_at = end + 1
                continue
            name = tag[1:-1]
            if tag[:1] != "<" or _NAME.fullmatch(name) is None or text.strip():
                reason = f"expecting {_NS}</{one_line(element.name, 40)}>"
                raise CallParseError("extra_data", reason, marker)
            if len(stack) > self.limits.depth:
                raise CallParseError(
                    "too_deep", f"elements are nested deeper than {self.limits.depth}", marker
                )
            key = len(element.children) if name == _ITEM and element.types != _OBJECT else name
            schema = inner_schema(element.schema, key, root)
            types, is_odd = types_of(schema, root)
            stack.append(_Element(name, schema, types, end + 1, is_odd))

    def _ends_early(self, tag: str, element: _Element) -> bool:
        """Return whether a tag ends the call, or begins another, before an element is closed."""
        if tag == f"</{element.name}>":
            return False
        return tag in (f"</{_CALL}>", f"</{_SECTION}>") or tag.startswith(f"<{_CALL} ")

    def _element_value(self, element: _Element, text: str | None) -> tuple[JSON, tuple[str, ...]]:
        """Return the value of an element that has closed, and notes; `text` is None for that of the call.

        Raises:
            CallParseError: It is a list of something else than items.
        """
        types = element.types
        if text is not None and not element.children:
            # The template writes an empty list or object as an element without anything in it.
            if types is not None and not text.strip() and "string" not in types:
                if "array" in types:
                    return [], ()
                if "object" in types:
                    return {}, ()
            value, is_python = typed_value(text, types, self.limits)
            notes = {"odd_schema_type": element.is_odd, "python_literals": is_python}
            return value, tuple(note for note, applies in notes.items() if applies)
        if element.children and element.is_list():
            return [value for _, value in element.children], ()
        fields: dict[str, list[JSON]] = {}
        for name, value in element.children:
            fields.setdefault(name, []).append(value)
        notes = ("repeated_element",) if len(fields) < len(element.children) else ()
        return {name: found[0] if len(found) == 1 else found for name, found in fields.items()}, notes

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Step: return the end of the unreadable call at `start`: its closer, or where another begins."""
        markers = (self.closer, *self.openers, *self.section, *self.turn_end)
        place, marker = yield from reader.find_first(markers, max(start + 1, broke))
        if place < 0:
            return len(reader.text)
        return place + len(marker) if marker == self.closer else place

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it.

        Raises:
            ValueError: The format cannot say it, or says it in the same way as another one.
        """
        values = "".join(self._written(name, value) for name, value in call.args.items())
        return f"{self._named(self.openers[0], call.tool)}{values}{self.closer}"

    def _written(self, name: str, value: JSON, *, is_inner: bool = False) -> str:
        if _NAME.fullmatch(name) is None or name == _CALL or name.startswith(f"{_CALL} "):
            raise ValueError(f"the format cannot hold the name {name!r}")
        if isinstance(value, dict | list) and value:
            inner = "".join(self._written(key, item, is_inner=True) for key, item in self._parts(value))
        elif value in ([], {}):
            inner = ""
        else:
            inner = value if isinstance(value, str) else dumps(value)
        # Within an argument schemas often say nothing, so what reads as something else is not written.
        if is_inner and not isinstance(value, dict | list) and json_or_text(inner, self.limits) != value:
            raise ValueError(f"{name!r} holds a text that reads as JSON, which the format cannot tell apart")
        if is_inner and value in ([], {}):
            raise ValueError(f"{name!r} holds nothing, which the format cannot say inside of an argument")
        if isinstance(value, str) and (_NS in value or any(end in value for end in self.turn_end)):
            raise ValueError(f"the value of {name!r} holds tags of the format, which has no escapes")
        return f"{_NS}<{name}>{inner}{_NS}</{name}>"

    def _parts(self, value: JSON) -> list[tuple[str, JSON]]:
        """Return the names and values of the elements that stand for an object or a list.

        Raises:
            ValueError: It is an object that would read as a list.
        """
        if isinstance(value, list):
            return [(_ITEM, item) for item in cast("list[JSON]", value)]
        fields = cast("dict[str, JSON]", value)
        if fields.keys() == {_ITEM}:
            raise ValueError(f"an object of nothing but {_ITEM!r} is a list in this format")
        return list(fields.items())

    def frame(self, name: str) -> Frame:
        """Return what stands around the arguments of a call."""
        return Frame(self._named(self.openers[0], name), self.closer, "minimax_m3_xml")
