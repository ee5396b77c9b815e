"""Nesting is bounded wherever text or values of strangers are read: a value or our error, never a crash."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from helpers.deep_readers import READERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_agentic.nesting import (
    MAX_DEPTH,
    TooDeepError,
    TooManyValuesError,
    count_values,
    read_json,
)

HERE = Path(__file__).parent


class Child:
    """A process that reads; a new one takes the place of one that died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *case: object) -> str:
        """Return what became of a case: "value", "refused", another exception, or how the process ended."""
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE / "records")))}
            self._process = subprocess.Popen(
                [sys.executable, HERE / "deep_readers.py"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        stdin, stdout = self._pipes()
        print(*case, sep="\t", file=stdin, flush=True)
        answer = stdout.readline().rstrip("\n")
        if not answer:
            answer = f"the process ended: {self._process.wait()}"
            self.close()
        return answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for pipe in self._pipes():
                pipe.close()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=5)
@given(
    depth=st.integers(1, 2 * MAX_DEPTH) | st.integers(1, 300_000),
    brackets=st.text("[{np", min_size=1, max_size=4) | st.sampled_from(("-", "-?")),
    is_closed=st.booleans(),
)
@example(depth=MAX_DEPTH, brackets="[", is_closed=True)
@example(depth=900, brackets="[{", is_closed=True)
@example(depth=5_000, brackets="np", is_closed=True)
@example(depth=300_000, brackets="[", is_closed=False)
@example(depth=300_000, brackets="{", is_closed=True)
def test_nesting_makes_a_value_or_an_error_of_ours(
    child: Child, reader: str, depth: int, brackets: str, is_closed: bool
):
    found = child.ask(reader, depth, brackets, int(is_closed))
    assert found in ("value", "refused")
    if depth > 2 * MAX_DEPTH and reader in ("read_json", "tidy", "arguments", "tools", "config", "aliases"):
        assert found == "refused"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_as_deep_as_allowed_is_read_and_one_level_more_is_not():
    for text in ("[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH):
        assert count_values(read_json(text)) == count_values(read_json(text.encode())) >= MAX_DEPTH - 1
        for deeper in (f"[{text}]", f"[{text}]".encode()):
            with pytest.raises(TooDeepError, match=f"more than {MAX_DEPTH} levels"):
                read_json(deeper)
    assert read_json(json.dumps("[" * 10_000)) == "[" * 10_000
    with pytest.raises(TooDeepError):
        count_values(_nested(MAX_DEPTH + 1))


def test_a_greater_depth_can_be_given():
    text = "[" * 300 + "]" * 300
    assert count_values(read_json(text, max_depth=300), max_depth=300) == 299
    with pytest.raises(TooDeepError, match="more than 299 levels"):
        read_json(text, max_depth=299)
    with pytest.raises(TooDeepError, match="more than 10 levels"):
        read_json("[" * 11 + "]" * 11, max_depth=10)


def test_a_value_that_contains_itself_or_multiplies_is_refused():
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(TooDeepError):
        count_values(itself)
    twice: list[Any] = []
    for _ in range(100):
        twice = [twice, twice]
    with pytest.raises(TooManyValuesError, match="more than 1000 values"):
        count_values(twice, max_values=1000)


@given(
    st.recursive(
        st.none() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    )
)
def test_values_are_counted_at_any_depth(value: Any):
    def expected(item: Any) -> int:
        items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        return sum(1 + expected(inner) for inner in items)

    assert count_values(value) == expected(value)
    with pytest.raises(TooManyValuesError):
        count_values([value], max_values=expected(value))
