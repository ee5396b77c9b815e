"""Code that is run inside a sandbox, and what is made of its output."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncGenerator

from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

CLEARED_UP_S = 5.0
"""How long a program may take to clear up what it prepared."""
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
"""`attempt` an attack in a process of its own: it is stopped by an OSError, or by the end of that process."""


async def python(
    sandbox: Sandbox, code: str, *, before: str = "", limits: ResourceLimits | None = None, **words: object
) -> SandboxResult:
    """Run Python inside: code that may be indented, behind other code, where `words` are variables."""
    program = f"{_given(words)}{before}\n{textwrap.dedent(code)}"
    return await sandbox.run([*sandbox.python_argv, "-c", program], limits=limits)


async def check_attacks_stopped(sandbox: Sandbox, code: str, *, before: str = "", **words: object) -> None:
    """Run attacks inside, and see that each was tried and stopped."""
    whole = f"{textwrap.dedent(code)}\nprint('all tried')"
    result = await python(sandbox, whole, before=f"{_given(words)}{ATTACKS}{before}")
    lines = result.stdout.splitlines()
    assert lines[-1:] == ["all tried"], f"the attacks did not end: {result}"
    broken = [line for line in lines if line.startswith("broken:")]
    assert not broken, f"attacks that are wrong themselves: {broken}, {result.stderr}"
    through = [line.removeprefix("through: ") for line in lines if line.startswith("through:")]
    assert not through, f"got through: {', '.join(through)}"


@contextlib.asynccontextmanager
async def prepared_inside(
    sandbox: Sandbox, code: str, *, at_end: str = "", **words: object
) -> AsyncGenerator[str]:
    """Run Python inside that prepares something, and keeps it until the end; gives what it printed.

    code: where an OSError stops it, there is nothing that others could get at. at_end: code that clears up.
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
        with contextlib.suppress(EOFError, TimeoutError):  # clears up also behind an attack that succeeded
            async with asyncio.timeout(CLEARED_UP_S):
                await process.send(b".")
                await process.wait()
        await process.kill()


async def until(process: Process, end: bytes) -> bytes:
    """Read what a process prints, up to these bytes, which are left out."""
    data = b""
    while not data.endswith(end):
        piece = await process.receive()
        assert piece, f"it ended early: {data!r} {process.errors()}"
        data += piece
    return data.removesuffix(end)


def _given(words: dict[str, object]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in words.items())
