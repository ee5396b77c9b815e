"""Compare the ids of a trajectory with an encoding of its text: training must see the ids of inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_agentic.messages import content_text
from torchrl_agentic.tokens.chat_template import Chat, ChatTemplate
from torchrl_agentic.tokens.encoding import Encoder, Piece, decode
from torchrl_agentic.tokens.ledger import BOUNDARY, SAMPLED, TokenLedger, TokenSpan

Mode = Literal["strict", "ignore_strippable", "disable"]
_STRIPPABLE = str.maketrans("", "", "\n\t\r ")
_CONTEXT_TOKENS, _EXCERPT_CHARS = 8, 120
_WARNING = (
    "Inconsistent training and inference tokenization detected. This may lead to unexpected behavior during "
    "training. Please review your chat template to determine if this is intentional. For more information, "
    "refer to the multiturn README.md."
)
"""verl's warning, word for word, so that a search of the logs finds it."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference between the ids of a trajectory and those of its text.

    Attributes:
        tokens: Number of ids that differ.
        kept: Text of the trajectory's ids, around the place where the difference begins.
        wanted: Text of the ids of the rendered conversation, around the same place.
    """

    tokens: int
    kept: str
    wanted: str

    def __str__(self) -> str:
        return (
            f"{_WARNING} {self.tokens} tokens differ: the ids of the trajectory decode to {self.kept!r}; "
            f"the conversation, rendered and encoded at once, has {self.wanted!r}"
        )


def find_drift(
    ledger: TokenLedger,
    chat: Chat,
    *,
    template: ChatTemplate,
    encoder: Encoder,
    tokenizer: Any,
    mode: Mode = "strict",
) -> Drift | None:
    """Compare the ids of a trajectory with those of its text, rendered and encoded at once.

    If the chat template appends (`ChatTemplate.appends`), the text is also compared with the rendering of the
    whole conversation up to the last answer.

    Args:
        ledger: Tokens of the whole trajectory.
        chat: Messages of the whole trajectory.
        template: Renders the conversation.
        encoder: Encodes the text.
        tokenizer: Decodes the ids.
        mode: "strict"; "ignore_strippable" ignores differences in newlines, tabs, carriage returns and
            spaces; "disable" compares nothing.

    Returns:
        The difference, or None if there is none.
    """
    if mode == "disable":
        return None
    ids, spans = list(ledger.ids), list(ledger.spans())
    if encoder.encode_text(decode(tokenizer, ids)) != ids or _has_control(ids, spans, encoder):
        texts = _texts(ids, spans, tokenizer)
        pieces = [
            Piece(text, span.source, is_trusted=_is_trusted(span))
            for span, text in zip(spans, texts, strict=True)
        ]
        drift = _difference(ids, encoder.encode(pieces).ids, tokenizer, mode)
        if drift is not None:
            return drift
    return _text_drift(ids, spans, chat, template, encoder, tokenizer, mode)


def _is_trusted(span: TokenSpan) -> bool:
    return span.start == 0 or span.source in (SAMPLED, BOUNDARY)


def _has_control(ids: Sequence[int], spans: Sequence[TokenSpan], encoder: Encoder) -> bool:
    """Check whether there are control tokens where only plain text may be."""
    return any(
        not encoder.control.isdisjoint(ids[span.start : span.stop]) for span in spans if not _is_trusted(span)
    )


def _text_drift(
    ids: Sequence[int],
    spans: Sequence[TokenSpan],
    chat: Chat,
    template: ChatTemplate,
    encoder: Encoder,
    tokenizer: Any,
    mode: Mode,
) -> Drift | None:
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    sampled = [span for span in spans if span.source == SAMPLED]
    thinks = any("</think>" in content_text(chat[index].get("content")) for index in answers)
    if not (answers and sampled and (template.keeps_reasoning or (template.appends and not thinks))):
        return None
    if answers[-1] == 0 or chat[answers[-1] - 1]["role"] == "assistant":
        return None  # templates render the last message differently from one in the middle
    if any(not isinstance(message.get("content"), str | None) for message in chat):
        return None  # the placeholder of an image has no text to compare
    text = decode(tokenizer, ids[: sampled[-1].start])
    rendered = template.render(chat[: answers[-1]])
    if text == rendered:
        return None
    kept, wanted = encoder.encode_text(text), encoder.encode_text(rendered)
    return _difference(kept, wanted, tokenizer, mode)


def _difference(kept: list[int], wanted: list[int], tokenizer: Any, mode: Mode) -> Drift | None:
    if kept == wanted:
        return None
    shorter = min(len(kept), len(wanted))
    head = next((i for i in range(shorter) if kept[i] != wanted[i]), shorter)
    tail = next((i for i in range(shorter - head) if kept[-1 - i] != wanted[-1 - i]), shorter - head)
    middles = [ids[head : len(ids) - tail] for ids in (kept, wanted)]
    if mode == "ignore_strippable":
        bare = [decode(tokenizer, ids).translate(_STRIPPABLE) for ids in middles]
        if bare[0] == bare[1]:
            return None
    first, after = max(0, head - _CONTEXT_TOKENS), _CONTEXT_TOKENS - tail
    excerpts = [decode(tokenizer, ids[first : len(ids) + after])[:_EXCERPT_CHARS] for ids in (kept, wanted)]
    return Drift(max(map(len, middles)), *excerpts)


def _texts(ids: Sequence[int], spans: Sequence[TokenSpan], tokenizer: Any) -> list[str]:
    """Return the text of each span."""
    texts = [decode(tokenizer, ids[span.start : span.stop]) for span in spans]
    if "".join(texts) == decode(tokenizer, ids):
        return texts
    # Here the text of a token depends on the tokens before it, as with SentencePiece's leading space.
    wholes = [decode(tokenizer, ids[: span.stop]) for span in spans]
    return [whole[len(before) :] for before, whole in zip(["", *wholes], wholes, strict=False)]
