"""Weights in the forms that trainers have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def load_weights(module: Any, weights: Any) -> None:
    """Load weights into a module of PyTorch.

    Args:
        module: The module.
        weights: A state dict; a TensorDict with the same names, nested or not; a function that is called
            with the module; or None to keep its weights.

    Raises:
        TypeError: If `weights` is of another type.
        RuntimeError: If a state dict lacks names or has others.
    """
    if weights is None:
        return
    if hasattr(weights, "flatten_keys"):  # a TensorDict, which is a Mapping too
        module.load_state_dict(dict(weights.flatten_keys(".").items()))
    elif isinstance(weights, Mapping):
        module.load_state_dict(weights)
    elif callable(weights):
        weights(module)
    else:
        raise TypeError(
            "weights are a state dict, a TensorDict, a function of the model, or None; "
            f"got {type(weights).__name__}"
        )
