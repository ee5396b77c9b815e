"""Tensors that both borders make, and the transforms inside a `Compose`."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import HIDDEN_STATE, without_answers

_DTYPES = {"q": torch.int64, "f": torch.float32, "d": torch.float64}  # by the type code of an array


def column_tensor(
    code: Literal["q", "f"], values: Sequence[float], device: torch.device | None
) -> torch.Tensor:
    """Return numbers as a tensor, in a third of the time that `torch.tensor` takes for some dozens of them.

    Args:
        code: Type code of `array.array`: "q" for int64, "f" for float32.
        values: The numbers, [T]. The tensor may share the memory of an `array`.
        device: Device of the tensor.
    """
    dtype = _DTYPES[code]
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    numbers = values if isinstance(values, array) else array(code, cast("Any", values))
    made = torch.frombuffer(numbers, dtype=_DTYPES[numbers.typecode]).to(dtype)
    return made if device is None or device.type == "cpu" else made.to(device)


def state_of(columns: Mapping[str, Any]) -> TensorDict:
    """Return a row of a data set as tools with `wants_state` see it: locked, without the right answers.

    Args:
        columns: Values by name.
    """
    shown = {name: without_answers(value) for name, value in columns.items() if name not in HIDDEN_STATE}
    return TensorDict(shown).lock_()


def has_rows(tools: Sequence[Tool]) -> bool:
    """Return True if a tool keeps state by row: it is a transform of TorchRL inside `as_tool`."""
    return any(hasattr(tool.unwrapped, "reset_rows") for tool in tools)


def reset_tools(tools: Sequence[Tool], chosen: Sequence[bool]) -> None:
    """Reset some rows of the tools that keep state by row; blocks.

    Args:
        tools: The tools.
        chosen: Whether to reset a row, for each row of the flattened batch.
    """
    if has_rows(tools):
        flat = TensorDict({"_reset": torch.tensor(chosen).unsqueeze(-1)}, batch_size=[len(chosen)])
        for tool in tools:
            if hasattr(tool.unwrapped, "reset_rows"):
                cast("Any", tool.unwrapped).reset_rows(flat, flat)


def leaves(transform: object) -> Iterator[object]:
    """Yield the transforms inside a `Compose` at any depth, in order; a `ToolCompose` is one transform."""
    if type(transform) is Compose:
        for inner in transform.transforms:
            yield from leaves(inner)
    else:
        yield transform
