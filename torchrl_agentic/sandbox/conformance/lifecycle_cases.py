"""The ends of commands, of sandboxes and of trainers, and what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import time

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import Process, Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import refused, until
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import (
    check_gone,
    file_appears,
    files_named,
    new_mark,
    open_files,
    result_or_error,
    trainer,
)
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("lifecycle")


@group.factory_case()
async def opening_and_closing_again_does_nothing(make: Make) -> None:
    sandbox = make()
    assert not sandbox.is_open
    await sandbox.close()
    await sandbox.open()
    await sandbox.open()
    assert sandbox.is_open
    assert (await sandbox.run(["true"])).exit_code == 0
    await sandbox.close()
    await sandbox.close()
    assert not sandbox.is_open


@group.factory_case()
async def a_closed_sandbox_cannot_be_used(make: Make) -> None:
    sandbox = make()
    for _ in range(2):
        for use in (
            lambda: sandbox.run(["true"]),
            lambda: sandbox.spawn(["true"]),
            lambda: sandbox.read_file("x"),
            lambda: sandbox.write_file("x", b""),
        ):
            error = await refused(use(), SandboxError)
            assert "open" in str(error), error
        await sandbox.open()
        await sandbox.close()


@group.factory_case()
async def a_fresh_sandbox_has_the_same_limits_and_is_not_open(make: Make) -> None:
    async with make(ResourceLimits(wall_seconds=7)) as sandbox:
        other = sandbox.fresh()
        assert type(other) is type(sandbox)
        assert other.limits == sandbox.limits
        assert not other.is_open


@group.case()
async def cancelling_leaves_no_process(sandbox: Sandbox) -> None:
    mark = new_mark()
    command = f"trap '' TERM INT HUP; sleep {mark} & touch started; sleep {mark}"
    task = asyncio.create_task(sandbox.run(["sh", "-c", command]))
    await file_appears(sandbox, "started")
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    else:
        raise AssertionError("it was not cancelled")
    await check_gone(mark)
    assert (await sandbox.run(["true"])).exit_code == 0


@group.case()
async def cancelling_at_any_moment_leaves_no_process(sandbox: Sandbox) -> None:
    """Also during its start, which takes a few milliseconds."""
    mark = new_mark()

    async def spawn() -> None:
        process = await sandbox.spawn(["sleep", mark])
        try:
            await process.receive()
        finally:
            await process.kill()

    for start in (lambda: sandbox.run(["sleep", mark]), spawn):
        for number in range(20):
            task = asyncio.ensure_future(start())
            await asyncio.sleep(number * 0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert (await sandbox.run(["echo", "alive"])).stdout == "alive\n"
    await check_gone(mark)


@group.factory_case()
async def opening_can_be_cancelled_at_any_moment(make: Make) -> None:
    for delay in (0, 0.001, 0.003, 0.01):
        sandbox = make()
        task = asyncio.create_task(sandbox.open())
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await sandbox.close()
        async with sandbox:
            assert (await sandbox.run(["true"])).exit_code == 0


@group.case(needs=["files"])
async def commands_run_at_the_same_time(sandbox: Sandbox) -> None:
    """Two that wait for each other: in sequence, neither would end."""
    await sandbox.run(["mkfifo", "there", "back"])
    async with asyncio.timeout(HANG_S):
        first, second = await asyncio.gather(
            sandbox.run(["sh", "-c", "echo ping > there; cat back"]),
            sandbox.run(["sh", "-c", "cat there; echo pong > back"]),
        )
    assert (first.stdout, second.stdout) == ("pong\n", "ping\n")


@group.case()
async def each_of_many_commands_gets_its_own_output(sandbox: Sandbox) -> None:
    async def one(number: int) -> bool:
        result = await sandbox.run(
            ["sh", "-c", f"cat; echo err-{number} >&2; exit {number}"], stdin=b"%d" % number
        )
        return (result.stdout, result.stderr, result.exit_code) == (f"{number}", f"err-{number}\n", number)

    assert all(await asyncio.gather(*map(one, range(24))))


@group.factory_case()
async def closing_ends_running_commands(make: Make) -> None:
    marks = [new_mark(), new_mark()]
    sandbox = make()
    await sandbox.open()
    task = asyncio.create_task(sandbox.run(["sh", "-c", f"touch started; sleep {marks[0]}"]))
    process = await sandbox.spawn(["sleep", marks[1]])
    await file_appears(sandbox, "started")
    async with asyncio.timeout(HANG_S):
        await sandbox.close()
    found = await result_or_error(task)
    assert isinstance(found, SandboxError) or found.exit_code != 0, found
    await process.kill()
    for mark in marks:
        await check_gone(mark)


@group.factory_case(needs=["linux"])
async def closing_ends_long_lived_processes_and_their_connections(make: Make) -> None:
    """The process objects then report the end."""
    processes: list[Process] = []
    async with make() as sandbox:
        processes += [await sandbox.spawn(["cat"]) for _ in range(8)]
        await asyncio.sleep(0.2)
        before = open_files()
    try:
        for process in processes:
            async with asyncio.timeout(HANG_S):
                assert await process.receive() == b""
        await asyncio.sleep(0)
        assert open_files() <= before - 8, f"{open_files()} files are open, and {before} were before closing"
    finally:
        for process in processes:
            await process.kill()


@group.factory_case()
async def closing_one_sandbox_does_not_affect_others(make: Make) -> None:
    async with make() as sandbox:
        process = await sandbox.spawn(["cat"])
        async with make() as other:
            assert (await other.run(["echo", "there"])).stdout == "there\n"
        await process.send(b"alive\n")
        assert await until(process, b"\n") == b"alive"
        await process.kill()


@group.factory_case(needs=["files"])
async def no_file_is_left_of_a_closed_sandbox(make: Make) -> None:
    name = f"conformance-{new_mark()}"
    async with make() as sandbox:
        await sandbox.write_file(name, b"x")
    assert not files_named(name)


@group.factory_case(needs=["linux"])
async def open_files_of_the_trainer_do_not_increase(make: Make) -> None:
    async def use() -> None:
        async with make() as sandbox:
            process = await sandbox.spawn(["cat"])
            await asyncio.gather(*(sandbox.run(["true"], stdin=b"x") for _ in range(3)))
            await sandbox.write_file("file", b"x")
            with contextlib.suppress(OSError):
                await sandbox.read_file("missing")
            task = asyncio.create_task(sandbox.run(["sleep", "60"]))
            await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await process.kill()

    await use()
    await asyncio.sleep(0.3)
    before = open_files()
    for _ in range(12):
        await use()
    deadline = time.monotonic() + HANG_S
    while open_files() >= before + 8:
        assert time.monotonic() < deadline, f"{open_files()} files are open, and {before} were"
        await asyncio.sleep(0.05)


@group.factory_case()
async def several_event_loops_can_have_sandboxes_at_the_same_time(make: Make) -> None:
    """Also if a loop and its thread end before the others."""

    async def other_loop() -> str:
        async with make() as sandbox:
            await sandbox.write_file("file", b"other")
            return (await sandbox.run(["cat", "file"])).stdout if sandbox.files else "other"

    async with make() as sandbox:
        process = await sandbox.spawn(["cat"])
        for _ in range(2):
            found = await asyncio.gather(
                *(asyncio.to_thread(lambda: asyncio.run(other_loop())) for _ in range(3))
            )
            assert found == ["other"] * 3
        await asyncio.get_running_loop().shutdown_default_executor()
        await process.send(b"alive\n")
        assert await until(process, b"\n") == b"alive"
        await process.kill()
        assert (await sandbox.run(["echo", "alive"])).stdout == "alive\n"


@group.factory_case(needs=["pickle"])
async def an_unopened_sandbox_can_be_sent_to_another_process(make: Make) -> None:
    program = """
        async def main():
            async with sandbox: print((await sandbox.run(['echo', 'there'])).stdout, end='', flush=True)
        asyncio.run(main())
    """
    async with trainer(make(), program) as process:
        await process.expect_line("there")
