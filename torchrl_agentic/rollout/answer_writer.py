"""`AnswerWriter`: write the answers of other models as a chat template writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.base import ToolCallParser
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.parsers.registry import get_parser
from torchrl_agentic.text import one_line, read_json
from torchrl_agentic.tokens.chat_template import Chat
from torchrl_agentic.tokens.encoding import Piece, decode
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.tokens.writer import ChatEncoder

Ranges = Sequence[tuple[int, int]]
"""Start and end of each part of a text, in characters."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that chat templates give to the reasoning of a message."""
_THOUGHT = re.compile(
    r"\s*(?P<open><think>)(?P<text>.*?)(?P<close></think>)"
    r"|(?P<rest>.*?)(?<![^\n])(?P<end></think>)(?=\s*\n|\s*\Z)",
    re.DOTALL,
)
"""Matches reasoning at the beginning of an answer; its opening tag may be in the prompt."""
_OTHER_TEMPLATE = 'pass another template: tokenizer_options={"chat_template": ...}'


class UnwritableAnswer(ValueError):
    """The chat template cannot write an answer; the message says why, and what to do about it."""


@contextmanager
def template_errors() -> Generator[None]:
    """Raise UnwritableAnswer in place of the errors of a chat template, which may be of any type."""
    try:
        yield
    except MissingExtra:
        raise
    except Exception as error:
        raise UnwritableAnswer(f"it rejects the messages ({error}); {_OTHER_TEMPLATE}") from error


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """The tokens of an answer.

    Attributes:
        ids: Ids of the answer and of the token that ends it.
        n_replaced: Number of tokens at the end of the prompt that the template does not write before this
            answer. Some templates write `<think></think>` where the prompt ends in `<think>` and a newline.
    """

    ids: list[int]
    n_replaced: int = 0


@dataclass(frozen=True, slots=True)
class _AnswerPlace:
    """The place of an answer in a rendered conversation.

    Attributes:
        context: The messages before the answer.
        before: The text before the answer.
        replaced: Text at the end of the prompt that the template does not write before this answer.
        text: The text from the answer on.
    """

    context: tuple[Mapping[str, Any], ...]
    before: str
    replaced: str
    text: str


class AnswerWriter:
    """Writes answers as a chat template does, and checks that the template omits nothing.

    Only the template writes control tokens: those in the text of an answer are encoded as plain characters.

    Args:
        encoder: Encodes the conversations of the model to train.
        tool_role: Role of messages with tool results.
    """

    def __init__(self, encoder: ChatEncoder, *, tool_role: str = "tool") -> None:
        self.encoder, self.tool_role = encoder, tool_role
        texts = control_tokens_of(encoder.tokenizer).values()
        self._control = re.compile(f"(?=(?:{'|'.join(map(re.escape, texts))}))" if texts else "(?!)")

    @cached_property
    def parser(self) -> ToolCallParser | None:
        """The parser that reads the calls of the chat template; None if no parser does."""
        options = self.encoder.template.template_kwargs
        try:
            return get_parser("auto", tokenizer=self.encoder.tokenizer, **options)
        except ValueError:
            return None

    def holds_end(self, said: Mapping[str, Any]) -> bool:
        """Return whether the text, reasoning or a call of an answer contains a stop token."""
        texts = [str(said["content"]), str(said.get("reasoning_content", ""))]
        texts += [text for call in _calls(said) for text in _strings(call)]
        return any(end in text for end in self.encoder.template.ends for text in texts)

    def write(
        self,
        prompt: Sequence[int],
        before: Chat,
        said: Mapping[str, Any],
        *,
        is_complete: bool = True,
        markup: Ranges = (),
    ) -> WrittenAnswer:
        """Return the tokens of an answer.

        Args:
            prompt: Token ids before it.
            before: Messages before it.
            said: The answer, with its calls and its reasoning apart from the text.
            is_complete: Whether the model ended it.
            markup: Parts of its text that are markup of the model to train, such as calls.

        Raises:
            UnwritableAnswer: If the template omits or changes a part of the answer, or ends it with a token
                that is not a stop token.
        """
        place = self._place(before, said)
        marker = _Marker(self._control, json.dumps(said, default=str))
        marked = self._text(place, marker.message(said, markup))
        cuts = marker.cuts(marked, place.text)
        last = marker.last_end(marked)
        n_replaced, taken = self._replaced(prompt, place.replaced)
        if is_complete:
            text, end = self._ended(place, marker, said, last)
        else:
            text, end = place.text[:last], []
        self._read_back(said, text)
        pieces = [Piece(taken, SAMPLED, is_trusted=True), *_pieces(text, cuts)]
        return WrittenAnswer([*self.encoder.encoder.encode(pieces).ids, *end], n_replaced)

    def _place(self, before: Chat, said: Mapping[str, Any]) -> _AnswerPlace:
        """Find the answer in the rendered conversation.

        Templates that write earlier answers without their reasoning once another answer follows are rendered
        without it from the start.
        """
        for context in (tuple(before), tuple(map(_bare, before))):
            prompt = self._render(context)
            written = _shared(prompt, self._render(context, prompts=False))
            whole = self._render([*context, said], prompts=False)
            if whole.startswith(written):
                shared = _shared(prompt, whole)
                return _AnswerPlace(context, shared, prompt[len(shared) :], whole[len(shared) :])
        raise UnwritableAnswer(
            f"it writes earlier messages differently once an answer follows; {_OTHER_TEMPLATE}"
        )

    def _text(self, place: _AnswerPlace, said: Mapping[str, Any]) -> str:
        """Return the text of another answer at the same place."""
        whole = self._render([*place.context, said], prompts=False)
        return whole[len(place.before) :] if whole.startswith(place.before) else ""

    def _render(self, chat: Chat, *, prompts: bool = True) -> str:
        with template_errors():
            return self.encoder.template.render(chat, prompts=prompts)

    def _replaced(self, prompt: Sequence[int], replaced: str) -> tuple[int, str]:
        """Return how many tokens at the end of the prompt cover `replaced`, and their text before it."""
        count, held = 0, ""
        while len(held) < len(replaced) and count < len(prompt):
            count += 1
            held = decode(self.encoder.tokenizer, prompt[len(prompt) - count :])
        if not held.endswith(replaced):
            raise UnwritableAnswer(f"the prompt ends in {held!r}, not in {replaced!r}; {_OTHER_TEMPLATE}")
        return count, held.removesuffix(replaced)

    def _ended(
        self, place: _AnswerPlace, marker: _Marker, said: Mapping[str, Any], last: int
    ) -> tuple[str, list[int]]:
        """Return the text of the answer, and the id of the token that ends it.

        Some templates write this token only as the beginning of the message that follows.
        """
        text, end = self._split(place.text)
        if len(text) < last:
            token = self.encoder.tokenizer.convert_ids_to_tokens(end[0])
            raise UnwritableAnswer(
                f"it writes the stop token {token!r} in the middle of the answer; leave it out of "
                "stop_token_ids"
            )
        tail = text[last:]
        calls = _calls(said)
        if end and not calls:
            return text, end
        answer = marker.message(said, ())
        follows: list[dict[str, JSON]] = [{"role": "user", "content": marker.follows}]
        if calls:
            follows = [
                {
                    "role": self.tool_role,
                    "content": marker.follows,
                    "tool_call_id": call["id"],
                    "name": _function(call)["name"],
                }
                for call in calls
            ]
        else:  # a user's message may change how the reasoning before it is written
            answer = {"role": "assistant", "content": marker.stub}
            stub = self._text(place, answer)
            tail = stub[stub.find(marker.stub) + len(marker.stub) :]
        behind = marker.behind(self._render([*place.context, answer, *follows]))
        if behind is None or not behind.startswith(tail):
            raise UnwritableAnswer(
                f"it writes {one_line(text, 80)!r} elsewhere or otherwise once a message follows; "
                f"{_OTHER_TEMPLATE}"
            )
        rest = behind[len(tail) :]
        space, end = self._split(rest)
        if end and not space.strip():
            return text + space, end
        template = self.encoder.template
        found = [(rest.find(token), -len(token), token) for token in template.special if token in rest]
        token = min(found)[2] if found else one_line(rest, 20)
        raise UnwritableAnswer(
            f"it ends {one_line(text, 80)!r} with {token!r}, which is not among the stop tokens "
            f"{list(template.ends)}; add its id: tokenizer_options="
            f'{{"stop_token_ids": [tokenizer.convert_tokens_to_ids({token!r})]}}'
        )

    def _split(self, text: str) -> tuple[str, list[int]]:
        """Return the text before the first stop token, and its id."""
        ends = zip(self.encoder.template.ends, self.encoder.stop_token_ids, strict=True)
        found = [(text.find(end), -len(end), token) for end, token in ends if end in text]
        if not found:
            return text, []
        at, _, token = min(found)
        return text[:at], [token]

    def _read_back(self, said: Mapping[str, Any], text: str) -> None:
        """Check that the model's parser reads the calls that the template wrote."""
        wanted = [(_function(call)["name"], _arguments(call)) for call in _calls(said)]
        if not wanted or self.parser is None:
            return
        schemas: dict[str, Fields] = {}
        for name, args in wanted:
            properties: Fields = {key: {"type": _json_type(value)} for key, value in args.items()}
            schemas[name] = {"type": "object", "properties": properties}
        calls = self.parser.parse(text, tools=schemas).calls
        found = [(call.tool, call.args) for call in calls if call.error is None]
        if [(name, _canonical(args)) for name, args in found] != [
            (name, _canonical(args)) for name, args in wanted
        ]:
            raise UnwritableAnswer(
                f"the calls {wanted!r:.200} read back as {found!r:.200} from {one_line(text, 200)!r}; "
                f"{_OTHER_TEMPLATE}"
            )


class _Marker:
    """Marks the texts of an answer, to find them in the rendered answer.

    Templates write words of letters and digits unchanged. A mark at the end of each text shows that the text
    is written; one inside each control token of a text shows which control tokens the template did not write.

    Args:
        control: Finds the starts of control tokens.
        texts: All texts of the answer, concatenated.
    """

    def __init__(self, control: re.Pattern[str], texts: str) -> None:
        self._control, self._stem = control, "vjq"
        while self._stem in texts:
            self._stem += "j"
        self._pattern = re.compile(rf"{self._stem}(c|k|f|\d+)x")
        self._names: list[str] = []
        self._n_keys = 0
        self.follows, self.stub = f"{self._stem}fx", f"{self._stem}0x"

    def message(self, said: Mapping[str, Any], markup: Ranges) -> dict[str, Any]:
        """Return the answer with marks in its texts.

        Args:
            said: The answer.
            markup: Parts of its content whose control tokens are not marked.
        """
        made, self._names, self._n_keys = dict(said), [], 0
        reasoning = str(said.get("reasoning_content", ""))
        if reasoning:
            made |= dict.fromkeys(_REASONING_KEYS, self._marked(reasoning, "the reasoning"))
        content = str(said["content"])
        thought = None if reasoning else _THOUGHT.match(content)
        if thought is None:
            made["content"] = self._marked(content, "the text", markup)
        else:
            tags = [thought.span(name) for name in ("open", "close", "end") if thought[name]]
            start, close = thought.start("text") if thought["open"] else 0, tags[-1][0]
            made["content"] = (
                content[:start]
                + self._marked(content[start:close], "the reasoning")
                + content[close : thought.end()]
                + self._marked(
                    content[thought.end() :],
                    "the text",
                    [(first - thought.end(), last - thought.end()) for first, last in markup],
                )
            )
        if _calls(said):
            made["tool_calls"] = [self._call(call) for call in _calls(said)]
        return made

    def cuts(self, marked: str, text: str) -> list[int]:
        """Return where the text of an answer has control tokens that the template did not write.

        Args:
            marked: The text of the answer with marks.
            text: The text of the answer.

        Raises:
            UnwritableAnswer: If the template omits a part of the answer, or changes it.
        """
        found = [match[1] for match in self._pattern.finditer(marked)]
        missing = [name for index, name in enumerate(self._names) if str(index) not in found]
        if found.count("k") < self._n_keys:
            missing.append("the arguments of a call")
        if missing:
            remedy = _OTHER_TEMPLATE
            if set(missing) == {"the reasoning"}:
                remedy = f"to train without reasoning, keep_reasoning=False; to keep it, {remedy}"
            raise UnwritableAnswer(f"it does not write {', '.join(dict.fromkeys(missing))}; {remedy}")
        if self._pattern.sub("", marked) != text:
            raise UnwritableAnswer(
                "it interprets markup in the text of the answer; escape this markup: "
                "parsers.escape_control_tokens(text)"
            )
        return [at for at, label in self._marks(marked) if label == "c"]

    def last_end(self, marked: str) -> int:
        """Return where the last text of the answer ends, in the text without marks."""
        ends: dict[str, int] = {}
        for at, label in self._marks(marked):
            if label.isdigit():
                ends.setdefault(label, at)
        return max(ends.values(), default=0)

    def behind(self, marked: str) -> str | None:
        """Return the text between an answer with marks and the message that follows it.

        Args:
            marked: The text of a conversation.

        Returns:
            None if the message does not follow all texts of the answer.
        """
        plain = self._pattern.sub("", marked)
        places = [at for at, label in self._marks(marked) if label == "f"]
        end = self.last_end(marked)
        return plain[end : places[0]] if places and end <= places[0] else None

    def _marks(self, marked: str) -> list[tuple[int, str]]:
        places: list[tuple[int, str]] = []
        removed = 0
        for match in self._pattern.finditer(marked):
            places.append((match.start() - removed, match[1]))
            removed += len(match[0])
        return places

    def _call(self, call: Mapping[str, Any]) -> dict[str, JSON]:
        function = _function(call)
        what = f"the call of {function['name']!r}"
        return {
            **call,
            "id": self._cut(str(call["id"])),
            "function": {
                "name": self._marked(function["name"], what),
                "arguments": self._value(_arguments(call), f"the arguments of {what}"),
            },
        }

    def _value(self, value: JSON, what: str) -> JSON:
        if isinstance(value, str):
            return self._marked(value, what)
        if isinstance(value, list):
            return [self._value(item, what) for item in cast("list[JSON]", value)]
        if (fields := fields_of(value)) is None:
            return value
        self._n_keys += len(fields)
        return {f"{self._stem}kx{self._cut(key)}": self._value(item, what) for key, item in fields.items()}

    def _marked(self, text: str, what: str, keep: Ranges = ()) -> str:
        """Return a text with marks inside its control tokens and at its end; white space as it is."""
        size = len(text.rstrip())
        if not size:
            return text
        self._names.append(what)
        return f"{self._cut(text[:size], keep)}{self._stem}{len(self._names) - 1}x{text[size:]}"

    def _cut(self, text: str, keep: Ranges = ()) -> str:
        made, last = "", 0
        for match in self._control.finditer(text):
            if not any(first <= match.start() < after for first, after in keep):
                made += f"{text[last : match.start() + 1]}{self._stem}cx"
                last = match.start() + 1
        return made + text[last:]


def _shared(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[:size]


def with_reasoning(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that has its reasoning under each of the names that chat templates use.

    Args:
        said: A message with its reasoning, if it has one, under "reasoning_content".
    """
    reasoning = said.get("reasoning_content")
    return {**said, **dict.fromkeys(_REASONING_KEYS, reasoning)} if reasoning else dict(said)


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without its reasoning, and without its text if it has calls."""
    made = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    if message["role"] != "assistant":
        return made
    content = str(message.get("content") or "")
    thought = _THOUGHT.match(content)
    made["content"] = "" if _calls(message) else content[thought.end() :] if thought else content
    return made


def _pieces(text: str, cuts: Sequence[int]) -> list[Piece]:
    """Split a text at the cuts, so that no control token spans a cut."""
    made: list[Piece] = []
    last = 0
    for cut in (cut for cut in cuts if cut <= len(text)):
        made.append(Piece(text[last : cut - 1], SAMPLED, is_trusted=True))
        made.append(Piece(text[cut - 1 : cut], SAMPLED))
        last = cut
    return [*made, Piece(text[last:], SAMPLED, is_trusted=True)]


def _calls(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return said.get("tool_calls") or []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call["function"]


def _arguments(call: Mapping[str, Any]) -> Fields:
    arguments = _function(call)["arguments"]
    fields = fields_of(arguments)
    if fields is None:
        raise UnwritableAnswer(
            f"the arguments of the call of {_function(call)['name']!r} are not a JSON object: "
            f"{arguments!r:.80}; write them as one"
        )
    return fields


def _strings(value: JSON) -> list[str]:
    """Return the strings of a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in cast("list[JSON]", value) for text in _strings(item)]
    fields = fields_of(value) or {}
    return [text for key, item in fields.items() for text in (key, *_strings(item))]


def _canonical(args: Fields) -> dict[str, str]:
    """Return arguments as JSON, with "5" equal to 5, which formats without types cannot tell apart."""
    return {key: json.dumps(_typed(value), sort_keys=True) for key, value in args.items()}


def _typed(value: JSON) -> JSON:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def _json_type(value: JSON) -> str:
    match value:
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case _:
            return "array" if isinstance(value, list) else "object"
