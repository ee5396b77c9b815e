"""The message values: possible return values of a tool, and the agreement of status and is_error."""

import asyncio
import copy
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import pickle
import types
from types import MappingProxyType
from typing import Any

import hypothesis.extra.numpy
import numpy as np
import pandas as pd
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import MCPServerConfig
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import (
    FIRST,
    MAX_ELEMENTS,
    FileRefPart,
    ImagePart,
    JsonPart,
    Message,
    Status,
    TextPart,
    Timing,
    ToolResult,
    VideoPart,
    jsonable,
)
from torchrl_agentic.tools.base import Effects
from torchrl_agentic.tools.verl import ToolResponse


class Point(pydantic.BaseModel):
    x: int


@dataclasses.dataclass
class Pair:
    a: int
    b: str


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize("status", list(Status))
def test_is_error_is_true_for_all_but_ok(status: Status):
    for given_flag in (False, status is not Status.OK):
        result = ToolResult(is_error=given_flag, status=status)
        assert result.is_error is (status is not Status.OK)
        assert result.status is status


@pytest.mark.parametrize(("flag", "status"), [(True, Status.ERROR), (False, Status.OK)])
def test_status_follows_from_is_error_where_it_is_not_given(flag: bool, status: Status):
    assert ToolResult(is_error=flag).status is status
    assert ToolResult.from_text("x", is_error=flag).status is status


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        ([1, 2], [1, 2]),
        ([], []),
        (3, 3),
        (2.5, 2.5),
        (True, True),
        (False, False),
        (None, None),
        (Point(x=1), {"x": 1}),
        ([Point(x=1)], [{"x": 1}]),
        (Pair(1, "z"), {"a": 1, "b": "z"}),
        (Colour.RED, "red"),
    ],
)
def test_a_value_becomes_json(value: object, data: object):
    result = ToolResult.from_value(value)
    assert result.parts == (JsonPart(data),)
    assert type(result.parts[0].data) is type(data)
    assert json.loads(result.text) == data
    assert result.status is Status.OK


def test_text_stays_text():
    assert ToolResult.from_value("hello").parts == (TextPart("hello"),)
    assert ToolResult.from_value("").parts == (TextPart(""),)


def test_results_and_parts_are_taken_as_they_are():
    image, file = ImagePart(b"12"), FileRefPart("/work/a")
    result = ToolResult((image,), status=Status.ERROR)
    assert ToolResult.from_value(result) is result
    assert ToolResult.from_value(image).parts == (image,)
    assert ToolResult.from_value((image, file, TextPart("t"), JsonPart(1))).parts == (
        image, file, TextPart("t"), JsonPart(1),
    )  # fmt: skip
    video = VideoPart(b"123")
    assert ToolResult.from_value(video).parts == (video,)
    assert ToolResult.from_value((video, image)).text.startswith("[video video/mp4, 3 bytes]\n[image")
    assert ToolResult.from_value((image, file)).text == "[image image/png, 2 bytes]\n[file /work/a]"


@pytest.mark.parametrize("reward", [0, 0.0, -1.5, 1, np.float32(0.5), torch.tensor(0.5)])
def test_a_reward_is_kept_even_if_falsy(reward: Any):
    for result in (
        ToolResult.from_value("text", reward=reward),
        ToolResult.from_verl(("text", reward)),
        ToolResult.from_verl(("text", reward, {"m": 1})),
    ):
        assert result.reward == reward
        assert type(result.reward) is float
        assert result.text == "text"


def test_metrics_come_along():
    for result in (
        ToolResult.from_value([1, 2], metrics={"hits": 0}),
        ToolResult.from_verl(([1, 2], None, {"hits": 0})),
    ):
        assert (result.text, result.reward, result.metrics) == ("[1, 2]", None, {"hits": 0})
    assert ToolResult.from_verl(("x",)).parts == (TextPart("x"),)


def test_a_reward_is_added_to_a_result():
    """Its status and meta stay, and so does its reward where there is no other."""
    inner = ToolResult.from_text("no", status=Status.ERROR, meta={"k": 1}, stop=True)
    for result in (ToolResult.from_verl((inner, 0.5)), ToolResult.from_value(inner, reward=0.5)):
        assert (result.status, result.is_error, result.meta, result.stop) == (
            Status.ERROR,
            True,
            {"k": 1},
            True,
        )
        assert result.reward == 0.5
        assert ToolResult.from_verl((result, None)) == result


@pytest.mark.parametrize(
    "value", [(), ("a", 1, {}, 4), ("a", "1"), ("a", [1, 2]), ("a", 1.0, 3), ("a", 1.0, [1])]
)
def test_other_tuples_are_not_results_of_verl(value: tuple[object, ...]):
    with pytest.raises(TypeError, match=r"tuple|reward|metrics"):
        ToolResult.from_verl(value)


@given(
    st.tuples() | st.tuples(st.integers(), st.floats(0, 1)) | st.tuples(st.text(), st.just(1.0), st.just({}))
)
def test_a_tuple_is_a_json_list_and_never_a_reward(value: tuple[object, ...]):
    """(3, 2) is what divmod(17, 5) returns."""
    result = ToolResult.from_value(value)
    assert json.loads(result.text) == list(value)
    assert (result.reward, result.metrics) == (None, None)


@pytest.mark.parametrize("first", [ToolResponse(text="x"), ToolResult.from_text("x"), TextPart("x")])
def test_a_tuple_of_a_result_and_a_reward_says_how_a_reward_is_given(first: object):
    with pytest.raises(TypeError, match=r"ToolResult.from_value\(value, reward=…\).*@function_tool"):
        ToolResult.from_value((first, 0.5, {}))


class Unfriendly:
    """Has every method, as a mock has."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self


RED, WHEN = Colour.RED, datetime.datetime(2026, 1, 2, 3)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32(1.5), 1.5),
        (np.float64(1.5), 1.5),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (np.array([{"a": np.int8(1)}, None], dtype=object), [{"a": 1}, None]),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (torch.tensor(3), 3),
        (torch.tensor([1.5, 2.0], requires_grad=True), [1.5, 2.0]),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        (torch.zeros(0, 3), []),
        (torch.ones(2, 3).shape, [2, 3]),
        (pd.DataFrame({"a": [1], "b": [None]}), {"columns": ["a", "b"], "data": [[1, None]]}),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {"columns": ["a", "a"], "data": [[1, 2]]}),
        (pd.DataFrame({"a": [1.5]}, index=["r"]), {"columns": ["a"], "index": ["r"], "data": [[1.5]]}),
        (pd.Series([1, 2]), [1, 2]),
        (pd.Series(["x", "x", "y"]).value_counts(), {"index": ["x", "y"], "data": [2, 1]}),
        (pd.Series([WHEN, pd.NaT]), ["2026-01-02T03:00:00", None]),
        (pd.Index([1, 2]), [1, 2]),
        (MappingProxyType({"a": range(2)}), {"a": [0, 1]}),
        ({"at": WHEN, "path": pathlib.Path("/a"), "cost": decimal.Decimal("1.50"), "kind": RED, "of": {1}}, {
            "at": "2026-01-02T03:00:00", "path": "/a", "cost": "1.50", "kind": "red", "of": [1]}),
        ([b"text", Level.HIGH, Pair(1, "z"), (1,)], ["text", 3, {"a": 1, "b": "z"}, [1]]),
        ([float("inf")], ["Infinity"]),
        (float("nan"), "NaN"),
        ({"x": np.array([np.nan, -np.inf])}, {"x": ["NaN", "-Infinity"]}),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_other_libraries_become_strict_json(value: object, data: object):
    def fail(constant: str) -> None:
        raise AssertionError(constant)

    for whole, expected in ((value, data), ([value, {"k": value}], [data, {"k": data}])):
        assert json.loads(ToolResult.from_value(whole).text, parse_constant=fail) == expected


_DTYPES = st.sampled_from(["bool", "int8", "int64", "float16", "float32", "float64"])
_arrays = hypothesis.extra.numpy.arrays(
    _DTYPES, hypothesis.extra.numpy.array_shapes(min_dims=0, min_side=0, max_side=3)
)


@given(
    st.recursive(
        _arrays | st.integers(-5, 5) | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
        max_leaves=5,
    ),
    st.sampled_from([lambda array: array, torch.from_numpy, lambda array: torch.from_numpy(array).unbind(0)]),
)  # fmt: skip
def test_arrays_at_any_depth_are_the_lists_that_they_hold(value: Any, convert: Any):
    """As numpy arrays, tensors and tuples of tensors."""

    def mapped(value: Any, leaf: Any) -> Any:
        if isinstance(value, list):
            return [mapped(item, leaf) for item in value]
        if isinstance(value, dict):
            return {key: mapped(item, leaf) for key, item in value.items()}
        return leaf(value) if isinstance(value, np.ndarray) else value

    shown = mapped(value, lambda array: convert(array) if array.ndim else array)
    expected = mapped(value, lambda array: array.tolist())
    assert json.loads(str(JsonPart(jsonable(shown)))) == json.loads(str(JsonPart(expected)))


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_large_array_is_abridged_before_it_becomes_text(make: Any):
    kind = str(make(1).dtype)
    assert jsonable({"a": make((1000, 500))}) == {
        "a": {"shape": [1000, 500], "dtype": kind, "first": [0.0] * FIRST}
    }
    assert len(jsonable(make(MAX_ELEMENTS))) == MAX_ELEMENTS
    assert jsonable(make(MAX_ELEMENTS + 1)).keys() == {"shape", "dtype", "first"}


def test_a_large_table_is_abridged_to_its_first_rows_and_columns():
    frame = pd.DataFrame(np.zeros((300, 400), dtype=int))
    columns, data = list(range(FIRST)), [[0] * FIRST] * FIRST
    assert jsonable(frame) == {"shape": [300, 400], "columns": columns, "data": data}
    assert jsonable(frame[0].repeat(100)) == {"shape": [30_000], "index": [0] * FIRST, "data": [0] * FIRST}


def _cycle() -> list[object]:
    cycle: list[object] = []
    cycle.append(cycle)
    return cycle


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Raising(pydantic.BaseModel):
    @pydantic.computed_field
    @property
    def total(self) -> int:
        raise KeyError("total")


def _deep() -> list[object]:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: _deep(),
        lambda: b"\xff",
        lambda: [object()],
        lambda: lambda: None,
        lambda: range,
        lambda: np.float32,
        Unfriendly,
        lambda: torch.eye(2).to_sparse(),
        lambda: range(10**12),
        lambda: 10**5000,
        lambda: _cycle(),
        lambda: Unwritable(),
        lambda: {"receipt": types.SimpleNamespace(no=1)},
        lambda: Raising(),
    ],
    ids=[
        "object",
        "deep",
        "bytes",
        "inside",
        "function",
        "class",
        "numpy class",
        "mock",
        "sparse",
        "range",
        "digits",
        "cycle",
        "no text",
        "partly",
        "property",
    ],
)
def test_a_value_that_is_not_json_becomes_its_text_with_a_note(make):
    """The tool has run: nothing is refused, now or when it is written, and no address differs by run."""
    value = make()
    with pytest.raises(TypeError, match=r"is not JSON|more digits"):
        jsonable(value)
    result = ToolResult.from_value(value).checked()
    assert (result.status, result.notes) == (Status.OK, (f"not JSON: {type(value).__name__}",))
    assert result.text
    assert " at 0x" not in result.text


def test_a_number_that_json_refuses_inside_a_list_can_be_written():
    assert ToolResult.from_value([10**5000]).checked().text


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(value=_json.filter(lambda value: not isinstance(value, str)))
def test_any_json_value_reads_back_from_the_text(value: object):
    assert json.loads(ToolResult.from_value(value).text) == value


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "image"}, "b", {}], "a[image]b[part]"),
        ([], ""),
    ],
)
def test_message_has_text_for_any_content(content: object, text: str):
    assert Message("user", content).text == text


def test_values_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ToolResult().is_error = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ToolError("wrong", {"k": 1}), Status.ERROR, "Error: wrong"),
        (StopSignal("enough"), Status.OK, "[stop] enough"),
        (InfrastructureError("429"), Status.INFRA, "Error: t is not available at the moment: 429"),
        (TimeoutError(), Status.TIMEOUT, "Error: t timed out"),
        (TimeoutError("5 s"), Status.TIMEOUT, "Error: t timed out: 5 s"),
    ],
)
def test_tool_errors_become_results(error, status, text):
    result = ToolResult.from_error(error, "t")
    assert result is not None
    assert (result.status, result.text, result.stop) == (status, text, isinstance(error, StopSignal))
    assert result.meta == getattr(error, "detail", None)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError(), SystemExit()])
def test_bug_does_not_become_a_result(error):
    assert ToolResult.from_error(error, "t") is None


def test_status_and_is_error_agree_after_replace():
    plain = ToolResult.from_text("x")
    for status in Status:
        assert dataclasses.replace(plain, status=status).is_error is (status is not Status.OK)
    failed = ToolResult.from_text("x", status=Status.INFRA)
    assert dataclasses.replace(failed, stop=True).status is Status.INFRA
    assert not dataclasses.replace(failed, status=Status.OK).is_error


def test_a_contradiction_between_status_and_is_error_is_refused():
    with pytest.raises(ValueError, match="is_error=True contradicts"):
        ToolResult(is_error=True, status=Status.OK)
    with pytest.raises(ValueError, match="is_error=True contradicts"):
        dataclasses.replace(ToolResult.from_text("x"), is_error=True)  # type: ignore[call-arg]


def test_a_result_keeps_its_fields_when_it_is_replaced_copied_or_pickled():
    values = {
        "parts": (TextPart("x"),), "status": Status.INFRA, "meta": {"k": 1}, "stop": True, "reward": 1.0,
        "metrics": {"m": 1}, "timing": Timing(1.0, 2.0, 3.0), "notes": ("n",),
    }  # fmt: skip
    assert list(values) == [field.name for field in dataclasses.fields(ToolResult)]
    full = ToolResult(**values)
    assert full == dataclasses.replace(full) == copy.deepcopy(full) == pickle.loads(pickle.dumps(full))
    assert full.is_error
    assert not hasattr(full, "__dict__")
    for name, value in values.items():
        assert getattr(dataclasses.replace(ToolResult(), **{name: value}), name) == value
        assert full != dataclasses.replace(full, **{name: getattr(ToolResult(), name)})
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(full, name, value)


@pytest.mark.parametrize(
    "value",
    [Effects(["a"], ["b"]), MCPServerConfig("npx", ["-y", "x"])],
    ids=lambda value: type(value).__name__,
)
def test_a_value_whose_constructor_computes_fields_is_an_ordinary_frozen_value(value: Any):
    assert value == dataclasses.replace(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value))
    assert not hasattr(value, "__dict__")
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


@given(
    text=st.text(),
    is_error=st.booleans(),
    status=st.none() | st.sampled_from(list(Status)),
    meta=st.none() | st.dictionaries(st.text(), st.integers()),
    stop=st.booleans(),
)
def test_from_text_equals_the_constructor(text, is_error, status, meta, stop):
    if status is Status.OK:
        is_error = False  # the constructor refuses the contradiction
    made = ToolResult.from_text(text, is_error=is_error, meta=meta, status=status, stop=stop)
    plain = ToolResult((TextPart(text),), is_error, meta, status=status, stop=stop)
    assert made == plain
    assert repr(made) == repr(plain)
    assert pickle.loads(pickle.dumps(made)) == plain
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.stop = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.parts[0].text = ""
