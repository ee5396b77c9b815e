"""TurnTokenizer: the TensorDict border of `tokens/writer.py`, which writes the next prompt of each row."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Unbounded

from torchrl_agentic.messages import StoredMessage
from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.tokens.chat_template import ChatTemplate
from torchrl_agentic.tokens.drift import Mode
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.tokens.writer import ChatEncoder, Side, TokenWriter
from torchrl_agentic.trajectory.episode import OpenTurn
from torchrl_agentic.trajectory.prompting import EncodingStage
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.dataset_rows import tool_selection
from torchrl_agentic.transforms.pipeline import KnowsResetRows
from torchrl_agentic.transforms.specs import stepped
from torchrl_agentic.transforms.token_rows import (
    ROOM,
    TOKENS_LEFT,
    TokenRow,
    as_token_rows,
    ragged_spec,
    read_rows,
    row_of,
    write_rows,
)
from torchrl_agentic.transforms.turn_transform import TurnTransform, see

TOKENS, ATTENTION = ("tokens", "prompt"), ("masks", "all_attention_mask")
LEDGER = {"mask": torch.bool, "sources": torch.int64, "log_probs": torch.float32}
_RAGGED = {"tokens": {"prompt": torch.int64}, "masks": {"all_attention_mask": torch.bool}, "ledger": LEDGER}
_NEEDS_TOKENS = (
    'TurnTokenizer needs a policy that generates from ("tokens", "prompt"), without padding, and writes '
    '("tokens", "full") behind it: agent_policy(...)'
)


class TurnTokenizer(KnowsResetRows, TurnTransform):
    """Writes ("tokens", "prompt"): exactly the ids so far, then those of the injected messages.

    Put it last in the environment, behind `ToolCompose` and every other transform that adds messages; the
    policy generates from tokens (`agent_policy`). Sampled ids are never re-created from text. Rows are
    ragged: "tokens", "masks" and "ledger" are lazy stacks of rows (`TokenRows`). `TokenWriter` does the work
    for each row, without TensorDict.

    A row whose next prompt would leave no room for an answer ends here, `truncated`, before the engine sees
    that prompt; its tokens end at the bound. Put transforms that write rewards at the end of a trajectory
    behind this one.

    Writes per row, of equal length T: ("tokens", "prompt"), int64; ("masks", "all_attention_mask"), bool, all
    true; ("ledger", "mask"), bool, true if the token was sampled; ("ledger", "sources"), int64, see
    `TokenLedger`; ("ledger", "log_probs"), float32, in nats, NaN where nothing was sampled. Also ("agentic",
    "token_drift"), int64, [*B, 1]: at the end of a trajectory, how many ids differ from those of the whole
    conversation, rendered and encoded at once.

    Args:
        tokenizer: A fast tokenizer with a chat template, whose pad token ends no answer.
        tools: Tools that the template shows: `compose.tools`. A row with a `tool_selection` shows only those.
        chat_template: Replaces the tokenizer's own template.
        template_kwargs: Further arguments of the template, such as `enable_thinking`.
        tool_role: Role of messages with tool results, as in `ToolCompose`.
        stop_token_ids: Ids that end an answer besides `eos_token`, such as Llama's `<|eom_id|>`.
        processor: Processor of a model that takes images or videos. It renders the template, and expands the
            placeholders of media. An image of a tool that it rejects, such as a strip one pixel high, is
            replaced by a line of text in the history too.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory, prompts and answers together; by
            default the context length of the engine, which `agent_policy` reads from the model. The policy's
            answers keep to it too.
        max_tool_response_tokens: Upper bound on the text of a tool result, in tokens; None: no bound. Longer
            results are truncated in the history too; images and videos never are.
        max_tool_response_chars: The same bound in characters.
        tool_response_truncate_side: The part that is kept, as in verl 0.7: "left" keeps the head, "right" the
            tail, "middle" both ends.
        use_inference_chat_template: Render the whole conversation anew each turn, as in production, where
            templates drop earlier reasoning. The cost grows with the conversation, and earlier turns have
            other ids than were sampled, so only each turn's own answer can be trained on, as a row of its own
            (the mask of the prompt is all false). "token_drift" counts the replaced ids.
        tokenization_sanity_check_mode: "strict"; "ignore_strippable" ignores white space; "disable".
        raise_on_drift: Raise RuntimeError for a difference, instead of warning once.

    Attributes:
        tokenizer: The tokenizer.

    Raises:
        ValueError: If the pad token also ends answers, a bound leaves no room for the marker, or the template
            cannot be continued token by token.
        TypeError: If the tokenizer is not a fast tokenizer with a chat template.
    """

    stage: EncodingStage

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Tools = (),
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_role: str = "tool",
        stop_token_ids: Sequence[int] = (),
        processor: Any = None,
        max_trajectory_tokens: int | None = None,
        max_tool_response_tokens: int | None = None,
        max_tool_response_chars: int | None = None,
        tool_response_truncate_side: Side = "middle",
        use_inference_chat_template: bool = False,
        tokenization_sanity_check_mode: Mode = "strict",
        raise_on_drift: bool = False,
    ) -> None:
        encoder = ChatEncoder(
            tokenizer,
            tools=tools,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
            tool_role=tool_role,
            stop_token_ids=stop_token_ids,
            processor=processor,
            max_trajectory_tokens=max_trajectory_tokens,
            max_tool_response_tokens=max_tool_response_tokens,
            max_tool_response_chars=max_tool_response_chars,
            tool_response_truncate_side=tool_response_truncate_side,
            use_inference_chat_template=use_inference_chat_template,
            tokenization_sanity_check_mode=tokenization_sanity_check_mode,
        )
        super().__init__(EncodingStage(encoder, raises_on_drift=raise_on_drift))
        self.tokenizer = tokenizer

    @property
    def chat_encoder(self) -> ChatEncoder:
        """The part that all rows share."""
        return self.stage.encoder

    @property
    def template(self) -> ChatTemplate:
        """Chat template that renders the conversations."""
        return self.chat_encoder.template

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Encode the prompts of the rows that begin; the environment drops those of the other rows."""
        td = border.dense(tensordict_reset)
        conversations = border.prompts(td)
        chosen = self.rows_of_reset(tensordict, len(conversations))
        rows: list[_Row] = []
        for index, (conversation, is_new) in enumerate(zip(conversations, chosen, strict=True)):
            ledger = TokenLedger()
            if is_new:
                chat = _chat(conversation.messages)
                ledger = self.chat_encoder.begin(chat, tools=tool_selection(td, index)).ledger
            rows.append(_Row.of(ledger, td.device))
        self._write_rows(td, rows)
        return super()._reset(tensordict, td)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Continue each row with the tokens that were sampled and the messages that were injected."""
        turns = self.rows.open_turns(tensordict, next_tensordict, self.stage.name)
        befores, afters = border.prompts(tensordict), border.prompts(next_tensordict)
        see(turns, next_tensordict, afters)
        roots = _roots(tensordict, len(befores))
        for turn in turns:
            row = turn.episode.row
            self._prepare(turn, roots[row], tool_selection(tensordict, row), n_before=len(befores[row]))
        self._act(turns)
        rows = [root.row for root in roots]
        for turn in turns:
            row = turn.episode.row
            rows[row] = self._written(turn, roots[row], next_tensordict.device)
            for place, message in turn.shortened.items():
                afters[row] = afters[row].replaced(place, message)
        if any(turn.shortened for turn in turns):
            border.set_prompts(next_tensordict, afters)
        self._write_rows(next_tensordict, rows)
        self._write(next_tensordict, turns)
        self.rows.settle(turns, next_tensordict)
        return next_tensordict

    def _prepare(self, turn: OpenTurn, root: _Root, tools: frozenset[str] | None, *, n_before: int) -> None:
        """Set the writer of the tokens of a turn."""
        turn.effects.pop(self.stage, None)  # written anew if the step is repeated, since it only reads
        turn.n_before, turn.context_length = n_before, root.context_length
        turn.shortened = {}
        # Most templates do not need the earlier messages: reading them would cost more with each turn.
        earlier = _chat(turn.earlier[:n_before]) if self.chat_encoder.reads_whole_chat else []
        if self._renders_anew:
            ledger = TokenLedger()
            ledger.add_prompt(root.row.ids)
            writer = TokenWriter(self.chat_encoder, ledger, messages=earlier, tools=tools)
        else:
            writer = TokenWriter(
                self.chat_encoder,
                messages=earlier,
                tools=tools,
                preceding=len(root.row),
                next_call=root.row.next_call(),
            )
        writer.add_sampled(root.response_ids, root.response_log_probs)
        turn.writer, turn.whole_writer = writer, partial(self._whole, root)

    def _whole(self, root: _Root, turn: OpenTurn) -> TokenWriter:
        """Return a writer with all tokens of a row, for the check for drift."""
        writer = turn.writer
        assert writer is not None
        ledger = root.row.extended(writer.ledger).ledger()
        chat = _chat([turn.shortened.get(place, message) for place, message in enumerate(turn.messages)])
        return TokenWriter(self.chat_encoder, ledger, messages=chat, tools=writer.tools)

    def _written(self, turn: OpenTurn, root: _Root, device: torch.device | None) -> _Row:
        """Return the tokens of a row behind its turn, up to the bound."""
        writer = turn.writer
        assert writer is not None
        row = _Row.of(writer.ledger, device) if self._renders_anew else root.row.extended(writer.ledger)
        left = writer.room(root.context_length)
        # Nothing is sampled behind what does not fit.
        return row.clipped(writer.size + left) if left is not None and left < 0 else row

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Hold tokens that a policy of TorchRL wrote as `TokenRows`; their own form breaks `torch.where`."""
        for key in ("tokens", "masks", "log_probs"):
            as_token_rows(tensordict, key)
        return tensordict, tensordict_

    @property
    def _renders_anew(self) -> bool:
        return self.chat_encoder.use_inference_chat_template

    def _write_rows(self, td: TensorDictBase, rows: Sequence[_Row]) -> None:
        """Write the tokens of all rows of a batch."""
        write_rows(td, "tokens", [row.tokens for row in rows])
        write_rows(td, "masks", [row.masks() for row in rows])
        write_rows(td, "ledger", [row.sources for row in rows])
        bound = self.chat_encoder.max_trajectory_tokens
        if bound is not None:
            left = torch.tensor([bound - len(row) for row in rows], device=td.device)
            td.set(TOKENS_LEFT, left.reshape(td.get("done").shape))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the entries that this transform writes.

        Raises:
            ValueError: If the environment has no ("history", "prompt").
        """
        if "history" not in observation_spec.keys():
            raise ValueError('TurnTokenizer reads ("history", "prompt"): use ChatEnv(input_mode="history")')
        shape, device = observation_spec.shape, observation_spec.device
        for key, names in _RAGGED.items():
            observation_spec[key] = ragged_spec(names, shape, device)
        observation_spec = super().transform_observation_spec(observation_spec)
        each = torch.Size((*shape, 1))
        if self.chat_encoder.max_trajectory_tokens is not None:
            observation_spec[TOKENS_LEFT] = Unbounded(shape=each, dtype=torch.int64, device=device)
        return observation_spec

    def __repr__(self) -> str:
        return f"TurnTokenizer({self.tokenizer.name_or_path!r}, deltas by {self.template.method})"


def read_ledger(row: TensorDictBase) -> TokenLedger:
    """Read the ledger of one row: ("tokens", "prompt") and the entries under "ledger".

    Args:
        row: A row of a batch, [].
    """
    return _Row(row_of(row.get("tokens")), row_of(row.get("ledger"))).ledger()


@dataclass(frozen=True, slots=True)
class _Row:
    """The prompt of a row, and where its tokens come from.

    Attributes:
        tokens: "prompt", [T].
        sources: The tensors of `LEDGER`, each [T].
    """

    tokens: TokenRow
    sources: TokenRow

    @classmethod
    def of(cls, ledger: TokenLedger, device: torch.device | None) -> _Row:
        ids = list(ledger.ids)
        prompt = column_tensor("q", ids, device)
        return cls(TokenRow({"prompt": prompt}, {"prompt": ids}), TokenRow(_ledger_tensors(ledger, device)))

    def extended(self, new: TokenLedger) -> _Row:
        """Return the row with further tokens: an answer, and what the environment injected behind it."""
        prompt = self.tokens.tensors["prompt"]
        more = _ledger_tensors(new, prompt.device)
        known = self.sources.tensors
        ids = list(new.ids)
        tokens = torch.cat([prompt, column_tensor("q", ids, prompt.device)])
        lists = {"prompt": self.tokens.ids("prompt") + ids} if self.tokens.knows_ids("prompt") else {}
        return _Row(
            TokenRow({"prompt": tokens}, lists),
            TokenRow({name: torch.cat([known[name], more[name]]) for name in LEDGER}),
        )

    def clipped(self, size: int) -> _Row:
        """Return the first tokens of the row."""
        ids = self.tokens.ids("prompt")[:size]
        prompt = TokenRow({"prompt": self.tokens.tensors["prompt"][:size]}, {"prompt": ids})
        return _Row(prompt, TokenRow({name: one[:size] for name, one in self.sources.tensors.items()}))

    @property
    def ids(self) -> list[int]:
        return self.tokens.ids("prompt")

    def __len__(self) -> int:
        return len(self.tokens.tensors["prompt"])

    def masks(self) -> TokenRow:
        prompt = self.tokens.tensors["prompt"]
        return TokenRow({"all_attention_mask": torch.ones_like(prompt, dtype=torch.bool)})

    def next_call(self) -> int:
        """Return the number of the next call: one more than the highest that has tokens here."""
        return max(0, int(self.sources.tensors["sources"].max()) + 1) if len(self) else 0

    def ledger(self) -> TokenLedger:
        ids = self.ids
        sources, log_probs = (self.sources.tensors[name].tolist() for name in ("sources", "log_probs"))
        ledger = TokenLedger()
        start = 0
        for stop in range(1, len(ids) + 1):
            if stop < len(ids) and (sources[stop] == SAMPLED) == (sources[start] == SAMPLED):
                continue
            if sources[start] == SAMPLED:
                known = log_probs[start:stop]
                ledger.add_sampled(ids[start:stop], None if all(map(math.isnan, known)) else known)
            else:
                ledger.add_injected(ids[start:stop], sources[start:stop])
            start = stop
        return ledger


@dataclass(frozen=True, slots=True)
class _Root:
    """Output of the policy in a row.

    Attributes:
        row: The prompt.
        response_ids: Ids of the answer.
        response_log_probs: Their log-probabilities, in nats, or None.
        context_length: Number of tokens that the engine takes, if the policy wrote how much room was left.
    """

    row: _Row
    response_ids: list[int]
    response_log_probs: list[float] | None
    context_length: int | None


def _roots(tensordict: TensorDictBase, size: int) -> list[_Root]:
    """Read the root of a step; rows that the policy did not answer have an empty response."""
    tokens, ledgers = read_rows(tensordict, "tokens"), read_rows(tensordict, "ledger")
    if tokens is None or ledgers is None:
        raise RuntimeError(_NEEDS_TOKENS)
    log_probs = read_rows(tensordict, "log_probs") or [None] * size
    room = tensordict.get(ROOM, None)
    rooms = [None] * size if room is None else room.reshape(-1).tolist()
    active = stepped(tensordict)
    roots: list[_Root] = []
    for row, ledger, known, left, is_active in zip(tokens, ledgers, log_probs, rooms, active, strict=True):
        prompt, full = row.tensors.get("prompt"), row.tensors.get("full")
        if not is_active:
            kept = _Row(row.keep(lambda name: name == "prompt"), ledger.keep(LEDGER.__contains__))
            roots.append(_Root(kept, [], None, None))
            continue
        if prompt is None or full is None or not torch.equal(full[: len(prompt)], prompt):
            raise RuntimeError(_NEEDS_TOKENS)
        response = row.ids("response") if row.knows_ids("response") else full[len(prompt) :].tolist()
        values = None if known is None else known.tensors.get("response")
        roots.append(
            _Root(
                _Row(row, ledger),
                response,
                None if values is None else values.clamp(max=0).tolist(),
                None if left is None else len(prompt) + int(left),
            )
        )
    return roots


def _ledger_tensors(ledger: TokenLedger, device: torch.device | None) -> dict[str, torch.Tensor]:
    columns = ledger.columns()
    sources = column_tensor("q", columns.sources, device)
    log_probs = column_tensor("f", columns.log_probs, device)
    return {"mask": sources == SAMPLED, "sources": sources, "log_probs": log_probs}


def _chat(messages: Sequence[StoredMessage]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]
