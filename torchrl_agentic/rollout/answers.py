"""What stands around the generation: the prompt's ids before it, a message and log-probs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_agentic.ledger import PROMPT
from torchrl_agentic.messages import Message
from torchrl_agentic.parsers.base import Tools, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of, escaper
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.drift import decode
from torchrl_agentic.transforms.encoding import Encoder, Piece, escaped
from torchrl_agentic.transforms.template import ChatTemplate
from torchrl_agentic.transforms.tokens import ATTENTION, TOKENS, stop_ids


class HistoryToTokens(TensorDictModuleBase):
    """Renders and encodes whole conversations, as prompts: for environments without a `TurnTokenizer`.

    The ids of earlier turns are made from their text, so they may be others than were sampled. In what tools
    wrote, control tokens are taken apart. Reads ("history", "prompt"); writes ("tokens", "prompt") and
    ("masks", "all_attention_mask").
    """

    def __init__(self, tokenizer: Any, tools: Tools = (), chat_template: str | None = None) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt")]
        self.out_keys: Any = [TOKENS, ATTENTION]
        self.encoder, self._control = (
            Encoder(tokenizer),
            escaper(tuple(control_tokens_of(tokenizer).values())),
        )
        self.template = ChatTemplate(
            tokenizer,
            chat_template=chat_template,
            tools=specs_of(tools),
            control=self._control,
            provable=False,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the prompt of each row."""
        td, rows = border.leaves(tensordict)
        for row, conversation in zip(rows, border.prompts(td), strict=True):
            chat = [escaped(border.message_dict(one), self._control) for one in border.messages(conversation)]
            text = Piece(self.template.render(chat), PROMPT, is_trusted=True)
            ids = torch.tensor(self.encoder.encode([text]).ids, device=row.device)
            row.set(TOKENS, ids)
            row.set(ATTENTION, torch.ones_like(ids, dtype=torch.bool))
        return td


class TokensToHistory(TensorDictModuleBase):
    """Adds the sampled ids, up to the one that ends the answer, to the history as a message.

    An answer without such an end was cut off: it is not complete, and its calls do not run. Reads ("history",
    "prompt") and ("tokens", "response"); writes ("history", "response") and ("history", "full").
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt"), ("tokens", "response")]
        self.out_keys: Any = [("history", "response"), ("history", "full")]
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids(tokenizer, stop_token_ids))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer in each row."""
        td, rows = border.leaves(tensordict)
        return add_answers(td, [self._message(row.get(("tokens", "response")).tolist()) for row in rows])

    def _message(self, ids: list[int]) -> Message:
        stop = next((index for index, token in enumerate(ids) if token in self.stops), None)
        return Message("assistant", decode(self.tokenizer, ids[:stop]), is_complete=stop is not None)


class FullSequence(TensorDictModuleBase):
    """Describe ("tokens", "full") to losses: which tokens this turn sampled, and with what log-probabilities.

    Reads ("tokens", "response") and ("tokens", "full"), and ("log_probs", "response") if asked to. Writes
    ("masks", "all_assistant_mask"), bool, true for the answer alone: earlier answers in the prompt belong to
    the steps that sampled them. Writes ("log_probs", "full"), in nats, NaN for the prompt.

    Args:
        log_probs: Whether to write log-probabilities.
    """

    def __init__(self, *, log_probs: bool = True) -> None:
        super().__init__()
        self.in_keys: Any = [("tokens", "response"), ("tokens", "full")]
        self.out_keys: Any = [("masks", "all_assistant_mask")]
        self.log_probs = log_probs
        if log_probs:
            self.in_keys.append(("log_probs", "response"))
            self.out_keys.append(("log_probs", "full"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write them in each row."""
        td, rows = border.leaves(tensordict)
        for row in rows:
            full, answer = row.get(("tokens", "full")), len(row.get(("tokens", "response")))
            start = len(full) - answer
            mask = torch.arange(len(full), device=full.device) >= start
            row.set(("masks", "all_assistant_mask"), mask)
            if self.log_probs:
                known = row.get(("log_probs", "response"))
                row.set(("log_probs", "full"), torch.cat([known.new_full((start,), torch.nan), known]))
        return td
