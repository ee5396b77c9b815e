"""Commands can kill or starve their supervisor; that is then their result, never a SandboxError.

Interpreters have their own cases in `repl.repl_cases`.
"""

from __future__ import annotations

import asyncio

from torchrl_agentic.sandbox.base import Sandbox, SandboxResult
from torchrl_agentic.sandbox.conformance.attack_cases import never_infra, python
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("supervision")

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
        with never_infra(command):
            result = await sandbox.run(["sh", "-c", command], limits=ResourceLimits(wall_seconds=3))
            await _goes_on(sandbox)
        assert isinstance(result, SandboxResult)


@group.case("host_processes")
async def a_long_lived_process_that_kills_all_that_it_can_is_answered(sandbox: Sandbox) -> None:
    for target in ("$PPID", "-1", "0"):
        process = await sandbox.spawn(["sh", "-c", f"read line; kill -9 {target}; kill -9 $$"])
        try:
            with never_infra(f"kill -9 {target}"):
                await process.send(b"\n")
                async with asyncio.timeout(HANG_S):
                    while await process.receive():
                        pass
                    assert await process.wait()
                await _goes_on(sandbox)
        finally:
            await process.kill()


async def _goes_on_beside(sandbox: Sandbox, *programs: str) -> None:
    """Assert that commands start while programs fill the sandbox, and that it works afterwards."""
    with never_infra():
        fills = [asyncio.create_task(python(sandbox, program)) for program in programs]
        while not all(task.done() for task in fills):
            await sandbox.run(["true"])
        await asyncio.gather(*fills)
        await _goes_on(sandbox)


@group.case(
    "memory",
    limits=ResourceLimits(memory_total_bytes=256 << 20, memory_bytes=220 << 20, wall_seconds=15),
    needs=["memory_total", "linux"],
)
async def commands_that_take_all_memory_are_answered(sandbox: Sandbox) -> None:
    """Two at once, while others start and files are read."""
    await _goes_on_beside(sandbox, FILL, FILL)


@group.case(limits=ResourceLimits(max_processes=16, wall_seconds=5), needs=["max_processes"])
async def commands_that_leave_no_room_for_processes_are_answered(sandbox: Sandbox) -> None:
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
    await _goes_on_beside(sandbox, code)
