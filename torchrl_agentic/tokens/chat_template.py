"""Render the delta between two answers of a model, without rendering the whole conversation.

… sampled answer │ end of the turn, tool results, header of the next answer │
                 └───────────────────────── delta ──────────────────────────┘
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_agentic.messages import fields_of
from torchrl_agentic.parsers.base import SPEAKERS, Escaper, escaper
from torchrl_agentic.parsers.control_tokens import FAMILY_MARKERS
from torchrl_agentic.text import one_line, read_json
from torchrl_agentic.tokens.encoding import Piece, escaped_names, kind_of
from torchrl_agentic.tokens.ledger import BOUNDARY

Chat = Sequence[Mapping[str, Any]]
Method = Literal["fixed_base", "prefix"]

_SLOT, _STUB, _OTHER = "vjq{}resultqvj", "vjqstubqvj", "vjqotherqvj"  # words that no template or tool writes
_MAX_SKELETONS = 4096
_THOUGHT = "<think>\nr\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A delta with slots for the contents of the messages.

    Attributes:
        lead: What the template writes between the stub of an answer and `end`: the rest of a call.
        end: Text that ends the model's turn, as the template writes it.
        parts: Texts of the template, and between them the indices of the contents.
    """

    lead: str
    end: str
    parts: tuple[str | int, ...]


_FORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)
"""Changes that templates make to the text of a result; they write the quotes around it themselves."""
_SAMPLES = ("42", " padded\n\n", 'a "quoted"\nline \\ é', "", '{"a": [1, null]}', "<think>x</think>y", "\n")


class ChatTemplate:
    """Renders conversations, and the deltas between turns, with the chat template of a model.

    Args:
        renderer: A tokenizer or processor of transformers.
        chat_template: Replaces the renderer's own template.
        tools: Specifications of the tools that the template shows.
        tool_role: Role of messages with tool results.
        kwargs: Further arguments of the template, such as `enable_thinking`.
        ends: Texts of the tokens that end an answer.
        special: Texts of the special tokens; the first one ends an answer that none of `ends` follows.
        control: Escapes control tokens in texts that the template takes for its own: descriptions of tools
            from servers, names and ids. None: the control tokens of all families.
        probe: Check now that deltas are exact. False if only whole conversations are rendered.

    Attributes:
        method: How deltas are rendered; the probe chooses the first method that is exact. "fixed_base"
            renders them behind a short conversation that is always the same, so the cost does not grow;
            "prefix" renders the whole conversation with and without the new messages.
        appends: A longer conversation is rendered as the shorter one plus text at its end.
        keeps_reasoning: The same holds for the reasoning of earlier turns.

    Raises:
        ValueError: If neither method gives the text that the template writes for longer conversations.
    """

    def __init__(
        self,
        renderer: Any,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_role: str = "tool",
        kwargs: Mapping[str, Any] | None = None,
        ends: Sequence[str] = (),
        special: Sequence[str] = (),
        control: Escaper | None = None,
        probe: bool = True,
    ) -> None:
        self._renderer, self._kwargs = renderer, dict(kwargs or {})
        if chat_template is not None:
            self._kwargs["chat_template"] = chat_template
        self._control = control or escaper((*FAMILY_MARKERS, *ends, *special))
        self._tools = [self._control.json(dict(spec)) for spec in tools] or None
        self._tool_role = tool_role
        self.ends, self.special = tuple(ends), tuple(special)
        self._skeletons: dict[str, Skeleton | None] = {}
        self._narrowed: dict[frozenset[str], ChatTemplate] = {}
        self._form: Callable[[str], str] | None = _FORMS[0]
        self._part_form: Callable[[str], str] | None = None
        self._parts_are_known = False
        self.method: Method = "fixed_base"
        self.appends, self.keeps_reasoning = False, False
        self._in_parts = not self._takes_strings()
        if probe:
            self._probe()

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Arguments of the template, such as `chat_template` and `enable_thinking`."""
        return self._kwargs

    @property
    def source(self) -> str:
        """Text of the template; of all templates if the renderer has several."""
        return str(self._kwargs.get("chat_template") or getattr(self._renderer, "chat_template", ""))

    @functools.cached_property
    def writes_calls(self) -> bool:
        """Check whether the template writes calls that a message has apart from its text."""
        answer = {**_answer(""), "tool_calls": [_call("call00000", "tool", {"x": _STUB})]}
        try:
            return _STUB in self.render([*_question(answer), self._result("r", 0)])
        except Exception:  # templates raise any type
            return False

    def showing(self, names: Collection[str] | None) -> ChatTemplate:
        """Return a template that shows only the tools with these names, or all of them for None."""
        if names is None or self._tools is None:
            return self
        known = self._narrowed.get(frozenset(names))
        if known is None:
            shown = [spec for spec in self._tools if spec.get("function", spec).get("name") in names]
            known = self._narrowed[frozenset(names)] = copy.copy(self)
            known._tools, known._skeletons, known._narrowed = shown or None, {}, {}
        return known

    def render(self, chat: Chat, *, prompts: bool = True) -> str:
        """Render a whole conversation.

        Args:
            chat: The conversation.
            prompts: Whether the header of the next answer follows.

        Results without a name get the name of the tool from the call that they answer. Arguments of calls may
        be objects or, as OpenAI's API has them, JSON texts; the template gets what it can write.

        Raises:
            ValueError: If the template rejects the conversation, and arguments of a call are no JSON object.
            Exception: If the template rejects it for another reason; templates raise any type.
        """
        try:
            return self._apply(self._completed(chat), add_generation_prompt=prompts)
        except Exception as error:
            if (problem := _unreadable_call(chat)) is None:
                raise
            raise ValueError(f"the chat template rejects the conversation ({error}); {problem}") from error

    def _apply(self, chat: Chat, *, add_generation_prompt: bool = True) -> str:
        return self._renderer.apply_chat_template(
            [_in_parts(message) if self._in_parts else dict(message) for message in chat],
            tools=self._tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._kwargs,
        )

    def _completed(self, chat: Chat) -> list[dict[str, Any]]:
        """Return messages as the template takes them: results with names, calls in its form."""
        names: dict[Any, Any] = {}
        made: list[dict[str, Any]] = []
        for message in chat:
            one = dict(message)
            if calls := one.get("tool_calls"):
                names.update((call.get("id"), _function(call).get("name")) for call in calls)
                one["tool_calls"] = [_with_arguments(call, as_text=self._takes_text) for call in calls]
                one["content"] = one.get("content") or ""
            name = names.get(one.get("tool_call_id"))
            if name and one["role"] not in SPEAKERS and not one.get("name"):
                one["name"] = self._control.escape(str(name))
            made.append(one)
        return made

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Check whether arguments of calls must be JSON texts; most templates write objects as JSON."""
        accepted: list[bool] = []
        for as_text in (False, True):
            arguments = {"x": _STUB}
            calls = [_with_arguments(_call("call00000", "tool", arguments), as_text=as_text)]
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                text = self._apply([*_question(said), self._result("r", 0)])
            except Exception:  # templates raise any type
                continue
            if _STUB in text and str(arguments) not in text:  # not in Python's syntax
                return as_text
            accepted.append(as_text)
        return next(iter(accepted), False)

    def delta(self, before: Chat, new: Chat, sources: Sequence[int]) -> tuple[str, list[Piece]]:
        """Render what follows an answer.

        Args:
            before: The conversation so far, the answer included. The method "fixed_base" reads only the
                answer, for the names of tools that results lack.
            new: New messages.
            sources: Source of the tokens of each new message, as in `TokenLedger`.

        Returns:
            The text that ends the model's turn, and the pieces behind it: the new messages and the header of
            the next answer.
        """
        named = self._completed([*before[-1:], *new])[len(before[-1:]) :]
        new = [{**message, **escaped_names(message, self._control)} for message in named]
        if not self._parts_are_known and any(isinstance(message.get("content"), list) for message in new):
            self._parts_are_known = True
            self._part_form = next((form for form in _FORMS if self._is_form(form, in_parts=True)), None)
        skeleton = self._skeleton(before, new)
        texts = [(message, text) for message in new for text in _texts(message)]
        owners = [source for message, source in zip(new, sources, strict=True) for _ in _texts(message)]
        written: list[str] = []
        for index, (message, text) in enumerate(texts):
            form = self._part_form if isinstance(message.get("content"), list) else self._form
            found = form(text) if form else self._written(before, new, skeleton, index)
            if found is None:
                return self._rendered_delta(before, new, skeleton)
            written.append(found)
        pieces = [
            Piece(part, BOUNDARY, is_trusted=True)
            if isinstance(part, str)
            else Piece(written[part], owners[part])
            for part in skeleton.parts
        ]
        return skeleton.end, pieces

    def _written(self, before: Chat, new: Chat, skeleton: Skeleton, index: int) -> str | None:
        """Return one text as the template writes it, or None if the text around it changes as well."""
        whole = self._behind_end(self._context(before, new), _with_slots(new, but=index)[0], skeleton)
        parts = [part if isinstance(part, str) else _SLOT.format(part) for part in skeleton.parts]
        at = skeleton.parts.index(index)
        head, tail = "".join(parts[:at]), "".join(parts[at + 1 :])
        if len(whole) < len(head) + len(tail) or not (whole.startswith(head) and whole.endswith(tail)):
            return None
        return whole[len(head) : len(whole) - len(tail)]

    def _rendered_delta(self, before: Chat, new: Chat, skeleton: Skeleton) -> tuple[str, list[Piece]]:
        """Render the new messages at once as one trusted text, with the control tokens in them escaped."""
        clean = [_with_texts(message, self._control.together(_texts(message))) for message in new]
        rest = self._behind_end(self._context(before, new), clean, skeleton)
        return skeleton.end, [Piece(rest, BOUNDARY, is_trusted=True)]

    def _skeleton(self, before: Chat, new: Chat) -> Skeleton:
        empty, count = _with_slots(new)
        if self.method == "prefix":
            return self._parted(self._context(before, new), empty, count)
        # Most templates do not write the ids of calls; those that do write other text for other ids.
        plain = _with_plain_ids(empty)
        shared = "any ids: " + json.dumps(plain, sort_keys=True, default=repr)
        if (found := self._skeletons.get(shared)) is not None:
            return found
        key = json.dumps(empty, sort_keys=True, default=repr)
        if (found := self._skeletons.get(key)) is not None:
            return found
        found = self._parted(self._base(empty), empty, count)
        # An id that is the plain one already tells nothing about other ids.
        all_differ = all(one is other or one != other for one, other in zip(empty, plain, strict=True))
        if all_differ and shared not in self._skeletons:
            self._keep(shared, found if found == self._parted_plain(plain, count) else None)
        self._keep(key, found)
        return found

    def _keep(self, key: str, skeleton: Skeleton | None) -> None:
        if len(self._skeletons) >= _MAX_SKELETONS:
            self._skeletons.clear()
        self._skeletons[key] = skeleton

    def _parted_plain(self, plain: Chat, count: int) -> Skeleton | None:
        try:
            return self._parted(self._base(plain), plain, count)
        except Exception:  # a template that wants other ids; they raise any type
            return None

    def _parted(self, context: Chat, empty: Chat, count: int) -> Skeleton:
        """Render slots behind a context that ends in a stub, and part what the template writes there."""
        rest = self._behind_stub(context, empty)
        before_texts, slot, _ = rest.partition(_SLOT.format(0))
        at, end = self._find_end(before_texts if slot else rest, is_call="tool_calls" in context[-1])
        return Skeleton(rest[:at], end, _parts(rest[at + len(end) :], count))

    def _behind_stub(self, context: Chat, new: Chat) -> str:
        """Render new messages behind a context that ends in a stub; return the text behind the stub."""
        _, stub, rest = self.render([*context, *new]).rpartition(_STUB)
        if not stub:
            raise ValueError("it omits or changes the text of an answer")
        return rest

    def _behind_end(self, context: Chat, new: Chat, skeleton: Skeleton) -> str:
        """Render new messages as `_behind_stub` does; return the text behind the end of the turn."""
        rest, turn = self._behind_stub(context, new), skeleton.lead + skeleton.end
        if not rest.startswith(turn):
            raise ValueError("the text that ends an answer depends on the messages behind it")
        return rest[len(turn) :]

    def _find_end(self, text: str, *, is_call: bool) -> tuple[int, str]:
        """Return where a turn ends in the text between an answer and the next message, and its end."""
        begin = 0
        plain = self._plain_end if is_call else None
        for token in self._call_tokens if is_call else ():
            at = text.find(token, begin)
            begin = begin if at < 0 else at + len(token)
        for ends in (() if plain is None else (plain,), self.ends, self.special):
            found = [(text.find(end, begin), -len(end), end) for end in ends if end in text[begin:]]
            if found:
                at, _, end = min(found)
                return at, end
        raise ValueError(f"no token that ends a turn stands behind an answer, where it writes {text!r}")

    @functools.cached_property
    def _plain_end(self) -> str | None:
        """Text that ends an answer without calls which a user answers; None if there is none."""
        try:
            rest = self._behind_stub(_question(_answer(_STUB)), _question())
            return self._find_end(rest, is_call=False)[1]
        except Exception:  # templates raise any type
            return None

    @functools.cached_property
    def _call_tokens(self) -> tuple[str, ...]:
        """Special tokens between the last argument of a call and its end, where another call may follow."""
        stubs = [_call(f"call0000{index}", "tool", {"x": word}) for index, word in enumerate((_STUB, _OTHER))]
        rests: list[str] = []
        for calls in (stubs, stubs[:1]):
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                rests.append(
                    self._behind_stub(_question(answer), list(map(self._result, "rr", range(len(calls)))))
                )
            except Exception:  # templates raise any type
                return ()
        if _OTHER not in rests[0]:
            return ()
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*rests, strict=False))
        )
        known = re.compile(
            "|".join(map(re.escape, sorted({*self.special, *self.ends}, key=len, reverse=True)))
        )
        found = [match[0] for match in known.finditer(rests[1]) if match.end() <= shared]
        ends = {self._plain_end, self._last_token(self._said(_question(answer)) or "")}
        return tuple(itertools.takewhile(lambda token: token not in ends, found))

    def _said(self, chat: Chat) -> str | None:
        """Return the text behind the stub that ends a conversation, without the header of a next answer.

        None if the template rejects such a conversation, or omits the stub.
        """
        try:
            text = self._apply(self._completed(chat), add_generation_prompt=False)
        except Exception:  # templates raise any type
            return None
        _, stub, said = text.rpartition(_STUB)
        return said if stub else None

    def _last_token(self, text: str) -> str | None:
        """Return the special token that ends a text, if one does."""
        return next((one for one in (*self.ends, *self.special) if text.rstrip().endswith(one)), None)

    @functools.cached_property
    def call_end(self) -> str:
        """Text that the template writes between the last argument of a call and the end of the turn."""
        return self._called[1].lead

    @functools.cached_property
    def _called(self) -> tuple[Chat, Skeleton]:
        """A conversation with a call, and the skeleton of a result behind it."""
        new = [self._result("r", 0)]
        context = self._base(new)
        return context, self._parted(context, *_with_slots(new))

    def _context(self, before: Chat, new: Chat) -> Chat:
        """Return the conversation behind which new messages are rendered; its last answer is a stub."""
        return [*before[:-1], _answer(_STUB)] if self.method == "prefix" else self._base(new)

    def _base(self, new: Chat) -> Chat:
        """Return a short conversation behind which the template accepts these messages."""
        called = [message for message in new if message["role"] not in ("user", "system", "assistant")]
        problem: Exception | None = None
        for stub in _stubs(called):
            base = [{"role": "user", "content": "u"}, stub]
            try:
                if _STUB in self.render([*base, *new]):
                    return base
            except Exception as error:  # templates raise any type
                problem = error
        raise ValueError(
            f"it cannot render the messages {[m['role'] for m in new]} behind an answer: {problem}"
        )

    def _takes_strings(self) -> bool:
        """Check whether contents may be strings; the templates of some processors want lists of parts."""
        self._in_parts = False
        try:
            return "qvj" in self.render([{"role": "user", "content": "qvj"}])
        except Exception:  # templates raise any type
            return False

    def _probe(self) -> None:
        """Choose the method, and check it on conversations of several turns."""
        problems: list[str] = []
        for method in ("fixed_base", "prefix"):
            self.method = method
            self._skeletons.clear()
            try:
                self._prove()
                return
            except Exception as error:
                problems.append(f"{method}: {error}")
        raise ValueError(
            "this chat template cannot be continued token by token. "
            + "; ".join(problems)
            + f". Pass another chat_template=, or another tool_role= than {self._tool_role!r} here"
            " and to ToolCompose, or set use_inference_chat_template=True"
        )

    def _prove(self) -> None:
        self._form = next((form for form in _FORMS if self._is_form(form)), None)
        self._prove_ends()
        self.appends = self._extends("")
        self.keeps_reasoning = self.appends and self._extends(_THOUGHT)
        if self.appends:
            return
        if self.method == "prefix":
            raise ValueError("it renders earlier messages differently once others follow")
        self._prove_independence()

    def _result(self, content: str | list[Any], index: int) -> dict[str, Any]:
        return {
            "role": self._tool_role,
            "content": content,
            "tool_call_id": f"call0000{index}",
            "name": "tool",
        }

    def _is_form(self, form: Callable[[str], str], *, in_parts: bool = False) -> bool:
        """Check whether the template changes the texts of results in this way."""
        if in_parts:
            self._part_form = form
        else:
            self._form = form
        for sample in _SAMPLES:
            two = [{"type": "text", "text": text} for text in (sample, f"\n{sample}")]
            new = [self._result(two if in_parts else sample, 0)]
            chat = _question(_answer("a"))
            end, pieces = self.delta(chat, new, [0])
            skeleton = self._skeleton(chat, new)
            wanted = (skeleton.end, self._behind_end(self._context(chat, new), new, skeleton))
            if (end, "".join(piece.text for piece in pieces)) != wanted:
                return False
        return True

    def _extends(self, thought: str) -> bool:
        """Check whether rendered deltas add up to the rendering of the whole conversation."""
        chat: list[Mapping[str, Any]] = [*_question()]
        text = self.render(chat)
        for turn in (
            [self._result("42", 0)],
            [self._result("43", 1), self._result("44", 2)],
            [{"role": "user", "content": "and then?"}],
            [self._result("45", 3)],
        ):
            answer = _answer(thought + "a")
            chat.append(answer)
            try:
                end, pieces = self.delta(chat, turn, [0] * len(turn))
                chat += turn
                text += str(answer["content"]) + end + "".join(piece.text for piece in pieces)
                if self.render(chat) != text:
                    return False
            except Exception:  # it does not render such a conversation at all
                return False
        return True

    def _prove_ends(self) -> None:
        """Check that a token which is not known to end turns does so where the template ends a call."""
        context, skeleton = self._called
        said, turn = self._said(context) or "", skeleton.lead + skeleton.end
        if skeleton.end not in self.ends and said.startswith(turn) and said[len(turn) :].strip():
            raise ValueError(
                f"an answer with a call ends with {said!r}, and none of {list(self.ends)} ends it; give the "
                f"token that ends calls in stop_token_ids, perhaps {self._last_token(said)!r}"
            )

    def _prove_independence(self) -> None:
        """Check that a delta is the same late in a conversation whose calls the template sees."""
        chat: list[Mapping[str, Any]] = [*_question()]
        for new in (*([self._result(str(40 + index), index)] for index in range(3)), _question()):
            stub = self._base(new)[-1]
            skeleton = self._skeleton([*chat, stub], new)
            rest = self._behind_end([*chat, stub], new, skeleton)
            found, pieces = self.delta([*chat, stub], new, [0])
            if (found, "".join(piece.text for piece in pieces)) != (skeleton.end, rest):
                raise ValueError(f"the text behind an answer depends on the messages before it: {rest!r}")
            chat += [stub, *new]


def _stubs(called: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield answers that results can follow, the likeliest first."""
    plain: dict[str, Any] = {"role": "assistant", "content": _STUB}
    if not called:
        yield plain
        return
    for some in (called, called[:1]):
        calls = [
            _call(message.get("tool_call_id") or f"{index:09d}", message.get("name") or "tool", {"x": _STUB})
            for index, message in enumerate(some)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield plain


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a call that holds its name and arguments."""
    return fields_of(call.get("function")) or call


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; as they are if they cannot be read as one."""
    arguments = _function(call).get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = read_json(arguments)
    except ValueError:
        return arguments
    return arguments if fields_of(found) is None else found


def _with_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a call with its arguments as an object, or as JSON text."""
    arguments = _arguments(call)
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made = {**_function(call), "arguments": arguments}
    return made if _function(call) is call else {**call, "function": made}


def _unreadable_call(chat: Chat) -> str | None:
    """Describe the first call of a conversation whose arguments are no JSON object; None if all are."""
    for number, message in enumerate(chat):
        for call in message.get("tool_calls") or ():
            if fields_of(call) is None:
                return f"message {number} of it has a call that is no object: {one_line(repr(call), 120)}"
            if fields_of(arguments := _arguments(call)) is None:
                name = _function(call).get("name")
                said = one_line(str(arguments), 120)
                return f"message {number} of it calls {name!r} with arguments that are no JSON object: {said}"
    return None


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message, in order."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [content or ""]
    return [part["text"] for part in content if isinstance(part.get("text"), str)]


def _with_slots(new: Chat, but: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return messages with slots in place of their texts, except text `but`, and the number of texts."""
    count = 0
    made: list[dict[str, Any]] = []
    for message in new:
        texts = _texts(message)
        slots = [text if count + i == but else _SLOT.format(count + i) for i, text in enumerate(texts)]
        made.append(_with_texts(message, slots))
        count += len(texts)
    return made, count


def _with_plain_ids(new: Chat) -> list[Mapping[str, Any]]:
    """Return messages with other ids of calls; two messages have the same one if they had before."""
    ids: dict[Any, str] = {}
    return [
        {**message, "tool_call_id": ids.setdefault(message["tool_call_id"], f"vjq{len(ids):06d}")}
        if isinstance(message.get("tool_call_id"), str)
        else message
        for message in new
    ]


def _with_texts(message: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return a message with other texts, and media without their data, which templates do not write."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**message, "content": texts[0]}
    left = iter(texts)
    parts = [
        {**part, "text": next(left)}
        if isinstance(part.get("text"), str)
        else {"type": kind_of(part) or part.get("type")}
        for part in content
    ]
    return {**message, "content": parts}


def _parts(rest: str, count: int) -> tuple[str | int, ...]:
    """Part a text at its slots, which must stand in their order."""
    parts: list[str | int] = []
    for index in range(count):
        before, slot, rest = rest.partition(_SLOT.format(index))
        if not slot:
            raise ValueError("it omits or moves the text of a message")
        parts += [before, index]
    return (*parts, rest)


def _question(*more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": "q"}, *more]


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)
