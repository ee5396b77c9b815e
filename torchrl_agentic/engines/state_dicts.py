"""Weights in the forms that trainers have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def load_weights(module: Any, weights: Any) -> None:
    """Load weights into a module of PyTorch.

    Args:
        module: The module.
        weights: A state dict; a TensorDict with the same names, nested or not; another module with the same
            names; a function that is called with the module; or None to keep its weights.

    Raises:
        TypeError: If `weights` is of another type.
        RuntimeError: If a state dict lacks names or has others.
    """
    if weights is None:
        return
    named: Any = weights
    if hasattr(weights, "flatten_keys"):  # a TensorDict, which is a Mapping too
        named = weights.flatten_keys(".")
    elif isinstance(weights, torch.nn.Module):  # before functions, since a module can be called too
        named = weights.state_dict()
    elif not isinstance(weights, Mapping) and callable(weights):
        weights(module)
        return
    elif not isinstance(weights, Mapping):
        raise TypeError(
            "weights are a state dict, a TensorDict, a module, a function of the model, or None; "
            f"got {type(weights).__name__}"
        )
    computed = set[str]()
    if isinstance(module, torch.nn.Module):  # buffers that `TensorDict.from_module` has, and no state dict
        computed = {name for name, _ in module.named_buffers()}.difference(module.state_dict())
    module.load_state_dict({name: value for name, value in named.items() if name not in computed})
