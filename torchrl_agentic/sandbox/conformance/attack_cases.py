"""Run code inside a sandbox and evaluate its output."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Generator

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

CLEARED_UP_S = 5.0
"""Maximum seconds that a program may take to clean up what it prepared."""
ATTACKS = """
import ctypes, os, sys, time, traceback
libc = ctypes.CDLL(None, use_errno=True)

def checked(found):
    if found == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found

def syscall(*words):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    return checked(libc.syscall(*words))

def attempt(what, attack):
    child = os.fork()
    if child == 0:
        code = 2
        try:
            attack()
            code = 0
        except (OSError, MemoryError):
            code = 1
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print("through:", what)
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
        print("broken:", what)

def expect(found):
    if not found:
        raise OSError("it had no effect")

def processes():
    try:
        return [name for name in os.listdir('/proc') if name.isdigit()]
    except OSError:
        return [str(number) for number in {1, os.getppid(), os.getpid()}]
"""
"""Defines `attempt`, which tries an attack in its own process: an OSError or its end means stopped."""


async def python(
    sandbox: Sandbox, code: str, *, before: str = "", limits: ResourceLimits | None = None, **words: object
) -> SandboxResult:
    """Run Python code inside.

    Args:
        sandbox: The sandbox.
        code: The code; it may be indented.
        before: Code to run first.
        limits: Limits of the command.
        words: Variables of the code.
    """
    program = f"{_given(words)}{before}\n{textwrap.dedent(code)}"
    return await sandbox.run([*sandbox.python_argv, "-c", program], limits=limits)


async def check_attacks_stopped(sandbox: Sandbox, code: str, *, before: str = "", **words: object) -> None:
    """Run attacks inside, and assert that each was tried and stopped.

    Args:
        sandbox: The sandbox.
        code: Calls of `attempt`; see `ATTACKS`.
        before: Code to run first.
        words: Variables of the code.
    """
    whole = f"{textwrap.dedent(code)}\nprint('all tried')"
    result = await python(sandbox, whole, before=f"{_given(words)}{ATTACKS}{before}")
    lines = result.stdout.splitlines()
    assert lines[-1:] == ["all tried"], f"the attacks did not end: {result}"
    broken = [line for line in lines if line.startswith("broken:")]
    assert not broken, f"attacks that failed by a mistake of their own: {broken}, {result.stderr}"
    through = [line.removeprefix("through: ") for line in lines if line.startswith("through:")]
    assert not through, f"got through: {', '.join(through)}"


@contextlib.asynccontextmanager
async def prepared_inside(
    sandbox: Sandbox, code: str, *, at_end: str = "", **words: object
) -> AsyncGenerator[str]:
    """Run Python code inside that prepares something and keeps it until the end. Yield what it printed.

    Args:
        sandbox: The sandbox.
        code: The code. If an OSError stops it, there is nothing to attack.
        at_end: Code that cleans up.
        words: Variables of the code.
    """
    lines = (
        "def prepare():", textwrap.indent(textwrap.dedent(code) + "\nreturn locals()", " "),
        "try: kept = prepare()", "except OSError: kept = {}",
        "print('ready', flush=True)", "sys.stdin.read(1)", "if kept:", " globals().update(kept)",
        textwrap.indent(at_end or "pass", " "),
    )  # fmt: skip
    program = _given(words) + ATTACKS + "\n".join(lines)
    process = await sandbox.spawn([*sandbox.python_argv, "-c", program])
    try:
        yield (await until(process, b"ready\n")).decode()
    finally:
        with contextlib.suppress(EOFError, TimeoutError):  # cleans up also after an attack that succeeded
            async with asyncio.timeout(CLEARED_UP_S):
                await process.send(b".")
                await process.wait()
        await process.kill()


@contextlib.contextmanager
def never_infra(what: str = "") -> Generator[None]:
    """Assert that the block raises no error of the sandbox: whatever happens is a result of the code.

    Args:
        what: What is tried.
    """
    try:
        yield
    except InfrastructureError as error:
        tried = f"{what}: " if what else ""
        raise AssertionError(f"{tried}code has caused an error of the sandbox: {error}") from None


async def refused(work: Awaitable[object], *errors: type[Exception]) -> Exception:
    """Assert that a call raises one of these errors, and return it.

    Args:
        work: The call.
        errors: Types of the errors.
    """
    try:
        found = await work
    except errors as error:
        return error
    raise AssertionError(f"no {' or '.join(error.__name__ for error in errors)}: {found!r}")


async def until(process: Process, end: bytes) -> bytes:
    """Read the output of a process up to `end`, and return it without `end`.

    Args:
        process: The process.
        end: Bytes that end the output.
    """
    data = b""
    while not data.endswith(end):
        piece = await process.receive()
        assert piece, f"it ended early: {data!r} {process.errors()}"
        data += piece
    return data.removesuffix(end)


def _given(words: dict[str, object]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in words.items())
