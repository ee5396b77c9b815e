"""Weights on their way to an engine: names, folders, and the check that they fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from torchrl_agentic.engines.weights import (
    check_fits,
    checkpoint_shapes,
    kept_weights,
    named_tensors,
    weights_folder,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(5, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


FORMS = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "pairs": lambda module: module.named_parameters(),
    "TensorDict": lambda module: TensorDict.from_module(module).data,
}


@pytest.mark.parametrize("form", FORMS)
def test_kept_weights_stay_as_they_were_while_the_model_changes(form):
    module = Tied()
    before = module.lm_head.weight.detach().clone()
    given = FORMS[form](module)
    kept = kept_weights(list(given) if form == "pairs" else given)
    with torch.no_grad():
        module.lm_head.weight.zero_()
    assert torch.equal(named_tensors(kept)[EMBEDDING], before)


def test_weights_that_are_no_tensors_are_kept_as_they_are(tmp_path):
    for weights in (
        None,
        tmp_path,
        str(tmp_path),
        test_kept_weights_stay_as_they_were_while_the_model_changes,
    ):
        assert kept_weights(weights) is weights


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_has_the_weights_and_the_head_of_a_tied_model(form):
    module = Tied()
    with weights_folder(FORMS[form](module), is_tied=True) as folder:
        (path,) = folder.iterdir()
        found = load_file(path)
    assert set(found) == {EMBEDDING, HEAD}
    for tensor in found.values():
        assert torch.equal(tensor, module.lm_head.weight)
    assert not folder.exists()


def test_a_given_folder_stays_as_it_is_and_is_linked_with_the_head(tmp_path):
    embedding = torch.randn(5, 3)
    save_file({EMBEDDING: embedding}, tmp_path / "model.safetensors")
    with weights_folder(tmp_path, is_tied=True) as folder:
        shapes = checkpoint_shapes(folder)
        assert folder != tmp_path
        assert torch.equal(load_file(folder / "tensors.safetensors")[HEAD], embedding)
    assert shapes == {EMBEDDING: (5, 3), HEAD: (5, 3)}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_is_deleted_if_its_user_fails(tmp_path):
    def fail():
        with weights_folder({"a": torch.ones(2)}, parent=tmp_path) as folder:
            assert folder.parent == tmp_path
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_views_and_tensors_that_share_memory_are_written_whole():
    base = torch.arange(12.0).reshape(3, 4)
    given_tensors = {"base": base, "transposed": base.T, "row": base[1], "again": base}
    with weights_folder(given_tensors) as folder:
        found = load_file(folder / "tensors.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in given_tensors.items())


@pytest.mark.parametrize("wrong", [3, "no", [1], [("a", 1)], [(1, torch.ones(1))], torch.ones(2), None])
def test_other_values_are_no_weights(wrong):
    with pytest.raises(TypeError, match="weights are"):
        named_tensors(wrong)


def test_an_empty_folder_and_no_weights_are_refused(tmp_path):
    for wrong, message in ((tmp_path, "no safetensors files"), ({}, "there are no weights")):
        with pytest.raises(ValueError, match=message), weights_folder(wrong):
            pass


def test_computed_buffers_are_left_out():
    given_tensors = {"model.rotary_emb.inv_freq": torch.ones(1), "model.norm.weight": torch.ones(1)}
    assert list(named_tensors(given_tensors)) == ["model.norm.weight"]


names = st.sampled_from(["a", "b", "c", "d", HEAD])
shapes = st.dictionaries(names, st.tuples(st.integers(1, 2)), max_size=5)


@given(shapes, shapes)
def test_weights_fit_iff_names_and_shapes_but_for_the_head_are_the_same(new, old):
    without = [{name: shape for name, shape in each.items() if name != HEAD} for each in (new, old)]
    heads = {each[HEAD] for each in (new, old) if HEAD in each}
    fits = not old or (without[0] == without[1] and len(heads) <= 1)
    if fits:
        check_fits(new, old)
    else:
        with pytest.raises(ValueError, match="checkpoint"):
            check_fits(new, old)
