"""The columns of a data set, as TorchRL's primers bring them, are plain Python for each row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms.dataloading import DataLoadingPrimer

from torchrl_agentic import ToolCompose
from torchrl_agentic.transforms.dataset_rows import MOST_NUMBERS, collate_rows, columns
from torchrl_agentic.transforms.history import require_list_to_stack

require_list_to_stack()

SET = [
    {
        "query": f"q{i}",
        "interaction_kwargs": {
            "name": "shop",
            "goals": ["x", "y"][: i % 2 + 1],
            "none": None,
            "deep": {"f": 0.5},
        },
        "extra_info": {"index": i, "interaction_kwargs": {"name": "bank"}},
        "answer": f"a{i}",
        "n": i,
        "box": [i, i + 1],
    }
    for i in range(8)
]
NAMES = ["interaction_kwargs", "answer", "n", "box", ("extra_info", "interaction_kwargs"), "missing"]


def wanted(i):
    row = SET[i]
    return {name: row[name] for name in NAMES[:4]} | {NAMES[4]: row["extra_info"]["interaction_kwargs"]}


def lists(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


def nested(rows):
    return lazy_stack([TensorDict(row) for row in rows])


COLLATE = pytest.mark.parametrize("collate", [lists, collate_rows, nested])


def loader(collate):
    return DataLoader(SET, batch_size=1, collate_fn=collate)


def test_prompt_of_messages_becomes_the_missing_query():
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    rows = [
        {"prompt": prompt, "n": 0},
        {"prompt": np.array(prompt[1:], dtype=object), "n": 1},
    ]
    loader = DataLoader(rows, batch_size=1, collate_fn=collate_rows)
    env = TransformedEnv(DatasetChatEnv.from_dataloader(loader, batch_size=(4,), repeats=2), ToolCompose())
    td = env.reset()
    chats = [(list(chat.role), list(chat.content)) for chat in td["history"].prompt.unbind(0)]
    assert chats[::2] == [(["system", "user"], ["S", "Q"]), (["user"], ["Q"])]
    assert chats[1::2] == chats[::2], "groups of two"
    assert collate_rows([{"prompt": prompt, "query": "mine"}])["query"] == ["mine"]
    plain = collate_rows([{"prompt": "a text"}, {"prompt": []}])
    assert list(plain.keys()) == ["prompt"]


@COLLATE
def test_rows_of_a_dataset_environment_have_their_own_columns(collate):
    env = DatasetChatEnv.from_dataloader(loader(collate), batch_size=(3,)).append_transform(ToolCompose([]))
    td = env.reset()
    assert [columns(td, row, NAMES) for row in range(3)] == [wanted(row) for row in range(3)]


@COLLATE
def test_a_primer_in_front_of_any_chat_environment_brings_them_too(collate):
    primer = DataLoadingPrimer(loader(collate), batch_size=(2,))
    td = TransformedEnv(ChatEnv(batch_size=(2,)), primer).reset()
    assert [columns(td, row, NAMES) for row in range(2)] == [wanted(row) for row in range(2)]


@COLLATE
def test_repeats_of_a_question_have_the_same_columns(collate):
    env = DatasetChatEnv.from_dataloader(loader(collate), batch_size=(4,), repeats=2)
    td = env.reset()
    assert [columns(td, row, ["answer"])["answer"] for row in range(4)] == ["a0", "a0", "a1", "a1"]


def test_row_with_other_keys_has_only_its_keys():
    td = LazyStackedTensorDict(TensorDict({"a": 1}), TensorDict({"b": NonTensorData("x")}), stack_dim=0)
    assert [columns(td, row, ["a", "b"]) for row in range(2)] == [{"a": 1}, {"b": "x"}]


def test_equal_rows_that_tensordict_stores_once_are_read_for_each_row():
    td = TensorDict({"a": NonTensorData({"k": 1}, batch_size=[2])}, batch_size=[2])
    assert [columns(td, row, ["a", ("a", "k")]) for row in range(2)] == [{"a": {"k": 1}, ("a", "k"): 1}] * 2


@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=3), lazy=st.booleans())
def test_rows_count_through_the_flattened_batch(shape, lazy):
    size = int(np.prod(shape))
    td = TensorDict({"n": torch.arange(size)}, [size]).reshape(*shape)
    td = td.to_lazystack(0) if lazy else td
    assert [columns(td, row, ["n"])["n"] for row in range(size)] == list(range(size))


def test_changes_to_columns_do_not_reach_the_data_set():
    td = TensorDict({"a": NonTensorStack(NonTensorData({"k": [1]}), NonTensorData({"k": [2]}))}, [2])
    columns(td, 0, ["a"])["a"]["k"].append("mine")
    assert columns(td, 0, ["a"]) == {"a": {"k": [1]}}


def test_arrays_as_parquet_files_give_them_become_numbers_and_lists():
    held = {"ids": np.array([1, 2]), "p": np.float32(0.5), "list": np.array(["a", None], dtype=object)}
    td = TensorDict({"a": NonTensorStack(NonTensorData(held))}, [1])
    assert columns(td, 0, ["a"]) == {"a": {"ids": [1, 2], "p": 0.5, "list": ["a", None]}}


def test_large_arrays_stay_tensors():
    td = TensorDict({"image": torch.zeros(1, MOST_NUMBERS + 1), "small": torch.zeros(1, 2)}, [1])
    found = columns(td, 0, ["image", "small"])
    assert isinstance(found["image"], torch.Tensor)
    assert found["small"] == [0.0, 0.0]


def test_path_into_a_scalar_finds_nothing():
    held = {"a": NonTensorStack(NonTensorData("text")), "list": lazy_stack([NonTensorStack("x", "y")])}
    td = TensorDict({**held, "n": torch.zeros(1)}, [1])
    assert columns(td, 0, [("a", "k"), ("list", "k"), ("n", "k"), ("b", "k")]) == {}


def test_collated_rows_keep_lists_of_any_length_and_missing_columns():
    rows = [{"query": "a", "names": ["f"]}, {"query": "b", "names": ["f", "g"], "more": 1}]
    env = DatasetChatEnv.from_dataloader(
        DataLoader(rows, batch_size=2, collate_fn=collate_rows), batch_size=(2,)
    )
    td = env.reset()
    found = [columns(td, row, ["names", "more"]) for row in range(2)]
    assert found == [{"names": ["f"], "more": None}, {"names": ["f", "g"], "more": 1}]
