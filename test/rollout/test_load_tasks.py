"""`load_tasks` reads every common form of a data set, and says where a row is wrong."""

import datetime
import json
import sys
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from torchrl_agentic import MissingExtra, Task, load_tasks
from torchrl_agentic.rollout import tasks_of

GSM8K = [
    {"question": f"What is {n} + 1000?", "answer": f"{n} + 1000 = <<{n}+1000={n + 1000}>>\n#### {n + 1000:,}"}
    for n in range(4)
]
"""As the data set GSM8K has them."""
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n} + 1?"}],
        "ability": "math",
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": f"{n + 1}"},
        "extra_info": {
            "split": "train",
            "index": 10 + n,
            "answer": f"#### {n + 1}",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": f"{n + 1}"}}},
            "interaction_kwargs": {"name": "gsm8k", "query": f"{n} + 1?"},
        },
    }
    for n in range(3)
]
"""As verl's scripts write them."""


def written(rows, folder: Path, suffix: str, stem: str = "train") -> Path:
    """Write rows as a file."""
    path = folder / f"{stem}.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_questions_with_solutions_are_read_from_every_kind_of_file(tmp_path: Path, suffix: str):
    tasks = load_tasks(str(written(GSM8K, tmp_path, suffix)))
    assert [task.name for task in tasks] == ["train-0", "train-1", "train-2", "train-3"]
    assert [task.answer for task in tasks] == ["1000", "1001", "1002", "1003"]
    assert tasks[1].messages == [{"role": "user", "content": "What is 1 + 1000?"}]
    assert tasks[1].data == {"solution": GSM8K[1]["answer"]}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_rows_of_verl_keep_what_tools_and_interactions_need(tmp_path: Path, suffix: str):
    first, *_ = load_tasks(written(VERL, tmp_path, suffix))
    assert first.name == "train-10"
    assert first.messages == VERL[0]["prompt"]
    assert first.answer == "1"
    assert first.data == {name: value for name, value in VERL[0].items() if name != "prompt"}


def test_the_same_rows_are_read_from_memory_in_every_form(tmp_path: Path):
    forms = [
        GSM8K,
        iter(GSM8K),
        pd.DataFrame(GSM8K),
        datasets.Dataset.from_list(GSM8K),
        datasets.Dataset.from_list(GSM8K).to_iterable_dataset(),
        datasets.DatasetDict(train=datasets.Dataset.from_list(GSM8K)),
        tasks_of(GSM8K),
    ]
    found = [load_tasks(form) for form in forms]
    expected = [(task.messages, task.answer, task.data) for task in tasks_of(GSM8K)]
    assert [[(task.messages, task.answer, task.data) for task in tasks] for tasks in found] == [expected] * 7
    assert [task.name for task in found[0]] == [task.name for task in found[2]] == ["0", "1", "2", "3"]
    assert found[5][3].name == "train-3"


def test_a_folder_of_datasets_is_read_as_it_was_saved(tmp_path: Path):
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(GSM8K), test=datasets.Dataset.from_list(GSM8K[:1])
    )
    splits.save_to_disk(tmp_path / "saved")
    assert [task.name for task in load_tasks(tmp_path / "saved", split="test")] == ["saved-test-0"]
    with pytest.raises(
        ValueError, match=r"saved has the splits train, test: choose one, such as split='train'"
    ):
        load_tasks(tmp_path / "saved")


def test_several_files_and_folders_are_read_in_order(tmp_path: Path):
    one, two = (written(GSM8K[:2], tmp_path, "jsonl", stem) for stem in ("b", "a"))
    (tmp_path / "notes.txt").write_text("not data")
    assert [task.name for task in load_tasks([one, str(two)])] == ["b-0", "b-1", "a-0", "a-1"]
    assert [task.name for task in load_tasks(tmp_path)] == ["a-0", "a-1", "b-0", "b-1"]


def test_a_folder_with_several_splits_wants_a_choice(tmp_path: Path):
    for stem in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"):
        written(GSM8K[:1], tmp_path, "parquet", stem)
    with pytest.raises(ValueError, match=r"has the splits test, train: choose one, such as split='train'"):
        load_tasks(tmp_path)
    names = [task.name for task in load_tasks(tmp_path, split="train")]
    assert names == ["train-00000-of-00002-0", "train-00001-of-00002-0"]
    with pytest.raises(
        ValueError, match=r"has no split 'trian'; its splits: test, train; did you mean 'train'"
    ):
        load_tasks(tmp_path, split="trian")


def test_a_name_with_an_owner_is_loaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load(path, name, *, split):  # the hub is not reachable from tests
        asked.append((path, name, split))
        return datasets.Dataset.from_list(GSM8K, split=datasets.Split(split))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_tasks("openai/gsm8k", subset="main", split="test")[2].name == "gsm8k-test-2"
    assert asked == [("openai/gsm8k", "main", "test")]


def test_a_hub_that_cannot_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'some/name' is neither a file or folder here, nor a data set"):
        load_tasks("some/name")


def test_tools_never_see_the_column_of_the_answer():
    (task,) = load_tasks([{"q": "1 + 1?", "gold": "2", "level": "easy"}], question="q", answer="gold")
    assert (task.answer, task.data) == ("2", {"level": "easy"})


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": "6 * 7\n#### 42"}, "42"),
        ({"answer": "#### 1,234.5"}, "1234.5"),
        ({"answer": "#### 3, 4"}, "3, 4"),
        ({"answer": "text with #### a heading\nand more"}, "text with #### a heading\nand more"),
        ({"answer": 42}, 42),
        ({"answer": 0, "solution": "x"}, 0),
        ({"answer": None, "ground_truth": "b"}, "b"),
        ({"Answer": "7"}, "7"),
        ({"ground_truth": ["a", "b"]}, ["a", "b"]),
        ({"reward_model": {"ground_truth": "b"}}, "b"),
        ({"extra_info": {"ground_truth": "b"}}, "b"),
        ({"solution": r"so \boxed{1}, or \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
        ({"solution": "no box"}, "no box"),
        ({"solution": r"an open \boxed{1"}, r"an open \boxed{1"),
        ({}, None),
    ],
)
def test_the_answer_is_found(row: dict[str, object], answer: object):
    (task,) = load_tasks([{"question": "?", **row}])
    assert task.answer == answer
    if "solution" in row:
        assert task.data["solution"] == row["solution"]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Add.", "input": "1 2"}, [{"role": "user", "content": "Add.\n\n1 2"}]),
        ({"instruction": "Add.", "input": ""}, [{"role": "user", "content": "Add."}]),
        ({"Problem": "p"}, [{"role": "user", "content": "p"}]),
        ({"prompt": "p", "question": "q"}, [{"role": "user", "content": "p"}]),
        ({"prompt": None, "question": "q"}, [{"role": "user", "content": "q"}]),
        ({"prompt": '[{"role": "user", "content": "a"}]'}, [{"role": "user", "content": "a"}]),
        ({"prompt": '["role"]'}, [{"role": "user", "content": '["role"]'}]),
        ({"prompt": np.array([{"role": "user", "content": "a"}])}, [{"role": "user", "content": "a"}]),
    ],
)
def test_the_first_messages_are_found(row: dict[str, object], messages: object):
    assert load_tasks([row])[0].messages == messages


def test_images_and_videos_take_the_places_of_their_placeholders(tmp_path: Path):
    """As in data sets for verl; the columns stay for tools."""
    row = {
        "prompt": [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": "<image>or <image>, <video>?"},
        ],
        "images": [{"bytes": b"png", "path": None}, {"bytes": None, "path": "b.png"}],
        "videos": ["c.mp4"],
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (task,) = load_tasks(tmp_path / "a.parquet")
    assert task.messages[0]["content"] == "Look."
    assert task.messages[1]["content"] == [
        {"type": "image", "base64": "cG5n"},
        {"type": "text", "text": "or "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": ", "},
        {"type": "video", "video": "c.mp4"},
        {"type": "text", "text": "?"},
    ]
    assert task.data["images"] == row["images"]
    with pytest.raises(
        ValueError, match="row 0: the messages have 2 placeholders <image>, and the column 'images' has 1"
    ):
        load_tasks([{**row, "images": ["a.png"]}])
    assert (
        load_tasks([{"question": "is <image> a tag?", "images": []}])[0].messages[0]["content"][:3] == "is "
    )


def test_a_system_prompt_is_added_where_there_is_none():
    own = {"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]}
    tasks = load_tasks([own, {"question": "b"}], system_prompt="ours")
    assert [task.messages[0]["content"] for task in tasks] == ["mine", "ours"]
    assert [len(task.messages) for task in tasks] == [2, 2]


def test_names_are_the_rows_own_and_distinct():
    rows = [
        {"id": "a"},
        {"id": "a"},
        {"id": "a (2)"},
        {"id": 7},
        {"name": "n", "id": 3},
        {"id": None},
        {"id": " "},
    ]
    tasks = load_tasks([{"question": "?", **row} for row in rows])
    assert [task.name for task in tasks] == ["a", "a (2)", "a (2) (2)", "7", "n", "5", "6"]
    assert tasks[3].data == {"id": 7}


def test_names_do_not_depend_on_filters_and_orders(tmp_path: Path):
    path = written(GSM8K, tmp_path, "jsonl")
    by_name = {task.name: task for task in load_tasks(path)}
    for options in ({"shuffle": 1}, {"limit": 2}, {"where": lambda task: task.answer > "1001"}):
        for task in load_tasks(path, **options):
            assert by_name[task.name] == task


def test_a_shuffle_is_the_same_for_the_same_seed_and_comes_before_the_limit():
    rows = [{"question": str(n)} for n in range(50)]
    orders = [[task.name for task in load_tasks(rows, shuffle=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(str(n) for n in range(50))
    assert [task.name for task in load_tasks(rows, shuffle=1, limit=3)] == orders[0][:3]


def test_a_limit_stops_reading():
    def rows():
        yield {"question": "a"}
        yield {"question": "b"}
        raise AssertionError("a third row was read")

    assert len(load_tasks(rows(), limit=2)) == 2


def test_rows_of_another_form_are_read_by_a_function():
    def read(row):
        if row["kind"] == "skip":
            return None
        if row["kind"] == "task":
            return Task("mine", [{"role": "user", "content": row["text"]}], max_turns=2)
        return {"question": row["text"], "answer": "#### 5"}

    rows = [{"kind": "task", "text": "a"}, {"kind": "skip"}, {"kind": "row", "text": "b"}]
    first, second = load_tasks(rows, read=read, system_prompt="s")
    assert (first.name, first.max_turns, len(first.messages)) == ("mine", 2, 1)
    assert (second.name, second.answer, len(second.messages)) == ("2", "5", 2)


def test_values_of_arrays_and_frames_become_plain():
    row = {
        "question": "?",
        "floats": np.array([[1.5, 2.0]]),
        "one": np.int64(3),
        "nested": {"flags": np.array([True]), 4: (1, 2)},
        "day": datetime.date(2026, 1, 2),
        "price": Decimal("1.5"),
        "blob": b"x",
    }
    (task,) = load_tasks([row])
    assert task.data == {
        "floats": [[1.5, 2.0]],
        "one": 3,
        "nested": {"flags": [True], "4": [1, 2]},
        "day": "2026-01-02",
        "price": 1.5,
        "blob": b"x",
    }
    assert type(task.data["one"]) is int


def test_missing_cells_are_none(tmp_path: Path):
    frame = pd.DataFrame([{"question": "a", "level": 3.0}, {"question": "b", "answer": "x"}])
    tasks = load_tasks(frame)
    assert [(task.answer, task.data) for task in tasks] == [(None, {"level": 3.0}), ("x", {"level": None})]
    (tmp_path / "a.csv").write_text('question,answer\n"x\n,y",\n')
    (task,) = load_tasks(tmp_path / "a.csv")
    assert (task.messages[0]["content"], task.answer) == ("x\n,y", None)


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        ('{"question": "a"}\n\n{oops\n', "jsonl", r"rows\.jsonl, line 3: not JSON"),
        ('{"question": "a"}\n[1]\n', "jsonl", r"rows\.jsonl, line 2: expected a Task, or a row with columns"),
        (
            '{"question": "a"}\n{"answer": "b"}\n',
            "jsonl",
            r"rows\.jsonl, line 2: a row needs one of messages",
        ),
        ('{"question": "a"}\n{"question": 3}', "jsonl", r"line 2: the column 'question' is a text or a list"),
        (
            '{"prompt": [{"role": "user"}]}',
            "jsonl",
            r"line 1: task 'rows-0': a message has a role and a content",
        ),
        ('{"prompt": []}', "jsonl", r"line 1: task 'rows-0' has no messages"),
        ('[{"question": "a"}, 5]', "json", r"rows\.json, item 1: expected a Task"),
        ('{"question": "a"}\n{"question": ', "json", r"rows\.json, line 2: not JSON"),
        ("{", "json", r"rows\.json: not JSON"),
        ("PAR", "parquet", r"rows\.parquet: not a Parquet file"),
        ("question,answer\na\n", "csv", r"rows\.csv, line 2: expected 2 columns"),
        ("question,answer\na,b,c\n", "csv", r"rows\.csv, line 2: expected 2 columns"),
        ('question\n"a"b\n', "csv", r"rows\.csv, line 2: not CSV"),
        ("\udcff", "jsonl", r"rows\.jsonl: not UTF-8"),
        ("", "jsonl", r"rows\.jsonl is empty: it has no rows"),
        ("[]", "json", r"rows\.json is empty"),
        ("a", "txt", r"rows\.txt: expected a file with one of the suffixes"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "jsonl",
            r"line 1: the messages end with one of",
        ),
        ('{"pormpt": "a", "x": 1}', "jsonl", r"got pormpt, x; did you mean 'prompt' by 'pormpt'\?"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, suffix: str, words: str):
    (tmp_path / f"rows.{suffix}").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=words):
        load_tasks(tmp_path / f"rows.{suffix}")


def test_json_lines_are_read_under_the_suffix_json_too(tmp_path: Path):
    (tmp_path / "rows.json").write_text('{"question": "a"}\n{"question": "b"}\n')
    assert [task.name for task in load_tasks(tmp_path / "rows.json")] == ["rows-0", "rows-1"]


def test_a_mark_at_the_beginning_of_a_file_is_ignored(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question\nx\n", "utf-8-sig")
    assert len(load_tasks(tmp_path / "a.csv")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"question": "qestion"},
            r"row 0: question='qestion' is no column; the row has question, .*'question'",
        ),
        ({"answer": "reward.truth"}, "answer='reward.truth' is no column"),
        ({"where": lambda task: False}, "no tasks are left: read= and where= left out all 4 rows"),
        ({"read": lambda row: None}, "no tasks are left"),
        ({"read": lambda row: 5}, "row 0: expected a Task"),
        ({"limit": 0}, "limit must be 1 or more"),
        ({"max_prompt_tokens": 5}, "needs tokenizer="),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        load_tasks(GSM8K, **options)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (
            "train.jsonl",
            {"split": "test"},
            "split='test' chooses a part of a data set, and train.jsonl has no such",
        ),
        ("train.jsonl", {"subset": "main"}, "subset='main' chooses a part"),
        (GSM8K, {"split": "test"}, "and a list has no such parts"),
        (pd.DataFrame(GSM8K), {"subset": "main"}, "and a DataFrame has no such parts"),
        (
            datasets.Dataset.from_list(GSM8K, split="train"),
            {"split": "test"},
            "is the split 'train', not 'test'",
        ),
    ],
)
def test_a_split_that_a_source_does_not_have_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: object, options: dict[str, str], words: str
):
    """Rather than a training on the wrong rows."""
    monkeypatch.chdir(tmp_path)
    written(GSM8K, Path(), "jsonl")
    with pytest.raises(ValueError, match=words):
        load_tasks(source, **options)


def test_an_explicit_column_that_is_empty_is_named():
    with pytest.raises(ValueError, match="row 1: the column 'q', which is to hold the question, is empty"):
        load_tasks([{"q": "a"}, {"q": None}], question="q")


@pytest.mark.parametrize("source", [3, {"question": "a"}, None])
def test_a_source_of_the_wrong_type_is_named(source: object):
    with pytest.raises(TypeError, match="source is"):
        load_tasks(source)


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path):
    written(GSM8K, tmp_path, "jsonl")
    with pytest.raises(
        FileNotFoundError, match=r"trian\.jsonl: no such file or folder; did you mean 'train\.jsonl'"
    ):
        load_tasks(tmp_path / "trian.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: the folder has no file with one of the suffixes"):
        load_tasks(tmp_path / "empty")


def test_an_error_of_a_function_of_the_user_names_the_row(tmp_path: Path):
    def where(task):
        return task.data["level"] > 1

    with pytest.raises(KeyError) as caught:
        load_tasks(written(GSM8K, tmp_path, "jsonl"), where=where)
    assert "train.jsonl, line 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [("pyarrow", "a.parquet", "parquet"), ("datasets", "owner/name", "datasets")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str, extra: str
):
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"torchrl-agentic\[{extra}\]"):
        load_tasks(source)


@given(st.lists(st.sampled_from(["a", "a (2)", "b", "1", 1, 2, None]), min_size=1, max_size=8))
def test_names_are_always_distinct(ids: list[object]):
    names = [task.name for task in load_tasks([{"question": "?", "id": one} for one in ids])]
    assert len(set(names)) == len(ids)
