"""`RecordTransform`: add rewards, right answers and tokens to the records of a `ToolCompose`."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_agentic.records import TokenRecord
from torchrl_agentic.trajectory.episode import OpenTurn
from torchrl_agentic.trajectory.recording import RecordStage, token_record
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.pipeline import beside
from torchrl_agentic.transforms.turn_tokenizer import LEDGER, TurnTokenizer, read_ledger
from torchrl_agentic.transforms.turn_transform import TurnTransform


class RecordTransform(TurnTransform):
    """Adds rewards, right answers and tokens to the records of `ToolCompose`. Put it last.

    It writes nothing into the TensorDict. A trajectory is recorded as soon as it is done. Without this
    transform it is recorded when the environment goes on to the next step or resets the row, and without
    rewards, right answers, tokens, and messages behind the last results.

    Args:
        gts: Column of the data set with the right answer, or None for the first of `rewards.COLUMNS` that
            exists.
        extras: Keys of other columns, of the data set or of the step, by their names in the record.
        tokens: Whether token ids, their sources and log-probs are recorded; needs a `TurnTokenizer`, whose
            tokenizer decodes them.

    Raises:
        RuntimeError: If there is no `ToolCompose` with a recorder, or no `TurnTokenizer` for `tokens`.
    """

    stage: RecordStage

    def __init__(
        self,
        *,
        gts: NestedKey | None = None,
        extras: Mapping[str, NestedKey] | None = None,
        tokens: bool = False,
    ) -> None:
        super().__init__(RecordStage(gts, extras, tokens=tokens))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Record the rewards of the step, and complete the records of the rows that are done."""
        compose = next(beside(self, ToolCompose), None)
        if compose is None or compose.hook is None:
            raise RuntimeError(
                "RecordTransform needs a ToolCompose with a recorder: "
                'Compose(ToolCompose(..., recorder=Recorder("dump")), ..., RecordTransform())'
            )
        turns = compose.rows.open_turns(tensordict, next_tensordict, self.stage.name)
        reward = next_tensordict.get("reward", None)
        if reward is not None:
            rewards = reward.reshape(next_tensordict.batch_size.numel(), -1).sum(-1).tolist()
            for turn in turns:
                turn.episode.recording.add_reward(rewards[turn.episode.row])
        super()._step(tensordict, next_tensordict)
        ended = [turn for turn in turns if turn.is_over and turn.episode.recording.is_open]
        if ended and self.stage.tokens:
            self._record_tokens(ended, next_tensordict)
        compose.rows.finish_records([turn.episode for turn in ended], next_tensordict)
        return next_tensordict

    def _record_tokens(self, turns: Sequence[OpenTurn], next_tensordict: TensorDictBase) -> None:
        tokenizer = next((one.tokenizer for one in beside(self, TurnTokenizer)), None)
        rows = border.leaves(next_tensordict)[1]
        for turn in turns:
            record = self._tokens(rows[turn.episode.row], tokenizer)
            turn.episode.recording.annotate(tokens=record)

    @staticmethod
    def _tokens(row: TensorDictBase, tokenizer: object) -> TokenRecord:
        if any(row.get(("ledger", name), None) is None for name in LEDGER):
            raise RuntimeError("RecordTransform(tokens=True) needs a TurnTokenizer in front of it")
        return token_record(read_ledger(row), tokenizer)

    def __repr__(self) -> str:
        return f"RecordTransform(tokens={self.stage.tokens})"
