"""`EncodingStage`: write the tokens of the next prompt."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.messages import StoredMessage
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.trajectory.columns import KEY, TOKENS, Column
from torchrl_agentic.trajectory.episode import Stage

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import OpenTurn

DRIFT = (KEY, "token_drift")
LONG_TEXT = 200_000
"""Characters of new messages above which they are encoded on a thread, so that other trajectories go on."""
LONG_LEDGER = 50_000
"""Tokens above which the check for drift runs on a thread."""


class EncodingStage(Stage):
    """Writes the tokens of the messages behind an answer; the stage of `TurnTokenizer`.

    A trajectory whose next prompt would leave no room for an answer ends here.

    Args:
        encoder: Encodes prompts.
        raises_on_drift: Whether drift raises RuntimeError, instead of a warning for the first one.
    """

    name = "TurnTokenizer"
    reads_answer = False

    def __init__(self, encoder: ChatEncoder, *, raises_on_drift: bool = False) -> None:
        self.encoder, self.raises_on_drift = encoder, raises_on_drift
        self.has_warned = False

    @property
    def columns(self) -> Sequence[Column]:
        """The drift."""
        return TOKENS

    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Encode what follows each answer."""
        waiting: list[OpenTurn] = []
        for turn in turns:
            if turn.writer is None:
                continue
            if _size(turn.injected) > LONG_TEXT or turn.writer.size > LONG_LEDGER:
                waiting.append(turn)
            else:
                self._encode(turn)
        return self._encode_on_threads(waiting) if waiting else None

    async def _encode_on_threads(self, turns: Sequence[OpenTurn]) -> None:
        for turn in turns:
            await turn.episode.session.threads.run(lambda turn=turn: self._encode(turn))

    def _encode(self, turn: OpenTurn) -> None:
        writer = turn.writer
        assert writer is not None
        answer, injected = turn.behind_sampled()
        shown = [message.for_template() for message in injected]
        turn.prompt = writer.add_messages(answer.for_template(), shown, context_length=turn.context_length)
        for place, (old, new) in enumerate(zip(shown, turn.prompt.injected, strict=True)):
            if new is not old:
                turn.shorten(place, StoredMessage({**injected[place], "content": new["content"]}))
        room = writer.room(turn.context_length)
        if not turn.is_over and room is not None and room <= 0:
            turn.end("max_trajectory_tokens", truncated=True)
        if self.encoder.use_inference_chat_template:
            turn.drift = turn.prompt.n_replaced
        elif turn.is_over and self.encoder.drift_mode != "disable":
            turn.drift = self._drift(turn)

    def _drift(self, turn: OpenTurn) -> int:
        """Return how many tokens of a trajectory drift; warn of the first drift, or raise."""
        drift = turn.whole_writer(turn).find_drift()
        if drift is None:
            return 0
        if self.raises_on_drift:
            raise RuntimeError(str(drift))
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(f"{drift}. Later ones are only counted, in {DRIFT}", stacklevel=2)
        return drift.tokens


def _size(messages: Sequence[StoredMessage]) -> int:
    """Return the number of characters of messages."""
    return sum(len(text) for one in messages if isinstance(text := one.field("content"), str))
