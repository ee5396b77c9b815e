"""`CodeScorer`: runs the code of an answer against tests, in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from torchrl_agentic.errors import SandboxError, check_count, check_seconds
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.rewards import code_bridge
from torchrl_agentic.sandbox import Process, ResourceLimits, Sandbox, default_sandbox
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.trajectory import Trajectory

Tests: TypeAlias = "str | Callable[[Trajectory], Any]"

MAX_MESSAGE = 8 << 20
"""Bytes of a message between a solution and its tests."""
_FENCE = re.compile(r"(?:(`{3,})(?=[^`]*$)|(~{3,}))[ \t]*([\w+-]*)")
_BRIDGE, _SOLUTION, _TESTS = "code_bridge.py", "solution.py", "tests.py"
_INPUTS, _OUTPUTS = ("input", "stdin", "inputs"), ("output", "stdout", "expected_output", "outputs")


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test of a program: either an input and its output, or code that uses its functions.

    Attributes:
        stdin: Standard input of the program.
        stdout: Standard output that is expected; None: the test is `code`.
        code: Code that raises if the solution is wrong.
    """

    stdin: str = ""
    stdout: str | None = None
    code: str = ""


def last_code_block(text: str) -> str | None:
    """Return the last fenced code block of a text that is Python or names no language; None if there is none.

    Args:
        text: The text, in Markdown.
    """
    last: str | None = None
    fence, language = "", ""
    lines: list[str] = []
    for line in text.split("\n"):  # in linear time, whatever a model writes
        bare = line.strip(" \t\r")
        if not fence:
            if opening := _FENCE.match(bare):
                fence, language, lines = opening[1] or opening[2], opening[3].lower(), []
        elif len(bare) >= len(fence) and not bare.strip(fence[0]):
            if language in ("", "py", "python", "python3"):
                last = "".join(f"{one}\n" for one in lines)
            fence = ""
        else:
            lines.append(line)
    return last


def read_tests(found: Any) -> list[CodeTest]:
    """Return the tests that a column of a data set holds.

    Args:
        found: Code with asserts, or a list of such codes; pairs of input and output, as tuples or as mappings
            with "input" (or "stdin") and "output" (or "stdout"); a mapping with the lists "inputs" and
            "outputs"; or the JSON text of one of these.

    Raises:
        ValueError: If there are no tests, or they have another form.
    """
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # code that begins with a list
            found = json.loads(found)
    found = _plain(found)
    if isinstance(found, Mapping):
        columns = cast("Mapping[str, Any]", found)
        given: Any = _first(columns, _INPUTS)
        expected: Any = _first(columns, _OUTPUTS)
        if "inputs" in columns and isinstance(given, list | tuple) and isinstance(expected, list | tuple):
            given, expected = cast("Sequence[Any]", given), cast("Sequence[Any]", expected)
            if len(given) != len(expected):
                raise ValueError(f"there are {len(given)} inputs and {len(expected)} outputs of tests")
            found = list(zip(given, expected, strict=True))
    items: list[Any] = list(cast("Sequence[Any]", found)) if isinstance(found, list | tuple) else [found]
    if not items or found is None:
        raise ValueError("there are no tests")
    return [_test(item) for item in items]


def _test(item: Any) -> CodeTest:
    if isinstance(item, CodeTest):
        return item
    if isinstance(item, str) and item.strip():
        return CodeTest(code=item)
    pair: Any = item
    if isinstance(item, Mapping):
        columns = cast("Mapping[str, Any]", item)
        pair = (_first(columns, _INPUTS), _first(columns, _OUTPUTS))
    if not isinstance(pair, list | tuple) or len(cast("Sequence[Any]", pair)) != 2 or pair[1] is None:
        raise ValueError(f"a test is code with asserts, or an input and an output; got {item!r:.200}")
    return CodeTest(_text(pair[0]), _text(pair[1]))


def _first(columns: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((_plain(columns[name]) for name in names if columns.get(name) is not None), None)


def _plain(value: Any) -> Any:
    """Return a list for an array, as data frames hold lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(map(str, cast("Sequence[Any]", value)))
    return "" if value is None else str(value)


def same_output(found: str, expected: str) -> bool:
    """Return True if two outputs are equal, except for white space at the ends of lines and of the text.

    Args:
        found: Output of the program.
        expected: The right output.
    """
    return [line.rstrip() for line in found.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


class CodeScorer:
    """Share of tests that the Python code of an answer passes, in sandboxes.

    ::

        task = Task("double", messages, data={"tests": [{"input": "4", "output": "8"}]})
        task = Task("add", messages, data={"tests": ["assert add(1, 2) == 3"]})
        reward = CodeScorer()

    A test with input and output runs the code as a program; expected outputs never enter the sandbox. A test
    with code runs in a second sandbox, and calls the functions and classes of the solution by messages: the
    solution cannot print, exit or patch its way to a pass. Arguments and results are plain data (numbers,
    texts, bytes, lists, tuples, sets, dicts); other objects of the solution can be used by their attributes,
    methods, items and iteration, and equal only themselves. What their methods return is up to the solution.
    Changes to an argument are visible if the function returns None. Tests must import what they use, and test
    code is trusted: it comes from the data set.

    Args:
        tests: Column of the data set with the tests, or a function of the trajectory that returns them; see
            `read_tests`.
        code: Function of the trajectory that returns the code, or None for no code. None: the last code block
            of `Trajectory.final_answer`.
        sandbox: Kind and limits of the sandboxes; new ones are opened for each trajectory. None:
            `default_sandbox()`. With `UnsafeSubprocessSandbox`, hostile code can reach its tests.
        score: "share": passed tests divided by all. "all": 1.0 if all pass, else 0.0; stops at the first
            failure.
        timeout_s: Seconds for each test.
        total_timeout_s: Seconds for all tests of a solution together; the tests that are left then have
            failed. None: six times `timeout_s`.
        memory_bytes: Memory of each process of the code, unless `sandbox` has tighter limits.
        max_concurrent: Number of trajectories that run code at once.
        same: Function of (output, expected output) that returns True if they agree.

    Raises:
        SandboxError: If no sandbox works on this machine.
        ValueError: If a number is not above 0, or `score` is another text.
    """

    def __init__(
        self,
        *,
        tests: Tests = "tests",
        code: Callable[[Trajectory], str | None] | None = None,
        sandbox: Sandbox | None = None,
        score: Literal["share", "all"] = "share",
        timeout_s: float = 10.0,
        total_timeout_s: float | None = None,
        memory_bytes: int = 512 << 20,
        max_concurrent: int = 8,
        same: Callable[[str, str], bool] = same_output,
    ) -> None:
        if score not in ("share", "all"):
            raise ValueError(f"score is 'share' or 'all'; got {score!r}")
        check_seconds("timeout_s", timeout_s)
        total_s = 6 * timeout_s if total_timeout_s is None else total_timeout_s
        check_seconds("total_timeout_s", total_s)
        check_count("memory_bytes", memory_bytes, optional=False)
        limits = ResourceLimits(memory_bytes=memory_bytes, cpu_seconds=None, wall_seconds=timeout_s)
        self._sandbox = default_sandbox(limits) if sandbox is None else sandbox
        self._tests, self._code, self._score, self._same = tests, code, score, same
        self._timeout_s, self._total_s, self._memory_bytes = timeout_s, total_s, memory_bytes
        self._limiter = RateLimiter(max_concurrent=max_concurrent)
        self._bridge = Path(code_bridge.__file__).read_bytes()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Run the code of a trajectory.

        Raises:
            SandboxError: If a sandbox cannot be opened, or is lost.
            ValueError: If the task has no tests.
        """
        tests = self._tests_of(trajectory)
        code = self._code(trajectory) if self._code else last_code_block(trajectory.final_answer)
        if code is None:
            return Score(0.0, None, "no code block")
        async with self._limiter.slot():
            found = await self._run_all(code, tests)
        failures = [f"test {number}: {why}" for number, why in enumerate(found) if why]
        n_passed = len(found) - len(failures)
        is_whole = n_passed == len(tests)
        said = "\n".join([f"{n_passed} of {len(tests)} tests passed", *failures[:3]])
        return Score(float(is_whole) if self._score == "all" else n_passed / len(tests), code, said)

    def _tests_of(self, trajectory: Trajectory) -> list[CodeTest]:
        where = self._tests
        try:
            return read_tests(where(trajectory) if callable(where) else trajectory.task.data.get(where))
        except ValueError as error:
            column = "" if callable(where) else f" in the column {where!r}"
            raise ValueError(f"task {trajectory.task.name!r}{column}: {error}") from None

    async def _run_all(self, code: str, tests: Sequence[CodeTest]) -> list[str]:
        """Return why each test failed; "" for passed ones. Stop at a failure if the rest does not count."""
        found: list[str] = []
        source = code.encode("utf-8", "replace")
        async with self._sandbox.fresh() as inside:
            await inside.write_file(_SOLUTION, source)
            if all(test.stdout is not None for test in tests):
                beside = None
            else:
                beside = self._sandbox.fresh()
                await inside.write_file(_BRIDGE, self._bridge)
            try:
                if beside is not None:
                    await beside.open()
                    await beside.write_file(_BRIDGE, self._bridge)
                until = time.monotonic() + self._total_s
                for test in tests:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        found.append(f"not run: all tests together took {self._total_s:g} s")
                    else:
                        found.append(await self._run(test, inside, beside, min(self._timeout_s, left_s)))
                    if found[-1] and self._score == "all":
                        break
            finally:
                if beside is not None:
                    await beside.close()
        return found

    async def _run(self, test: CodeTest, inside: Sandbox, beside: Sandbox | None, timeout_s: float) -> str:
        if test.stdout is not None:
            return await self._run_program(test.stdin, test.stdout, inside, timeout_s)
        assert beside is not None
        await beside.write_file(_TESTS, test.code.encode())
        return await self._run_code(inside, beside, timeout_s)

    async def _run_program(self, stdin: str, expected: str, inside: Sandbox, timeout_s: float) -> str:
        own = inside.limits
        limits = replace(
            own,
            wall_seconds=min(timeout_s, own.wall_seconds or timeout_s),
            memory_bytes=min(self._memory_bytes, own.memory_bytes or self._memory_bytes),
        )
        ended = await inside.run([*inside.python_argv, _SOLUTION], stdin=stdin.encode(), limits=limits)
        if ended.timed_out:
            return f"no end within {limits.wall_seconds:.3g} s"
        if ended.exit_code:
            return f"exit code {ended.exit_code}: {ended.stderr.strip()[-200:]}"
        if ended.truncated:
            return "the output is too long"
        if not self._same(ended.stdout, expected):
            return f"expected {expected.strip()!r:.100}; found {ended.stdout.strip()!r:.100}"
        return ""

    async def _run_code(self, inside: Sandbox, beside: Sandbox, timeout_s: float) -> str:
        """Run a test with code: start both processes, and pass messages on until there is a verdict."""
        solution = await inside.spawn([*inside.python_argv, _BRIDGE, "solution", _SOLUTION])
        try:
            tests = await beside.spawn([*beside.python_argv, _BRIDGE, "tests", _TESTS])
            try:
                async with asyncio.timeout(timeout_s):
                    return await _verdict(solution, inside, tests, beside)
            except TimeoutError:
                return f"no end within {timeout_s:.3g} s"
            finally:
                await tests.kill()
        finally:
            await solution.kill()


class _TooLong(Exception):
    """A message is larger than `MAX_MESSAGE`."""


async def _verdict(solution: Process, inside: Sandbox, tests: Process, beside: Sandbox) -> str:
    """Pass messages on between a solution and its tests until there is a verdict; return why they failed."""

    async def pass_answers() -> str | _EarlyEnd:
        try:
            async for line in _lines(solution):
                await tests.send(line)
        except _TooLong:
            return "the solution sent too much"
        except EOFError:
            return _EarlyEnd(tests, beside, "the tests ended without a verdict")
        return _EarlyEnd(solution, inside, "the solution ended early")

    async def pass_questions() -> str | _EarlyEnd:
        try:
            async for line in _lines(tests):
                message = json.loads(line)
                if "verdict" in message:
                    return "" if message["verdict"] is True else str(message["why"]) or "failed"
                await solution.send(line)
        except _TooLong:
            return "the tests sent too much"
        except EOFError:
            return _EarlyEnd(solution, inside, "the solution ended early")
        return _EarlyEnd(tests, beside, "the tests ended without a verdict")

    questions, answers = asyncio.create_task(pass_questions()), asyncio.create_task(pass_answers())
    try:
        await asyncio.wait((questions, answers), return_when=asyncio.FIRST_COMPLETED)
        found = (questions if questions.done() else answers).result()
        return found if isinstance(found, str) else await found.reason()
    finally:
        for task in (questions, answers):
            task.cancel()
        await asyncio.gather(questions, answers, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _EarlyEnd:
    """A process that ended before there was a verdict."""

    process: Process
    sandbox: Sandbox
    why: str

    async def reason(self) -> str:
        """Return why the test failed; raise SandboxError if the sandbox was lost instead."""
        await self.process.kill()
        ended = await self.process.wait()
        if await self.sandbox.was_ended_outside(ended):
            raise SandboxError(f"a sandbox was lost while it ran code: {ended}")
        return f"{self.why}: {ended}"


async def _lines(process: Process) -> AsyncGenerator[bytes]:
    """Yield the lines of a process's output."""
    pieces: list[bytes] = []
    size = 0
    while data := await process.receive():
        *lines, rest = data.split(b"\n")
        for line in lines:
            yield b"".join((*pieces, line, b"\n"))
            pieces, size = [], 0
        pieces.append(rest)
        size += len(rest)
        if size > MAX_MESSAGE:
            raise _TooLong
