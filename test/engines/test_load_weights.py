"""Weights are loaded from state dicts, TensorDicts, modules and functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams

from torchrl_agentic.engines.weights import load_weights


def _module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "state dict": lambda source: source.state_dict(),
    "TensorDict": TensorDict.from_module,
    "flat TensorDict": lambda source: TensorDict(source.state_dict()),
    "parameters as a TensorDict": lambda source: TensorDictParams(TensorDict.from_module(source)),
    "module": lambda source: source,
    "function": lambda source: lambda module: module.load_state_dict(source.state_dict()),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_gets_the_weights(form: str):
    module, source = _module(0), _module(1)
    parameters = list(module.parameters())
    load_weights(module, FORMS[form](source))
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert all(mine is before for mine, before in zip(module.parameters(), parameters, strict=True))


def test_buffers_that_a_module_computes_are_not_loaded():
    module, source = _module(0), _module(1)
    for one in (module, source):
        one.register_buffer("frequencies", torch.arange(3.0), persistent=False)
    source.get_buffer("frequencies").zero_()
    load_weights(module, TensorDict.from_module(source))
    assert torch.equal(module.state_dict()["0.weight"], source.state_dict()["0.weight"])
    assert module.get_buffer("frequencies").tolist() == [0.0, 1.0, 2.0]


def test_none_keeps_the_weights():
    module = _module(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    load_weights(module, None)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_other_weights_are_refused():
    with pytest.raises(TypeError, match="int"):
        load_weights(_module(0), 3)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_weights(_module(0), {})
