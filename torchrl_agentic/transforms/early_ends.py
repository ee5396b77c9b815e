"""End the rows that a tool stops, whose trajectory could not begin, or whose answer was cut off."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from torchrl_agentic.transforms.row_turn import RowTurn
from torchrl_agentic.transforms.specs import KEY, mark_ended, truncate, with_truncated


def end_early(tensordict: TensorDictBase, next_tensordict: TensorDictBase, turns: Sequence[RowTurn]) -> bool:
    """End rows that a tool stops; truncate those that could not begin or whose answer was cut off.

    Args:
        tensordict: The root of the step, [*B].
        next_tensordict: Its "next", [*B], which also gets "truncated" if it has none.
        turns: Turns of the rows that took part in the step.

    Returns:
        True if a row has ended.
    """
    with_truncated(next_tensordict)
    is_stopped = any(result.stop for turn in turns for result in turn.results)
    is_cut = any(turn.is_cut or turn.session.begin_error is not None for turn in turns)
    if is_cut:
        from torchrl_agentic.transforms.token_rows import out_of_room  # only few steps need it

        done = next_tensordict.get("done")
        full = torch.tensor(out_of_room(tensordict), device=done.device).reshape(done.shape)
        cut, not_begun = (next_tensordict.get((KEY, key)) for key in ("cut", "not_begun"))
        mark_ended(next_tensordict, not_begun, "not_begun")
        mark_ended(next_tensordict, cut & full, "max_trajectory_tokens")
        mark_ended(next_tensordict, cut, "max_new_tokens")
        truncate(next_tensordict, cut | not_begun)
    if is_stopped:
        stopped = next_tensordict.get((KEY, "stop_requested"))
        for key in ("terminated", "done"):  # collectors look at "done" alone
            next_tensordict.set(key, next_tensordict.get(key) | stopped)
    return is_cut or is_stopped
