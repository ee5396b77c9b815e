"""A file is read as PyYAML reads it, and each value has its line."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.config import Location
from torchrl_agentic.config.document import read_yaml

KEYS = st.text("abcdefgh", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("xyz :#-'\"é", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def _read(text: str) -> tuple[Any, Location]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text, "utf-8")
        return read_yaml(path)


def _line(location: Location, *steps: int | str) -> int:
    return int(location.at(*steps).place.rpartition(":")[2])


def _paths(value: Any, steps: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """The steps to each value, in the order of the file."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inner:
        yield (*steps, step)
        yield from _paths(item, (*steps, step))


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_documents_equal_those_of_pyyaml_and_lines_point_at_keys(data: dict[str, Any]):
    """Each key begins its line, except those that begin an item of a list."""
    text = yaml.safe_dump(data, default_flow_style=False, allow_unicode=True, sort_keys=False)
    found, root = _read(text)
    assert found == data
    lines = [_line(root, *steps) for steps in _paths(data)]
    assert lines == sorted(lines)
    for steps in _paths(data):
        if isinstance(steps[-1], str):
            line = text.splitlines()[_line(root, *steps) - 1].lstrip("- ")
            assert line.lstrip("'\"").startswith(steps[-1])


def test_missing_value_has_the_line_of_its_parent():
    _, root = _read("a:\n  b:\n  - c: 1\n    d: 2\n")
    assert _line(root, "a", "b", 0, "d") == 4
    assert _line(root, "a", "b", 0, "x") == 3
    assert _line(root, "a", "b", 5) == 2
    assert _line(root, "x") == 1


def test_merged_key_has_the_line_of_its_definition():
    data, root = _read("a: &a\n  b: 1\n  c: 2\nd:\n  <<: *a\n  c: 3\n")
    assert data["d"] == {"b": 1, "c": 3}
    assert _line(root, "d", "b") == 2
    assert _line(root, "d", "c") == 6


def test_a_merge_is_read_before_the_mapping_that_it_refers_to_is_complete():
    data, root = _read("a:\n  b: &b\n    <<: {x: 1}\n    x: 2\nc: {<<: *b}\n")
    assert data == {"a": {"b": {"x": 2}}, "c": {"x": 2}}
    assert _line(root, "c", "x") == 4
