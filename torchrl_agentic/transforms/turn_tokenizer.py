"""TurnTokenizer: the next prompt of each row, token by token."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from torchrl_agentic.errors import MissingExtra, check_count
from torchrl_agentic.parsers.base import Tools, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of, escaper
from torchrl_agentic.tokens import media
from torchrl_agentic.tokens.chat_template import ChatTemplate
from torchrl_agentic.tokens.drift import INCONSISTENT, Mode, find_drift
from torchrl_agentic.tokens.encoding import Encoder, Piece, escaped
from torchrl_agentic.tokens.ledger import BOUNDARY, PROMPT, SAMPLED, TokenLedger
from torchrl_agentic.tokens.truncate import Clip, Side
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.dataset_rows import tool_selection
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.specs import (
    ROOM,
    TOKENS_LEFT,
    mark_ended,
    spec_with_truncated,
    truncate,
    with_truncated,
)

logger = logging.getLogger(__name__)

TOKENS, ATTENTION = ("tokens", "prompt"), ("masks", "all_attention_mask")
LEDGER = {"mask": torch.bool, "sources": torch.int64, "log_probs": torch.float32}
_DRIFT = (specs.KEY, "token_drift")

Messages = list[dict[str, Any]]


class TurnTokenizer(Transform):
    """Writes ("tokens", "prompt"): exactly the ids so far, then those of the messages that tools put in.

    Put it last in the environment, behind `ToolCompose` and whatever else adds messages; the policy generates
    from tokens (`agent_policy`). Sampled ids are never made again from text. Rows are ragged: a batch is a
    lazy stack.

    A row whose next prompt would leave no room for an answer ends here, `truncated`, before the engine sees
    that prompt. Put transforms that write rewards at the end of a trajectory behind this one.

    Writes per row, of equal length: ("tokens", "prompt") int64; ("masks", "all_attention_mask") bool, all
    true; ("ledger", "mask") bool, whether the token was sampled; ("ledger", "sources") int64, see
    `TokenLedger`; ("ledger", "log_probs") float32, in nats, NaN where nothing was sampled. And ("agentic",
    "token_drift") int64, [*B, 1]: at the end of a trajectory, how many ids differ from those of the whole
    conversation, rendered and encoded at once.

    Args:
        tokenizer: a fast one, with a chat template, whose pad token is none that ends an answer.
        tools: what the template shows: `compose.tools`; to a row that has a `tool_selection`, those alone.
        chat_template: instead of the tokenizer's own.
        template_kwargs: more for the template, such as `enable_thinking`.
        tool_role: of messages with results, as `ToolCompose` has it.
        stop_token_ids: what else than `eos_token` ends an answer, such as Llama's `<|eom_id|>`.
        processor: of a model that sees images or videos; it renders, and says what stands for each. One from
            a tool that it refuses, such as a strip a pixel high, becomes a line of text in the history too.
        max_trajectory_tokens: Tokens that a trajectory may have, prompts and answers together; by default
            what the engine takes, which `agent_policy` finds out. The policy's answers keep to it too.
        max_tool_response_tokens: of a result's text; None: no bound. A longer one is cut in the history too.
            Images and videos never are.
        max_tool_response_chars: the same in characters.
        tool_response_truncate_side: the part that is kept, as in verl 0.7: "left" keeps the head, "right" the
            tail, "middle" both ends.
        use_inference_chat_template: render the whole conversation anew each turn, as in production, where
            templates drop earlier reasoning. It costs: the time grows with the conversation, and earlier
            turns have other ids than were sampled, so that only each turn's own answer can be trained on, as
            a row of its own (the mask of the prompt is all false). "token_drift" counts the replaced ids.
        tokenization_sanity_check_mode: "strict"; "ignore_strippable": white space may differ; "disable".
        raise_on_drift: whether a difference raises instead of warning once.

    Raises:
        ValueError: the pad token ends answers too, a bound leaves no room for the marker, or the template
            cannot be continued token by token; the message says why.
        TypeError: the tokenizer is not a fast one.
    """

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
        super().__init__()
        if tokenization_sanity_check_mode not in ("strict", "ignore_strippable", "disable"):
            raise ValueError(
                "tokenization_sanity_check_mode is strict, ignore_strippable or disable; "
                f"got {tokenization_sanity_check_mode!r}"
            )
        check_count("max_trajectory_tokens", max_trajectory_tokens)
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.max_trajectory_tokens = max_trajectory_tokens
        self.expansions = media.Expander(processor)
        self.stop_token_ids = stop_ids(tokenizer, stop_token_ids)
        self.encoder, self._control = (
            Encoder(tokenizer),
            escaper(tuple(control_tokens_of(tokenizer).values())),
        )
        self.clip = Clip(max_tool_response_tokens, max_tool_response_chars, tool_response_truncate_side)
        marker = self.clip.marker.format(omitted=10**9)
        if max_tool_response_tokens is not None and self._count(marker) > max_tool_response_tokens:
            raise ValueError(
                f"max_tool_response_tokens={max_tool_response_tokens} has no room for the marker"
            )
        added = tokenizer.added_tokens_decoder
        self.template = ChatTemplate(
            processor if processor is not None else tokenizer,
            chat_template=chat_template,
            tools=specs_of(tools),
            tool_role=tool_role,
            kwargs=template_kwargs,
            ends=[tokenizer.convert_ids_to_tokens(token) for token in self.stop_token_ids],
            special=[token.content for token in added.values() if token.special],
            control=self._control,
            provable=not use_inference_chat_template,
        )
        self.use_inference_chat_template = use_inference_chat_template
        self.sanity_check_mode: Mode = tokenization_sanity_check_mode
        self.raise_on_drift = raise_on_drift
        self._warned = False
        self._mask: torch.Tensor | None = None

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take note of the mask: a `DataLoadingPrimer` makes a new TensorDict for the reset, without it."""
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Encode the prompts of the rows that begin; the others' are dropped by the environment."""
        stack, rows = border.leaves(tensordict_reset)
        mask, self._mask = tensordict.get("_reset", self._mask), None
        chosen = [True] * len(rows) if mask is None else mask.reshape(len(rows), -1).any(-1).tolist()
        for row, conversation, begins in zip(rows, border.prompts(stack), chosen, strict=True):
            ledger = TokenLedger()
            if begins:
                chat = _chat(border.messages(conversation))
                ledger.prompt(self._prompt_ids(chat, self._shown(row)))
            self._write(row, None, ledger)
        drift = torch.zeros_like(stack.get("done"), dtype=torch.int64)
        return with_truncated(stack.set(_DRIFT, drift))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Continue each row by what was sampled and what was put in."""
        stack, rows = border.leaves(next_tensordict)
        _, roots = border.leaves(tensordict)
        befores, afters = border.prompts(tensordict), border.prompts(stack)
        done, active = stack.get("done").reshape(-1).tolist(), stepped(tensordict)
        drifts: list[int] = []
        full: list[bool] = [False] * len(rows)
        for index, (root, row, before, after) in enumerate(zip(roots, rows, befores, afters, strict=True)):
            if not active[index]:
                self._write(row, root, TokenLedger())
                drifts.append(0)
                continue
            over, known = done[index], border.length(before) + 1
            conversation = self._mended(after, known)
            if conversation is not after:
                border.inner(row.get("history")).set("prompt", border.AgentHistory.around(conversation))
            messages = border.messages(conversation)
            # A fixed base needs nothing of what went before: reading it would cost more with each turn.
            before_new = _chat(messages[:known]) if over or self._renders_all else []
            drifts.append(self._continue(root, row, before_new, _chat(messages[known:]), over))
            full[index] = not over and self._is_full(root, row)
            if full[index] and not self.use_inference_chat_template:
                drifts[index] = self._drift(row, _chat(messages), self._shown(root))
        shape = stack.get("done").shape
        drift = torch.tensor(drifts, device=stack.device).reshape(shape)
        return self._truncated(stack.set(_DRIFT, drift), full)

    def _is_full(self, root: TensorDictBase, row: TensorDictBase) -> bool:
        """Return whether the next prompt of a row leaves no room for an answer."""
        size, room = len(row.get(TOKENS)), root.get(ROOM, None)
        limits = [self.max_trajectory_tokens, None if room is None else len(root.get(TOKENS)) + int(room)]
        return any(limit is not None and size >= limit for limit in limits)

    def _truncated(self, stack: TensorDictBase, full: Sequence[bool]) -> TensorDictBase:
        """End rows that are full, and close what their trajectories hold open."""
        done = stack.get("done")
        rows = torch.tensor(full, device=done.device).reshape(done.shape)
        truncate(stack, rows)
        if any(full):
            mark_ended(stack, rows, "max_trajectory_tokens")
            for compose in beside(self, ToolCompose):
                compose.end(full, stack)
        return stack

    @property
    def _renders_all(self) -> bool:
        return self.use_inference_chat_template or self.template.method == "prefix"

    def _continue(
        self, root: TensorDictBase, row: TensorDictBase, before: Messages, added: Messages, over: bool
    ) -> int:
        """Write what a row's next prompt is, with the messages that were added; give its drift.

        before: the conversation up to the answer, where all is rendered or the trajectory is over.
        """
        prompt, full = root.get(TOKENS, None), root.get(("tokens", "full"), None)
        if prompt is None or full is None or not torch.equal(full[: len(prompt)], prompt):
            raise RuntimeError(
                'TurnTokenizer needs a policy that generates from ("tokens", "prompt"), without padding, and '
                'writes ("tokens", "full") behind it: agent_policy(...)'
            )
        new, template = TokenLedger(), self._shown(root)
        if self.use_inference_chat_template:
            new.prompt(self._prompt_ids([*before, *added], template))
            self._write(row, None, new)
            same = min(len(full), len(new))
            differs = full[:same] != torch.tensor(new.ids[:same], device=full.device)
            return len(full) - (int(differs.int().argmax()) if bool(differs.any()) else same)
        sampled = full[len(prompt) :].tolist()
        log_probs = root.get(("log_probs", "response"), None)
        new.sampled(sampled, None if log_probs is None else log_probs.clamp(max=0).tolist())
        calls = int(root.get(("ledger", "sources")).max().item()) + 1 if len(prompt) else 0
        self._add_delta(new, sampled, before, added, max(0, calls), template)
        self._write(row, root, new)
        return self._drift(row, [*before, *added], template) if over else 0

    def _shown(self, row: TensorDictBase) -> ChatTemplate:
        """Give the template with the tools that a row of the data set may use."""
        return self.template.showing(tool_selection(row))

    def _add_delta(
        self,
        new: TokenLedger,
        sampled: Sequence[int],
        before: Messages,
        added: Messages,
        calls: int,
        template: ChatTemplate,
    ) -> None:
        """Add to the sampled tokens those of the messages that follow, and the header of the next answer."""
        sources: list[int] = []
        for message in added:
            is_result = "tool_call_id" in message
            sources.append(calls if is_result else PROMPT)
            calls += is_result
        end, pieces = template.delta(before, added, sources)
        expansions = self.expansions(added)
        found = self.encoder.encode([Piece(end, BOUNDARY, is_trusted=True), *pieces], expansions)
        if self._has_ended(sampled, end, pieces):
            found = found.after(len(end))
        new.add(found.ids, found.sources)

    def _has_ended(self, sampled: Sequence[int], end: str, pieces: Sequence[Piece]) -> bool:
        """Whether the model ended its turn, so that the template's end of it is not needed."""
        if not sampled or sampled[-1] not in self.stop_token_ids:
            return False
        if self.tokenizer.convert_tokens_to_ids(end) == sampled[-1]:
            return True
        # It ended otherwise. Where the template's end is also the header of what follows, that must stay.
        header = pieces[0].text if pieces else ""
        return any(special in header for special in self.template.special)

    def _prompt_ids(self, chat: Messages, template: ChatTemplate) -> list[int]:
        chat = [escaped(message, self._control) for message in chat]
        text = Piece(template.render(chat), PROMPT, is_trusted=True)
        return self.encoder.encode([text], self.expansions(chat)).ids

    def _write(self, row: TensorDictBase, root: TensorDictBase | None, new: TokenLedger) -> None:
        """Write a ledger behind that of the root, or alone."""
        made: dict[Any, torch.Tensor] = {TOKENS: torch.tensor(new.ids, dtype=torch.int64)}
        for name, dtype in LEDGER.items():
            made["ledger", name] = torch.tensor(getattr(new, name), dtype=dtype)
        for key, value in made.items():
            value = value if row.device is None else value.to(row.device)
            row.set(key, value if root is None else torch.cat([root.get(key), value]))
        size = len(row.get(TOKENS))
        row.set(ATTENTION, torch.ones(size, dtype=torch.bool, device=row.device))
        if self.max_trajectory_tokens is not None:
            row.set(TOKENS_LEFT, torch.tensor([self.max_trajectory_tokens - size], device=row.device))

    def _mended(self, conversation: border.Conversation, known: int) -> border.Conversation:
        """Cut results that are too long, and let no image be one that the processor refuses."""
        messages = border.messages(conversation)
        mended: dict[int, TensorDictBase] = {}
        for index in range(known, len(messages)):
            message = border.message_dict(messages[index])
            if "tool_call_id" in message:
                content = self._mended_content(message["content"])
                if content != message["content"]:
                    mended[index] = border.with_content(messages[index], content)
        if not mended:
            return conversation
        return border.conversation([mended.get(index, message) for index, message in enumerate(messages)])

    def _mended_content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.clip(content, self._count)
        if not isinstance(content, list):
            return content
        parts = [self._shown_part(part) for part in content]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        cut = iter(self.clip.together(texts, self._count))
        parts = [{**part, "text": next(cut)} if isinstance(part.get("text"), str) else part for part in parts]
        return [part for part in parts if part.get("text") != ""]

    def _shown_part(self, part: dict[str, Any]) -> dict[str, Any]:
        """Give a part as it is, or a text in place of what the processor refuses."""
        kind = media.kind_of(part)
        if kind is None:
            return part
        try:
            self.expansions.text(part, kind)
        except MissingExtra:
            raise
        except Exception as error:  # a processor raises whatever it likes
            if not self.expansions.takes(kind):
                raise
            logger.warning("the processor refuses a tool's %s: %s", kind, error)
            return {"type": "text", "text": f"[{kind} that cannot be shown: {str(error)[:200]}]"}
        return part

    def _count(self, text: str) -> int:
        return len(self.encoder.encode([Piece(text, 0)]).ids)

    def _drift(self, row: TensorDictBase, chat: Messages, template: ChatTemplate) -> int:
        if self.sanity_check_mode == "disable":
            return 0
        found = find_drift(
            read_ledger(row),
            chat,
            template=template,
            encoder=self.encoder,
            tokenizer=self.tokenizer,
            mode=self.sanity_check_mode,
        )
        if found is None:
            return 0
        text = (
            f"{INCONSISTENT} {found.tokens} tokens differ: the ids of the trajectory say {found.kept!r}; "
            f"rendered and encoded at once, the conversation says {found.wanted!r}"
        )
        if self.raise_on_drift:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(f"{text}. Later ones are only counted, in {_DRIFT}", stacklevel=2)
        return found.tokens

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add what is written.

        Raises:
            ValueError: no `ToolCompose`, nor anything else, keeps a history.
        """
        if "history" not in observation_spec.keys():
            raise ValueError('TurnTokenizer reads ("history", "prompt"): use ChatEnv(input_mode="history")')
        shape, device = observation_spec.shape, observation_spec.device
        ragged = torch.Size((*shape, -1))
        for key, dtype in (
            (TOKENS, torch.int64),
            (ATTENTION, torch.bool),
            *((("ledger", name), dtype) for name, dtype in LEDGER.items()),
        ):
            observation_spec[key] = Unbounded(shape=ragged, dtype=dtype, device=device)
        if specs.KEY not in observation_spec.keys():
            observation_spec[specs.KEY] = Composite(shape=shape, device=device)
        each = torch.Size((*shape, 1))
        observation_spec[_DRIFT] = Unbounded(shape=each, dtype=torch.int64, device=device)
        if self.max_trajectory_tokens is not None:
            observation_spec[TOKENS_LEFT] = Unbounded(shape=each, dtype=torch.int64, device=device)
        return observation_spec

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return spec_with_truncated(done_spec)

    def __repr__(self) -> str:
        return f"TurnTokenizer({self.tokenizer.name_or_path!r}, deltas by {self.template.method})"


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError if an object lacks what `TurnTokenizer` uses of a tokenizer."""
    needed = (
        "apply_chat_template",
        "backend_tokenizer",
        "added_tokens_decoder",
        "eos_token_id",
        "pad_token_id",
    )
    missing = [name for name in needed if not hasattr(tokenizer, name)]
    if missing:
        raise TypeError(
            "tokenizer is a fast tokenizer of transformers with a chat template, as"
            f" AutoTokenizer.from_pretrained(...) gives it; got {type(tokenizer).__name__}, which has no"
            f" {', '.join(missing)}"
        )


def stop_ids(tokenizer: Any, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Give the ids that end an answer, the end-of-sequence token first.

    Raises:
        ValueError: the tokenizer has none, or pads with one.
    """
    ids = tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *more) if i is not None))
    if not ids:
        raise ValueError("the tokenizer has no eos_token: nothing would end an answer")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ids:
        pad = tokenizer.pad_token
        raise ValueError(
            f"the pad token {pad!r} is none, or ends answers too, so that TorchRL would cut the end off as "
            "padding. Give the tokenizer one of its own: "
            'tokenizer.pad_token = "<|endoftext|>", or add_special_tokens({"pad_token": "<pad>"}) and '
            "model.resize_token_embeddings(len(tokenizer))"
        )
    return ids


def read_ledger(row: TensorDictBase) -> TokenLedger:
    """Read the ledger of one row: its ("tokens", "prompt") and what stands under "ledger"."""
    ids, sources, log_probs = (
        row.get(key).tolist() for key in (TOKENS, ("ledger", "sources"), ("ledger", "log_probs"))
    )
    ledger = TokenLedger()
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop < len(ids) and (sources[stop] == SAMPLED) == (sources[start] == SAMPLED):
            continue
        if sources[start] == SAMPLED:
            known = log_probs[start:stop]
            ledger.sampled(ids[start:stop], None if all(map(math.isnan, known)) else known)
        else:
            ledger.add(ids[start:stop], sources[start:stop])
        start = stop
    return ledger


def _chat(messages: Sequence[TensorDictBase]) -> Messages:
    return [border.message_dict(message) for message in messages]
