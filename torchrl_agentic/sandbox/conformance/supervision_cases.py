"""Commands can kill or starve their supervisor; that is then their result, never a SandboxError.

Interpreters have their own cases in `repl.repl_cases`.
"""

from __future__ import annotations

import asyncio

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult
from torchrl_agentic.sandbox.conformance.attack_cases import python
from torchrl_agentic.sandbox.conformance.base import HANG_S, Group, Make
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = Group("supervision")

FILL = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        kept = bytearray(b'x' * (40 << 20)); time.sleep(20); os._exit(0)
kept = bytearray(b'x' * (60 << 20)); time.sleep(1)
"""


async def _goes_on(sandbox: Sandbox) -> None:
    """Assert that commands and files still work."""
    if sandbox.files:
        await sandbox.write_file("after", b"x")
        assert await sandbox.read_file("after") == b"x"
    assert (await sandbox.run(["echo", "on"])).stdout == "on\n"


@group.case("host_processes")
async def a_command_that_kills_all_that_it_can_is_answered(sandbox: Sandbox) -> None:
    commands = [
        f"{prefix}kill -{number} {target}"
        for number in ("KILL", "STOP")
        for target in ("$PPID", "-1", "0", "1", "$$")
        for prefix in ("", "(sleep 0.1; kill -CONT $$) & ")
        if number == "KILL" or prefix
    ]
    for command in commands:
        try:
            result = await sandbox.run(["sh", "-c", command], limits=ResourceLimits(wall_seconds=3))
            await _goes_on(sandbox)
        except SandboxError as error:
            raise AssertionError(f"{command}: {error}") from None
        assert isinstance(result, SandboxResult)


@group.case("host_processes")
async def a_long_lived_process_that_kills_all_that_it_can_is_answered(sandbox: Sandbox) -> None:
    for target in ("$PPID", "-1", "0"):
        process = await sandbox.spawn(["sh", "-c", f"read line; kill -9 {target}; kill -9 $$"])
        try:
            await process.send(b"\n")
            async with asyncio.timeout(HANG_S):
                while await process.receive():
                    pass
                assert await process.wait()
            await _goes_on(sandbox)
        except SandboxError as error:
            raise AssertionError(f"kill -9 {target}: {error}") from None
        finally:
            await process.kill()


@group.factory_case("memory", needs=["memory_total", "linux"])
async def commands_that_take_all_memory_are_answered(make: Make) -> None:
    """Two at once, while others start and files are read."""
    limits = ResourceLimits(memory_total_bytes=256 << 20, memory_bytes=220 << 20, wall_seconds=15)
    async with make(limits) as sandbox:
        try:
            fills = [asyncio.create_task(python(sandbox, FILL)) for _ in range(2)]
            while not all(task.done() for task in fills):
                await sandbox.run(["true"])
            await asyncio.gather(*fills)
            await _goes_on(sandbox)
        except SandboxError as error:
            raise AssertionError(f"code has caused an error of the sandbox: {error}") from None


@group.factory_case(needs=["max_processes"])
async def commands_that_leave_no_room_for_processes_are_answered(make: Make) -> None:
    code = """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(20); os._exit(0)
                made += 1
        except OSError: pass
        time.sleep(1)
    """
    async with make(ResourceLimits(max_processes=16, wall_seconds=5)) as sandbox:
        try:
            fill = asyncio.create_task(python(sandbox, code))
            while not fill.done():
                await sandbox.run(["true"])
            await fill
            await _goes_on(sandbox)
        except SandboxError as error:
            raise AssertionError(f"code has caused an error of the sandbox: {error}") from None
