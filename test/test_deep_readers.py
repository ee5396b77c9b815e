"""For deeply nested text and values, every reader returns a value or raises its documented error."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from helpers.deep_readers import DEEPEST, READERS
from helpers.processes import started
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_agentic.text import MAX_DEPTH

HERE = Path(__file__).parent


class Child:
    """A process that reads; a new one takes the place of one that died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stack = contextlib.ExitStack()

    def ask(self, *case: object) -> str:
        """Return what became of a case: "value", "refused", another exception, or how the process ended."""
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE / "records")))}
            program = [sys.executable, HERE / "helpers" / "deep_readers.py"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = self._stack.enter_context(started(program, text=True, env=environment, **pipes))
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
        self._stack.close()
        self._process = None


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
    found = child.ask(reader, depth, brackets, int(is_closed))
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
