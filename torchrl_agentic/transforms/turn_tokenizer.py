"""TurnTokenizer: the TensorDict border of `tokens/writer.py`, which writes the next prompt of each row."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.tokens.chat_template import ChatTemplate
from torchrl_agentic.tokens.drift import Mode
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.tokens.truncate import Side
from torchrl_agentic.tokens.writer import ChatEncoder, ChatMessage, NextPrompt, TokenWriter
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

TOKENS, ATTENTION = ("tokens", "prompt"), ("masks", "all_attention_mask")
LEDGER = {"mask": torch.bool, "sources": torch.int64, "log_probs": torch.float32}
_DRIFT = (specs.KEY, "token_drift")


class TurnTokenizer(Transform):
    """Writes ("tokens", "prompt"): exactly the ids so far, then those of the injected messages.

    Put it last in the environment, behind `ToolCompose` and every other transform that adds messages; the
    policy generates from tokens (`agent_policy`). Sampled ids are never re-created from text. Rows are
    ragged: a batch is a lazy stack. `TokenWriter` does the work for each row, without TensorDict.

    A row whose next prompt would leave no room for an answer ends here, `truncated`, before the engine sees
    that prompt. Put transforms that write rewards at the end of a trajectory behind this one.

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
        chat_encoder: The part that all rows share.

    Raises:
        ValueError: If the pad token also ends answers, a bound leaves no room for the marker, or the template
            cannot be continued token by token.
        TypeError: If the tokenizer is not a fast tokenizer with a chat template.
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
        self.chat_encoder = ChatEncoder(
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
        self.tokenizer = tokenizer
        self.raise_on_drift = raise_on_drift
        self._has_warned = False
        self._reset_mask: torch.Tensor | None = None

    @property
    def template(self) -> ChatTemplate:
        """Chat template that renders the conversations."""
        return self.chat_encoder.template

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Keep the reset mask: a `DataLoadingPrimer` makes a new TensorDict for the reset, without it."""
        self._reset_mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Encode the prompts of the rows that begin; the environment drops those of the other rows."""
        stack, rows = border.leaves(tensordict_reset)
        mask, self._reset_mask = tensordict.get("_reset", self._reset_mask), None
        begins = [True] * len(rows) if mask is None else mask.reshape(len(rows), -1).any(-1).tolist()
        for row, conversation, is_new in zip(rows, border.prompts(stack), begins, strict=True):
            ledger = TokenLedger()
            if is_new:
                chat = _chat(border.messages(conversation))
                ledger = self.chat_encoder.begin(chat, tools=tool_selection(row)).ledger
            self._write(row, None, ledger)
        drift = torch.zeros_like(stack.get("done"), dtype=torch.int64)
        return with_truncated(stack.set(_DRIFT, drift))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Continue each row with the tokens that were sampled and the messages that were injected."""
        stack, rows = border.leaves(next_tensordict)
        _, roots = border.leaves(tensordict)
        befores, afters = border.prompts(tensordict), border.prompts(stack)
        done, active = stack.get("done").reshape(-1).tolist(), stepped(tensordict)
        drifts, full = [0] * len(rows), [False] * len(rows)
        for index, (root, row, before, after) in enumerate(zip(roots, rows, befores, afters, strict=True)):
            if not active[index]:
                self._write(row, root, TokenLedger())
                continue
            writer, prompt, conversation = self._continue(root, row, before, after)
            left = writer.room(_context_length(root))
            full[index] = not done[index] and left is not None and left <= 0
            if self.chat_encoder.use_inference_chat_template:
                drifts[index] = prompt.n_replaced
            elif done[index] or full[index]:
                drifts[index] = self._count_drift(row, conversation, writer.tools)
        drift = torch.tensor(drifts, device=stack.device).reshape(stack.get("done").shape)
        return self._truncated(stack.set(_DRIFT, drift), full)

    def _truncated(self, stack: TensorDictBase, full: Sequence[bool]) -> TensorDictBase:
        """End the rows that have no room left, and close the sessions of their trajectories."""
        done = stack.get("done")
        rows = torch.tensor(full, device=done.device).reshape(done.shape)
        truncate(stack, rows)
        if any(full):
            mark_ended(stack, rows, "max_trajectory_tokens")
            for compose in beside(self, ToolCompose):
                compose.end(full, stack)
        return stack

    def _continue(
        self,
        root: TensorDictBase,
        row: TensorDictBase,
        before: border.Conversation,
        after: border.Conversation,
    ) -> tuple[TokenWriter, NextPrompt, border.Conversation]:
        """Write the next prompt of a row, and the injected messages as they were encoded."""
        messages, n_before = border.messages(after), border.length(before)
        # Most templates do not need the earlier messages: reading them would cost more with each turn.
        earlier = messages[:n_before] if self.chat_encoder.reads_whole_chat else []
        writer = self._writer(root, _chat(earlier))
        answer, *injected = _chat(messages[n_before:])
        prompt = writer.add_messages(answer, injected)
        self._write(row, None if self.chat_encoder.use_inference_chat_template else root, writer.ledger)
        fitted = {
            index: border.with_content(messages[index], new["content"])
            for index, (old, new) in enumerate(zip(injected, prompt.injected, strict=True), n_before + 1)
            if new is not old
        }
        if fitted:
            after = border.conversation([fitted.get(i, message) for i, message in enumerate(messages)])
            border.inner(row.get("history")).set("prompt", border.AgentHistory.around(after))
        return writer, prompt, after

    def _writer(self, root: TensorDictBase, earlier: Sequence[ChatMessage]) -> TokenWriter:
        """Return a writer of one row that has the sampled tokens, and those before them only if needed."""
        prompt, full = root.get(TOKENS, None), root.get(("tokens", "full"), None)
        if prompt is None or full is None or not torch.equal(full[: len(prompt)], prompt):
            raise RuntimeError(
                'TurnTokenizer needs a policy that generates from ("tokens", "prompt"), without padding, and '
                'writes ("tokens", "full") behind it: agent_policy(...)'
            )
        tools = tool_selection(root)
        if self.chat_encoder.use_inference_chat_template:
            ledger = TokenLedger()
            ledger.add_prompt(prompt.tolist())
            writer = TokenWriter(self.chat_encoder, ledger, messages=earlier, tools=tools)
        else:
            next_call = int(root.get(("ledger", "sources")).max().item()) + 1 if len(prompt) else 0
            writer = TokenWriter(
                self.chat_encoder,
                messages=earlier,
                tools=tools,
                preceding=len(prompt),
                next_call=max(0, next_call),
            )
        log_probs = root.get(("log_probs", "response"), None)
        writer.add_sampled(
            full[len(prompt) :].tolist(), None if log_probs is None else log_probs.clamp(max=0).tolist()
        )
        return writer

    def _write(self, row: TensorDictBase, root: TensorDictBase | None, new: TokenLedger) -> None:
        """Write a ledger into a row, behind the ledger of the root if there is one."""
        made: dict[Any, torch.Tensor] = {TOKENS: torch.tensor(new.ids, dtype=torch.int64)}
        for name, dtype in LEDGER.items():
            made["ledger", name] = torch.tensor(getattr(new, name), dtype=dtype)
        for key, value in made.items():
            value = value if row.device is None else value.to(row.device)
            row.set(key, value if root is None else torch.cat([root.get(key), value]))
        size = len(row.get(TOKENS))
        row.set(ATTENTION, torch.ones(size, dtype=torch.bool, device=row.device))
        bound = self.chat_encoder.max_trajectory_tokens
        if bound is not None:
            row.set(TOKENS_LEFT, torch.tensor([bound - size], device=row.device))

    def _count_drift(
        self, row: TensorDictBase, conversation: border.Conversation, tools: Collection[str] | None
    ) -> int:
        """Return how many tokens of a row drift; warn of the first drift, or raise."""
        if self.chat_encoder.drift_mode == "disable":
            return 0
        chat = _chat(border.messages(conversation))
        drift = TokenWriter(self.chat_encoder, read_ledger(row), messages=chat, tools=tools).find_drift()
        if drift is None:
            return 0
        if self.raise_on_drift:
            raise RuntimeError(str(drift))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{drift}. Later ones are only counted, in {_DRIFT}", stacklevel=2)
        return drift.tokens

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the entries that this transform writes.

        Raises:
            ValueError: If the environment has no ("history", "prompt").
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
        if self.chat_encoder.max_trajectory_tokens is not None:
            observation_spec[TOKENS_LEFT] = Unbounded(shape=each, dtype=torch.int64, device=device)
        return observation_spec

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return spec_with_truncated(done_spec)

    def __repr__(self) -> str:
        return f"TurnTokenizer({self.tokenizer.name_or_path!r}, deltas by {self.template.method})"


def read_ledger(row: TensorDictBase) -> TokenLedger:
    """Read the ledger of one row: ("tokens", "prompt") and the entries under "ledger"."""
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
            ledger.add_sampled(ids[start:stop], None if all(map(math.isnan, known)) else known)
        else:
            ledger.add_injected(ids[start:stop], sources[start:stop])
        start = stop
    return ledger


def _context_length(root: TensorDictBase) -> int | None:
    """Return how many tokens the engine takes, if the policy wrote how much room the prompt left."""
    room = root.get(ROOM, None)
    return None if room is None else len(root.get(TOKENS)) + int(room)


def _chat(messages: Sequence[TensorDictBase]) -> list[dict[str, Any]]:
    return [border.message_dict(message) for message in messages]
