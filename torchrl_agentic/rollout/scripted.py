"""Policies that say what they are told to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_agentic.messages import Message
from torchrl_agentic.transforms import AgentHistory
from torchrl_agentic.transforms import history as border

Script = Callable[[Sequence[Message]], str | Message] | Sequence[Sequence[str | Message]]


class ScriptedPolicy(TensorDictModuleBase):
    """A policy in history mode that answers from a script: for tests, demos and replays, without a model.

    Args:
        script: what row i says in its k-th turn is `script[i][k]`; a row that is done, or has nothing more to
            say, says "". Or a function of a row's conversation, which any environment and collector can use.

    Reads ("history", "prompt"), ("agentic", "turn") and "done"; writes ("history", "response") and
    ("history", "full").
    """

    def __init__(self, script: Script) -> None:
        super().__init__()
        if not callable(script) and any(isinstance(turns, str) for turns in script):
            raise TypeError(
                "a script is a list of turns per row: ScriptedPolicy([['first turn', 'second turn']])"
            )
        self.in_keys: Any = [("history", "prompt")]
        self.out_keys: Any = [("history", "response"), ("history", "full")]
        self.script = script

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer once in each row."""
        td = tensordict if tensordict.batch_dims != 1 else tensordict.to_lazystack(0)
        rows = border.prompts(td)
        turns = td.get(("agentic", "turn"), None)
        turns_taken = [0] * len(rows) if turns is None else turns.reshape(-1).tolist()
        over = td.get("done", None)
        ended = [False] * len(rows) if over is None else over.reshape(-1).tolist()
        said = [
            Message("assistant", "") if ended[index] else self._say(index, row, turns_taken[index])
            for index, row in enumerate(rows)
        ]
        return add_answers(td, said)

    def _say(self, index: int, row: border.Conversation, turn: int) -> Message:
        if callable(self.script):
            said = self.script([border.read_message(message) for message in border.messages(row)])
        else:
            turns = self.script[index % len(self.script)]
            said = turns[turn] if turn < len(turns) else ""
        return said if isinstance(said, Message) else Message("assistant", said)


def add_answers(td: TensorDictBase, said: Sequence[Message]) -> TensorDictBase:
    """Write ("history", "response") and ("history", "full"): what each row says, and its prompt with that."""
    answers = [border.write_message(message_fields(message)) for message in said]
    rows = zip(border.prompts(td), answers, strict=True)
    history = td.get("history")
    history.response = AgentHistory.of([border.conversation([answer]) for answer in answers], td.batch_size)
    history.full = AgentHistory.of([border.extended(row, [answer]) for row, answer in rows], td.batch_size)
    return td.set("history", history)


def message_fields(message: Message) -> dict[str, object]:
    """Give the fields of a message that its history keeps."""
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = list(message.tool_calls)
    if not message.is_complete:
        fields["is_complete"] = False
    return fields
