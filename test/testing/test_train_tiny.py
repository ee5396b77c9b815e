"""The script that made the tiny model still runs, and makes the same one again."""

import importlib
import itertools
from pathlib import Path

import pytest
import torch
from train_tiny_lessons import exercises, lessons

from torchrl_agentic.testing import load_tiny
from torchrl_agentic.testing.tiny import TINY
from torchrl_agentic.tools import PythonTool

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        module = importlib.import_module("train_tiny")
        patch.setattr(module, "ASKED", 4)
        yield module


def test_assistant_messages_and_their_ends_are_learned(script):
    """Calls that fail by their code are not trained on; otherwise the model would write such calls."""
    _, tokenizer = load_tiny()
    taught = list(itertools.islice(lessons(0), 200))
    learnt_texts = []
    for item, row in zip(taught, script.encoded(iter(taught), tokenizer, PythonTool().spec()), strict=True):
        said = [message["content"] for message in item.messages if message["role"] == "assistant"]
        expected = "".join(
            f"{text}<|im_end|>" for text, learn in zip(said, item.learnt, strict=True) if learn
        )
        ids = [i for i, learn in zip(row.ids, row.learnt, strict=True) if learn]
        assert tokenizer.decode(ids) == expected
        learnt_texts.append(expected)
    assert not any("// 0" in text for text in learnt_texts)


def test_the_shared_beginning_changes_no_loss(script):
    """The system message is run once for all rows; run row by row it must come to the same."""
    model, tokenizer = load_tiny()
    stream = script.encoded(itertools.chain(exercises(0)), tokenizer, PythonTool().spec())
    rows = list(itertools.islice(stream, 3))
    with torch.no_grad():
        together = script.loss_of(model, rows)
        total = weight = 0.0
        for row in rows:
            ids, learnt = torch.tensor([row.ids]), torch.tensor(row.learnt)
            logits = model(input_ids=ids).logits[0, :-1][learnt[1:]]
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:][learnt[1:]], reduction="sum")
            weight += learnt.sum()
    torch.testing.assert_close(together, total / weight)


@pytest.mark.slow
def test_a_seed_makes_the_same_files_again(script, tmp_path):
    for name in ("once", "again"):
        script.train(tmp_path / name, seed=7, steps=2, threads=1)
    files = {file.name for file in (tmp_path / "once").iterdir()}
    assert files >= {file.name for file in TINY.iterdir()} - {"README.md"}
    for file in files - {"curve.csv"}:
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    model, tokenizer = load_tiny(folder=tmp_path / "once")
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.slow
def test_weak_model_continues_from_the_model_of_the_package(script, tmp_path):
    row = script.train(tmp_path, weak=True, steps=2, threads=1)
    assert row["step"] == 2
    assert load_tiny(folder=tmp_path)[1].get_vocab() == load_tiny()[1].get_vocab()
