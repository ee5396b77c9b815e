"""A document holds what PyYAML reads, and knows the line of each value."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.tool_config.lines import Document, read_yaml

KEYS = st.text("abcdefgh", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("xyz :#-'\"é", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def _read(text: str) -> Document:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(text, "utf-8")
        return read_yaml(path)


def _paths(value: Any, steps: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """The steps to each value, in the order of the file."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inner:
        yield (*steps, step)
        yield from _paths(item, (*steps, step))


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_it_reads_what_pyyaml_reads_and_the_line_of_a_key_begins_with_it(data: dict[str, Any]):
    """Each key stands at the begin of its line, but for those that begin an item of a list."""
    text = yaml.safe_dump(data, default_flow_style=False, allow_unicode=True, sort_keys=False)
    document = _read(text)
    assert document.data == data
    lines = [document.line(steps) for steps in _paths(data)]
    assert lines == sorted(lines)
    for steps in _paths(data):
        if isinstance(steps[-1], str):
            line = text.splitlines()[document.line(steps) - 1].lstrip("- ")
            assert line.lstrip("'\"").startswith(steps[-1])


def test_what_is_missing_has_the_line_of_what_is_around():
    document = _read("a:\n  b:\n  - c: 1\n    d: 2\n")
    assert document.line(("a", "b", 0, "d")) == 4
    assert document.line(("a", "b", 0, "x")) == 3
    assert document.line(("a", "b", 5)) == 2
    assert document.line(("x",)) == 1


def test_a_merged_key_has_the_line_where_it_stands():
    document = _read("a: &a\n  b: 1\n  c: 2\nd:\n  <<: *a\n  c: 3\n")
    assert document.data["d"] == {"b": 1, "c": 3}
    assert document.line(("d", "b")) == 2
    assert document.line(("d", "c")) == 6
