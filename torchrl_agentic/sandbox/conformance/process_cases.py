"""Processes of others cannot be seen, signalled or shared with."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace

from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import (
    ATTACKS,
    check_attacks_stopped,
    never_infra,
    prepared_inside,
    python,
    until,
)
from torchrl_agentic.sandbox.conformance.base import CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import (
    SECRET,
    host_process,
    new_mark,
    secret_file,
    secret_variable,
)

group = CaseGroup("process")


@group.case("host_processes", needs=["linux"])
async def processes_of_the_host_are_out_of_sight(sandbox: Sandbox) -> None:
    code = """
        numbers = processes()
        attempt('many processes', lambda: expect(len(numbers) > 10))
        for pid in numbers:
            for name in ('cmdline', 'environ'):
                path = f'/proc/{pid}/{name}'
                attempt(path, lambda: expect(secret in open(path).read()))
    """
    # Assembled inside, so that the command line of the attack does not contain the secret.
    with host_process():
        await check_attacks_stopped(sandbox, code, before="secret = ''.join(secret)", secret=list(SECRET))


@group.case("host_processes")
async def processes_of_the_host_cannot_be_signalled(sandbox: Sandbox) -> None:
    code = """
        def is_it(): return b'time.sleep(600)' in open(f'/proc/{pid}/cmdline', 'rb').read()
        attempt('0', lambda: (expect(is_it()), os.kill(pid, 0)))
        attempt('STOP', lambda: (os.kill(pid, 19), expect(is_it())))
        attempt('KILL', lambda: (os.kill(pid, 9), expect(is_it())))
        attempt('group', lambda: (os.killpg(pid, 9), expect(is_it())))
    """
    with host_process() as process:
        await check_attacks_stopped(sandbox, code, pid=process.pid)
        assert process.poll() is None, "it was killed"


@group.case()
async def the_environment_of_the_trainer_is_not_passed_on(sandbox: Sandbox) -> None:
    with secret_variable():
        async with sandbox.fresh() as other:
            for each in (sandbox, other):
                assert SECRET not in (await each.run(["env"])).stdout
                process = await each.spawn(["sh", "-c", "env; echo end"])
                assert SECRET.encode() not in await until(process, b"end\n")
                await process.kill()


@group.case("host_processes", needs=["linux"])
async def no_process_in_sight_has_the_environment_of_the_trainer(sandbox: Sandbox) -> None:
    with secret_variable(), host_process():
        async with sandbox.fresh() as other:
            for each in (sandbox, other):
                everywhere = "cat /proc/*/environ /proc/*/task/*/environ 2>/dev/null | tr '\\0' '\\n'"
                assert SECRET not in (await each.run(["sh", "-c", everywhere])).stdout


@group.case(needs=["linux"])
async def no_files_are_inherited(sandbox: Sandbox) -> None:
    code = """
        import os
        def is_open(number):
            try: return bool(os.fstat(number))
            except OSError: return False
        print([number for number in range(3, 4096) if is_open(number)], 'end')
    """
    with secret_file():
        async with sandbox.fresh() as other:
            for each in (sandbox, other):
                assert (await python(each, code)).stdout == "[] end\n"
                process = await each.spawn([*each.python_argv, "-c", textwrap.dedent(code)])
                assert await until(process, b"end\n") == b"[] "
                await process.kill()


@group.case()
async def no_standard_file_is_a_terminal_or_a_file_of_the_hosts(sandbox: Sandbox) -> None:
    code = """
        import os, stat
        for n in (0, 1, 2):
            print(os.isatty(n), stat.S_ISREG(os.fstat(n).st_mode), stat.S_ISDIR(os.fstat(n).st_mode))
    """
    assert set((await python(sandbox, code)).stdout.split()) == {"False"}


@group.case("host_processes")
async def killing_everything_in_reach_affects_only_the_command(sandbox: Sandbox) -> None:
    await processes_of_the_host_cannot_be_signalled(sandbox)
    await sandbox.write_file("kept", b"yes")
    for attack in (
        "kill -9 -1", "kill -STOP -1", "kill -9 0", "kill -9 $PPID; kill -STOP $PPID",
        "kill -9 1; kill -STOP 1; kill -SEGV 1",
        "trap '' TERM HUP INT; kill -TERM -1; kill -HUP -1; kill -INT -1; exit 0",
    ):  # fmt: skip
        with never_infra(attack):
            await sandbox.run(["sh", "-c", attack], limits=replace(sandbox.limits, wall_seconds=0.5))
        assert (await sandbox.run(["echo", "alive"])).stdout == "alive\n", attack
    if sandbox.files:
        assert await sandbox.read_file("kept") == b"yes"


@group.case("host_processes", needs=["linux"])
async def lowering_the_limits_of_everything_in_reach_affects_only_the_command(sandbox: Sandbox) -> None:
    """A supervisor needs processor time to reap orphans; the kernel kills a process that has none left."""
    with host_process() as process:
        once = "import resource; attempt('host', lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))"
        await check_attacks_stopped(sandbox, once, pid=process.pid)
    code = """
        import resource
        for pid in map(int, processes()):
            for kind in (getattr(resource, name) for name in dir(resource) if name.startswith('RLIMIT_')):
                try: pid != os.getpid() and resource.prlimit(pid, kind, (0, 0))
                except (OSError, ValueError): pass
        for _ in range(1000):
            if os.fork() == 0:
                os.fork(); os._exit(0)
            os.wait()
    """
    with never_infra():
        await python(sandbox, code, before=ATTACKS)
    assert (await sandbox.run(["echo", "alive"])).stdout == "alive\n"


@group.factory_case("host_processes", needs=["linux"])
async def two_sandboxes_are_out_of_each_others_sight(make: Make) -> None:
    mark = new_mark()
    code = """
        mark = ''.join(mark)
        for pid in processes():
            attempt(pid, lambda: expect(mark in open(f'/proc/{pid}/cmdline').read()))
    """
    async with make() as sandbox, make() as other, prepared_inside(sandbox, "", mark=mark):
        await check_attacks_stopped(other, code, mark=list(mark))


@group.factory_case("host_processes", needs=["linux"])
async def two_sandboxes_cannot_signal_each_other(make: Make) -> None:
    """One sandbox signals every PID; a process of the other gets nothing."""
    async with make() as sandbox, make() as other:
        await processes_of_the_host_cannot_be_signalled(other)
        process = await sandbox.spawn(
            ["sh", "-c", "trap 'echo hit' USR1; echo up; while :; do read x && exit; done"]
        )
        await until(process, b"up\n")
        code = """
            import os
            for pid in range(2, 40_000):
                try: pid != os.getpid() and os.kill(pid, 10)
                except OSError: pass
        """
        await python(other, code)
        await process.send(b"done\n")
        assert await process.receive() == b""
        await process.kill()


async def _share_nothing(make: Make, prepare: str, attack: str, at_end: str, mark: object) -> None:
    async with (
        make() as sandbox,
        make() as other,
        prepared_inside(sandbox, prepare, at_end=at_end, mark=mark),
    ):
        await check_attacks_stopped(other, attack, mark=mark)


@group.factory_case("host_processes", needs=["x86_64"])
async def two_sandboxes_share_no_system_v_objects(make: Make) -> None:
    prepare = """
        memory, sems = syscall(29, mark, 4096, 0o1666), syscall(64, mark, 1, 0o1666)
        queue = syscall(68, mark, 0o1666)
    """
    attack = """
        for name, number in (('memory', 29), ('semaphores', 64), ('queue', 68)):
            attempt(name, lambda: syscall(number, mark, 0, 0))
        for name in ('shm', 'sem', 'msg'):
            attempt(name, lambda: expect(str(mark) in open('/proc/sysvipc/' + name).read()))
    """
    at_end = "syscall(31, memory, 0, None); syscall(66, sems, 0, 0, 0); syscall(71, queue, 0, None)"
    await _share_nothing(make, prepare, attack, at_end, int(new_mark()))


@group.factory_case("host_processes", needs=["x86_64"])
async def two_sandboxes_share_no_message_queues(make: Make) -> None:
    prepare = """
        import struct
        one_small_message = struct.pack("8q", 0, 1, 8, 0, 0, 0, 0, 0)
        syscall(240, mark.encode(), os.O_CREAT | os.O_RDWR, 0o666, one_small_message)
    """
    attack = "attempt('open', lambda: syscall(240, mark.encode(), os.O_RDWR, 0, None))"
    at_end = "syscall(241, mark.encode())"
    await _share_nothing(make, prepare, attack, at_end, f"conformance-{new_mark()}")


@group.factory_case("host_processes", needs=["linux"])
async def two_sandboxes_share_no_memory_by_name(make: Make) -> None:
    prepare = "open('/dev/shm/' + mark, 'w').write('x')"
    attack = """
        attempt('open', lambda: open('/dev/shm/' + mark))
        attempt('list', lambda: expect(mark in os.listdir('/dev/shm')))
    """
    at_end = "os.unlink('/dev/shm/' + mark)"
    await _share_nothing(make, prepare, attack, at_end, f"conformance-{os.getpid()}-{new_mark()}")
