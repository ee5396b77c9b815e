"""Parser of MiniMax M3: an argument is an element of its own name, and nested values are nested elements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size, dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import attempt, find_invented_turn, named_call
from torchrl_agentic.parsers.engine.typed_values import inner_schema, json_or_text, typed_value, types_of
from torchrl_agentic.parsers.engine.xml_params import XMLFormat, XMLParamsParser
from torchrl_agentic.parsers.formats.invoke import AttributeTags, named_tag
from torchrl_agentic.text import one_line

_NS = "]<]minimax[>["
_CALL, _SECTION, _ITEM = "invoke", "tool_call", "item"
_SPACED = (f"{_NS} ", f"{_NS}\n")
_LIST, _OBJECT = frozenset(("array",)), frozenset(("object",))
_NAME = re.compile(r"[^<>\s/]|[^<>\s/][^<>\r\n]{0,198}+(?<!\s)")


@dataclass(slots=True)
class _Element:
    """An element that is being read.

    Attributes:
        name: Name in its tag.
        schema: Schema of its value, None if unknown.
        types: JSON types of its value, None if unknown.
        text_at: Index after its opening tag or its last child.
        is_odd: Whether the schema names a type as another language does.
        children: Names and values of the elements in it.
    """

    name: str
    schema: Fields | None
    types: frozenset[str] | None
    text_at: int
    is_odd: bool = False
    children: list[tuple[str, JSON]] = field(default_factory=list[tuple[str, JSON]])

    def is_list(self) -> bool:
        """Return whether the children are the items of a list.

        Raises:
            CallParseError: If the schema requires a list, and one of them is not an item.
        """
        are_items = all(name == _ITEM for name, _ in self.children)
        kinds = (self.types or frozenset()) & (_LIST | _OBJECT)
        if kinds == _LIST and not are_items:
            raise CallParseError(
                "bad_arguments", f"{one_line(self.name, 40)} is a list of <{_ITEM}> elements"
            )
        return are_items and kinds != _OBJECT


class MiniMaxM3Parser(XMLParamsParser):
    """The format of MiniMax M3: any number of calls in one section, a namespace token before each tag.

        ]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>
        ]<]minimax[>[</invoke>]<]minimax[>[</tool_call>

    (Without the line break.) An object has an element per field, a list an `item` per element. The schema
    types text at any depth; where it is silent, elements that are all called `item` are a list. The namespace
    token allows values to contain other tags. Source: the chat template.
    """

    name = "minimax_m3"
    aliases = ("minimax-m3",)
    models = "MiniMax M3"
    example = f'{_NS}<invoke name="f">{_NS}<k>v{_NS}</k>…'
    format = XMLFormat(
        openers=("]<]minimax[>[<invoke",),
        closer="]<]minimax[>[</invoke>",
        section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
        around=("]<]minimax[>[<tool_call>\n", "\n", "\n]<]minimax[>[</tool_call>"),
        think=("<mm:think>", "</mm:think>"),
        turn_end=("[e~[",),
        result_tags=("<response>", "</response>"),
        other_openers=_SPACED,
        more_markers=(_NS,),
        tags=AttributeTags(),
        style="minimax_m3_xml",
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the tag begins a call, at any place, unlike `<invoke_id>`."""
        after = start + len(self.format.openers[0])
        while after == len(reader.text) and not reader.is_whole:
            yield
        return reader.text[after : after + 1] in " \t\r\n>"

    def read_other_opener(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Report white space between the namespace token and the tag of a call as an error.

        Args:
            reader: The message as read so far.
            place: Index of the namespace token.
            marker: The token with the white space.
        """
        tag = yield from reader.skip(place + len(marker))
        if reader.at(_NS, place) and (yield from reader.which((f"<{_SECTION}>", f"<{_CALL}"), tag)):
            return (yield from attempt(self, reader, place, self._read_spaced))
        return place + len(marker)

    def _read_spaced(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise the error for a tag with white space between it and its namespace token.

        Raises:
            CallParseError: Always.
        """
        raise CallParseError("extra_data", f"remove the white space after {_NS}", start)
        yield

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        name, at = yield from self.read_name(reader, start)
        schema = None if reader.tools is None else reader.tools.get(name)
        return (yield from named_call(reader, start, name, self._read_elements(reader, at, schema)))

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
            broke = yield from find_invented_turn(self.format, reader, element.text_at, marker)
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
                reader.block = marker, None
                value, more = self._element_value(element, None if len(stack) == 1 else text)
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
        """Return the value of a closed element, and notes; `text` is None for the element of the call.

        Raises:
            CallParseError: If it is a list with other elements than items.
        """
        types = element.types
        if text is not None and not element.children:
            # The template writes an empty list or object as an empty element.
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
        """Return the end of the malformed call at `start`: its closer, or the start of another one.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        format = self.format
        markers = (format.closer, *format.openers, *format.section, *format.turn_end)
        place, marker = yield from reader.find_first(markers, max(start + 1, broke))
        if place < 0:
            return len(reader.text)
        return place + len(marker) if marker == format.closer else place

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it.

        Raises:
            ValueError: If the format cannot express the call, or would read it back as another one.
        """
        values = "".join(self._written(name, value) for name, value in call.args.items())
        return f"{named_tag(self.format.openers[0], call.tool)}{values}{self.format.closer}"

    def _written(self, name: str, value: JSON, *, is_inner: bool = False) -> str:
        if _NAME.fullmatch(name) is None or name == _CALL or name.startswith(f"{_CALL} "):
            raise ValueError(f"the format cannot express the name {name!r}")
        if isinstance(value, dict | list) and value:
            inner = "".join(self._written(key, item, is_inner=True) for key, item in self._parts(value))
        elif value in ([], {}):
            inner = ""
        else:
            inner = value if isinstance(value, str) else dumps(value)
        # Schemas often do not describe inner values, so reject values that would read back differently.
        if is_inner and not isinstance(value, dict | list) and json_or_text(inner, self.limits) != value:
            raise ValueError(f"{name!r} contains text that this format would read as JSON")
        if is_inner and value in ([], {}):
            raise ValueError(
                f"{name!r} contains an empty value, which the format cannot express inside an argument"
            )
        if isinstance(value, str) and (_NS in value or any(end in value for end in self.format.turn_end)):
            raise ValueError(f"the value of {name!r} contains tags of the format, which has no escapes")
        return f"{_NS}<{name}>{inner}{_NS}</{name}>"

    def _parts(self, value: JSON) -> list[tuple[str, JSON]]:
        """Return the names and values of the elements that express an object or a list.

        Raises:
            ValueError: If it is an object that would be read as a list.
        """
        if isinstance(value, list):
            return [(_ITEM, item) for item in cast("list[JSON]", value)]
        fields = cast("dict[str, JSON]", value)
        if fields.keys() == {_ITEM}:
            raise ValueError(f"the format would read an object with {_ITEM!r} as its only key as a list")
        return list(fields.items())
