"""Commands and trainers leave no processes behind."""

from __future__ import annotations

import asyncio
import contextlib

from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import python, until
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import (
    check_gone,
    file_appears,
    new_mark,
    trainer,
)
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("leftovers")


DAEMONS = """
import os, signal, sys
def daemon(prepare=None):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
            null = os.open('/dev/null', os.O_RDWR)
            [os.dup2(null, n) for n in (0, 1, 2)]
            if prepare: prepare()
            os.execvp('sleep', ['sleep', mark])
        os._exit(0)
    os.wait()
"""
"""Defines `daemon`, which leaves its session by a double fork and then sleeps."""


@group.case()
async def background_processes_end_with_their_command(sandbox: Sandbox) -> None:
    """Also if they keep the output open."""
    for output in (">/dev/null 2>&1", ""):
        mark = new_mark()
        async with asyncio.timeout(HANG_S):
            result = await sandbox.run(
                ["sh", "-c", f"trap '' HUP TERM; nohup sleep {mark} {output} & echo done"]
            )
        assert result.exit_code == 0, result
        assert "done" in result.stdout, result
        assert not result.timed_out, result
        await check_gone(mark)


@group.case("daemons")
async def daemons_end_with_their_command(sandbox: Sandbox) -> None:
    mark = new_mark()
    result = await python(sandbox, "daemon(); daemon(); print('done')", before=DAEMONS, mark=mark)
    assert result.stdout == "done\n", result
    await check_gone(mark)


@group.case("daemons")
async def stopped_processes_end_with_their_command(sandbox: Sandbox) -> None:
    mark = new_mark()
    code = "daemon(lambda: os.kill(os.getpid(), signal.SIGSTOP)); os.kill(os.getpid(), signal.SIGKILL)"
    assert (await python(sandbox, code, before=DAEMONS, mark=mark)).exit_code == -9
    await check_gone(mark)


@group.case("daemons")
async def daemons_end_when_their_command_is_cancelled_or_stopped(sandbox: Sandbox) -> None:
    mark = new_mark()
    code = "daemon(); open('started', 'w'); import time; time.sleep(60)"
    limits = ResourceLimits(wall_seconds=0.5)
    result = await python(sandbox, code, before=DAEMONS, limits=limits, mark=mark)
    assert result.timed_out, result
    await check_gone(mark)
    await sandbox.run(["rm", "started"])
    task = asyncio.create_task(python(sandbox, code, before=DAEMONS, mark=mark))
    await file_appears(sandbox, "started")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await check_gone(mark)


@group.factory_case("daemons")
async def daemons_of_a_long_lived_process_end_with_it_and_with_the_sandbox(make: Make) -> None:
    code = f"{DAEMONS}daemon(); print('up', flush=True); sys.stdin.read()"
    async with make() as sandbox:
        mark = new_mark()
        process = await sandbox.spawn([*sandbox.python_argv, "-c", f"mark = {mark!r}\n{code}"])
        await until(process, b"up\n")
        await process.kill()
        await check_gone(mark)
        mark = new_mark()
        process = await sandbox.spawn([*sandbox.python_argv, "-c", f"mark = {mark!r}\n{code}"])
        await until(process, b"up\n")
    try:
        await check_gone(mark)
    finally:
        await process.kill()


@group.case()
async def zombies_delay_nothing(sandbox: Sandbox) -> None:
    code = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                if os.fork() == 0: time.sleep(0.05); os._exit(0)
                os._exit(0)
        time.sleep(0.1); print('done')
    """
    for _ in range(6):
        assert (await python(sandbox, code)).stdout == "done\n"


_TRAINING = """
async def main():
    await sandbox.open()
    process = await sandbox.spawn(['sh', '-c', 'echo up; sleep ' + arguments[0]])
    await process.receive()
    task = asyncio.create_task(sandbox.run(['sh', '-c', 'touch started; sleep ' + arguments[0]]))
    while not task.done():
        try: await sandbox.read_file('started'); break
        except FileNotFoundError: await asyncio.sleep(0.01)
    print('training', flush=True)
    await asyncio.sleep({seconds})
    os._exit(0)
asyncio.run(main())
"""


@group.factory_case("killed_trainer", needs=["pickle", "linux"])
async def a_killed_trainer_leaves_no_processes(make: Make) -> None:
    mark = new_mark()
    async with trainer(make(), _TRAINING.format(seconds=60), mark) as process:
        await process.expect_line("training")
        process.kill()
        await check_gone(mark)


@group.factory_case("killed_trainer", needs=["pickle", "linux"])
async def a_trainer_that_ends_without_closing_leaves_no_processes(make: Make) -> None:
    mark = new_mark()
    async with trainer(make(), _TRAINING.format(seconds=0), mark) as process:
        await process.expect_line("training")
        await check_gone(mark)


@group.factory_case("killed_trainer", needs=["pickle", "linux"])
async def daemons_of_a_trainer_that_was_killed_end_too(make: Make) -> None:
    mark = new_mark()
    program = """
        async def main():
            async with sandbox:
                code = arguments[0] + 'daemon(); print(1, flush=True); sys.stdin.read()'
                process = await sandbox.spawn([*sandbox.python_argv, '-c', code])
                await process.receive()
                print('training', flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    async with trainer(make(), program, f"mark = {mark!r}\n{DAEMONS}") as process:
        await process.expect_line("training")
        process.kill()
        await check_gone(mark)
