"""For deeply nested text and values, every reader returns a value or raises its documented error."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.deep_readers import DEEPEST, READERS, answer
from helpers.forked import PROCESSES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_agentic.text import MAX_DEPTH


class Child:
    """A process that reads; a new one takes the place of one that died."""

    def __init__(self) -> None:
        self._process: Any = None

    def ask(self, *case: object) -> str:
        """Return what became of a case: "value", "refused", another exception, or how the process ended."""
        if self._process is None:
            self._pipe, theirs = PROCESSES.Pipe()
            self._process = PROCESSES.Process(target=answer, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(case)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            return f"the process ended: {self.close()}"

    def close(self) -> int | None:
        """End the process; return its exit code, None if there is no process."""
        if self._process is None:
            return None
        self._pipe.close()
        self._process.join()
        code = self._process.exitcode
        self._process = None
        return code


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=5)
@given(
    depth=st.integers(1, 2 * MAX_DEPTH) | st.integers(1, DEEPEST),
    brackets=st.text("[{np", min_size=1, max_size=4) | st.sampled_from(("-", "-?")),
    is_closed=st.booleans(),
)
@example(depth=MAX_DEPTH, brackets="[", is_closed=True)
@example(depth=900, brackets="[{", is_closed=True)
@example(depth=5_000, brackets="np", is_closed=True)
@example(depth=DEEPEST, brackets="[", is_closed=False)
@example(depth=DEEPEST, brackets="{", is_closed=True)
def test_nesting_makes_a_value_or_an_error_of_ours(
    child: Child, reader: str, depth: int, brackets: str, is_closed: bool
):
    found = child.ask(reader, depth, brackets, is_closed)
    assert found in ("value", "refused")
    if depth > 2 * MAX_DEPTH and reader in (
        "read_json",
        "simplify_schema",
        "arguments",
        "tools",
        "config",
        "aliases",
    ):
        assert found == "refused"
