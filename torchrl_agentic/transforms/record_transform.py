"""`RecordTransform`: add rewards, right answers and tokens to the records of a `ToolCompose`."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from torchrl_agentic.messages import JSON
from torchrl_agentic.records import Recording, TokenRecord
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.dataset_rows import columns
from torchrl_agentic.transforms.pipeline import beside, stepped
from torchrl_agentic.transforms.recordings import Recordings
from torchrl_agentic.transforms.rewards import COLUMNS
from torchrl_agentic.transforms.turn_tokenizer import LEDGER, TurnTokenizer, read_ledger


class RecordTransform(Transform):
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

    def __init__(
        self,
        *,
        gts: NestedKey | None = None,
        extras: Mapping[str, NestedKey] | None = None,
        tokens: bool = False,
    ) -> None:
        super().__init__()
        self.gts = COLUMNS if gts is None else (gts,)
        self.extras = dict(extras or {})
        self.tokens = tokens

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        composes = [one for one in beside(self, ToolCompose) if one.recordings.hook is not None]
        if not composes:
            raise RuntimeError(
                "RecordTransform needs a ToolCompose with a recorder: "
                'Compose(ToolCompose(..., recorder=Recorder("dump")), ..., RecordTransform())'
            )
        size = next_tensordict.batch_size.numel()
        active = stepped(tensordict)
        reward = next_tensordict.get("reward", None)
        rewards = None if reward is None else reward.reshape(size, -1).sum(-1).tolist()
        done = next_tensordict.get("done").reshape(size, -1).any(-1).tolist()
        over = [row for row in range(size) if active[row] and done[row]]
        for compose in composes:
            for row in range(size):
                recording = compose.recordings.of(row)
                if recording is not None and active[row] and rewards is not None:
                    recording.add_reward(rewards[row])
            self._finish(compose.recordings, over, tensordict, next_tensordict)
        return next_tensordict

    def _finish(
        self,
        recordings: Recordings,
        over: Sequence[int],
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
    ) -> None:
        """Complete the recordings of the rows that are done, and end them."""
        ending = [(row, found) for row in over if (found := recordings.of(row)) is not None]
        if not ending:
            return
        prompts = border.prompts(next_tensordict)
        rows = border.leaves(next_tensordict)[1] if self.tokens else []
        for row, recording in ending:
            recording.add_messages(recordings.unrecorded(row, prompts[row]))
            self._note(recording, row, tensordict, next_tensordict)
            if self.tokens:
                recording.annotate(tokens=self._tokens(rows[row]))
        recordings.finish_done(next_tensordict)

    def _note(
        self, recording: Recording, row: int, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> None:
        names = [*self.gts, *self.extras.values()]
        found: Mapping[Any, JSON] = {
            **columns(tensordict, row, names),
            **columns(next_tensordict, row, self.extras.values()),
        }
        gts = next((found[name] for name in self.gts if found.get(name) is not None), None)
        recording.annotate(gts=gts, **{name: _single(found.get(key)) for name, key in self.extras.items()})

    def _tokens(self, row: TensorDictBase) -> TokenRecord:
        if any(row.get(("ledger", name), None) is None for name in LEDGER):
            raise RuntimeError("RecordTransform(tokens=True) needs a TurnTokenizer in front of it")
        ledger = read_ledger(row)
        tokenizer = next((one.tokenizer for one in beside(self, TurnTokenizer)), None)
        if tokenizer is None:
            return TokenRecord(ledger)
        ids = ledger.ids
        return TokenRecord(
            ledger, tuple(tokenizer.decode(ids[span.start : span.stop]) for span in ledger.spans())
        )

    def __repr__(self) -> str:
        return f"RecordTransform(tokens={self.tokens})"


def _single(value: JSON) -> JSON:
    """Return the number of a column of one number per row."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
