"""RecordTransform: what only the whole environment knows of a trajectory, for its record."""

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
from torchrl_agentic.transforms.rewards import COLUMNS
from torchrl_agentic.transforms.turn_tokenizer import LEDGER, TurnTokenizer, read_ledger


class RecordTransform(Transform):
    """Tells the recorder of `ToolCompose` of rewards, right answers and tokens. Put it last.

    It writes nothing into the TensorDict. A trajectory is recorded as soon as it is done. Without this
    transform it is recorded when the environment goes on to the next step, in `rollout` and in collectors, or
    resets the row; and without rewards, right answers, tokens, and messages behind the last results.

    Args:
        gts: the column of the data set with the right answer; None: the first of `answer.COLUMNS` that there
            is, if any.
        extras: what else to record: name in the record → column of the data set, or of what the step wrote.
        tokens: whether token ids, who wrote them, and log-probs are recorded; needs a `TurnTokenizer`, whose
            tokenizer gives their texts.

    Raises:
        RuntimeError: there is no `ToolCompose` with a recorder in front of it, or no `TurnTokenizer` where
            tokens are wanted.
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
                "RecordTransform tells the recorder of a ToolCompose, and there is none: "
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
            self._finish(compose, over, tensordict, next_tensordict)
        return next_tensordict

    def _finish(
        self,
        compose: ToolCompose,
        over: Sequence[int],
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
    ) -> None:
        """Tell what is known of the rows that are done, and end their recordings."""
        told = [(row, found) for row in over if (found := compose.recordings.of(row)) is not None]
        if not told:
            return
        prompts = border.prompts(next_tensordict)
        rows = border.leaves(next_tensordict)[1] if self.tokens else []
        for row, recording in told:
            recording.add_messages(compose.unrecorded(row, prompts[row]))
            self._note(recording, row, tensordict, next_tensordict)
            if self.tokens:
                recording.annotate(tokens=self._tokens(rows[row]))
        compose.finish_recordings([row for row, _ in told], next_tensordict)

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
    """Give what a column of one number per row holds as that number."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
