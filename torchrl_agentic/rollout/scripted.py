"""Policies that answer from a script, without a model."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_agentic.messages import Message, StoredMessage
from torchrl_agentic.transforms import AgentHistory
from torchrl_agentic.transforms import history as border

Script = Callable[[Sequence[Message]], str | Message] | Sequence[Sequence[str | Message]]


class ScriptedPolicy(TensorDictModuleBase):
    """A policy in history mode that answers from a script: for tests, demos and replays, without a model.

    Reads ("history", "prompt"), ("agentic", "turn") and "done"; writes ("history", "response") and
    ("history", "full").

    Args:
        script: `script[i][k]` is the answer of row i in turn k; a row that is done, or at the end of its
            script, answers "". Or a function from a row's conversation to its answer, which works in any
            environment and collector.

    Raises:
        TypeError: If the script is a list of strings instead of a list of lists.
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
        """Answer once in each row.

        Args:
            tensordict: The root of a step, [*B].
        """
        rows = border.prompts(tensordict)
        turns = tensordict.get(("agentic", "turn"), None)
        turns_taken = [0] * len(rows) if turns is None else turns.reshape(-1).tolist()
        done = tensordict.get("done", None)
        ended = [False] * len(rows) if done is None else done.reshape(-1).tolist()
        answers = [
            Message("assistant", "") if ended[index] else self._answer(index, row, turns_taken[index])
            for index, row in enumerate(rows)
        ]
        return add_answers(tensordict, answers)

    def _answer(self, index: int, row: border.Conversation, turn: int) -> Message:
        if callable(self.script):
            answer = self.script([message.read() for message in row.messages])
        else:
            turns = self.script[index % len(self.script)]
            answer = turns[turn] if turn < len(turns) else ""
        return answer if isinstance(answer, Message) else Message("assistant", answer)


def add_answers(td: TensorDictBase, answers: Sequence[Message]) -> TensorDictBase:
    """Write ("history", "response") and ("history", "full"), the prompt with the answer.

    Args:
        td: The root of a step, [*B].
        answers: The assistant's message of each row, rows counted through the flattened batch.
    """
    written = [StoredMessage.of(message) for message in answers]
    rows = zip(border.prompts(td), written, strict=True)
    history = td.get("history")
    responses = [border.Conversation.of([answer]) for answer in written]
    history.response = AgentHistory.of(responses, td.batch_size)
    history.full = AgentHistory.of([row.extended([answer]) for row, answer in rows], td.batch_size)
    return td.set("history", history)
