"""`load_model` loads a model where and as it is asked, by default on a GPU if there is one."""

import pytest
import torch

from torchrl_agentic.evaluation import load_model
from torchrl_agentic.evaluation.model_engine import default_device
from torchrl_agentic.rollout.tiny_model import TINY


def test_without_a_gpu_a_model_is_in_float32_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, _ = load_model(str(TINY))
    assert {(one.device.type, one.dtype) for one in model.parameters()} == {("cpu", torch.float32)}
    assert not model.training


def test_a_gpu_is_the_default_if_there_is_one(monkeypatch):
    for is_available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=is_available: found)
        assert default_device().type == kind


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_model_is_loaded_to_the_device_and_in_the_dtype_that_are_asked_for(dtype):
    model, _ = load_model(str(TINY), device="meta", dtype=dtype)
    assert {(one.device.type, one.dtype) for one in model.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "float99"}, "dtype is"),
        ({"dtype": "int64"}, "dtype is"),
        ({"device": "gpu"}, "device is"),
        ({"device": "cpu", "engine": "vllm"}, "vLLM chooses its device"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_loaded(options, problem):
    with pytest.raises(ValueError, match=problem):
        load_model("no such folder", **options)


def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        load_model("no such folder", device="cuda")
