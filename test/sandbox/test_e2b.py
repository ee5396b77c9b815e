"""E2BSandbox with a fake of E2B that uses the wire format of the real one."""

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("e2b", reason="needs the extra 'e2b'")

from fakes.e2b import E2BServer, Fault
from fakes.e2b_machine import alone
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.sandbox import ResourceLimits, Sandbox, SandboxError
from torchrl_agentic.sandbox.remote.e2b import E2BSandbox
from torchrl_agentic.sandbox.remote.remote_process import RemoteProcess
from torchrl_agentic.testing import SandboxContract

CREATE = "/v2/sandboxes"
START = "/process.Process/Start"
INPUT = "/process.Process/SendInput"
BYTES = bytes(range(256)) * 400
UNCOUNTED = set() if alone() else {"processes"}


@pytest.fixture
def server() -> Iterator[E2BServer]:
    with E2BServer() as server:
        yield server


def sandbox_at(server: E2BServer, limits: ResourceLimits | None = None, **options: Any) -> E2BSandbox:
    """Return a sandbox that uses the fake."""
    return E2BSandbox(limits, **{"api_key": server.api_key, "connection": server.connection, **options})


class TestE2B(SandboxContract):
    # The fake runs commands as plain processes of this host; those of E2B are alone in a virtual machine
    # without a network. "privileges" is about capabilities and system calls, which need not be denied in a
    # virtual machine.
    # It can count processes only in user namespaces.
    untestable = frozenset({"host_files", "host_processes", "network", "privileges"} | UNCOUNTED)
    groups = frozenset({"protocol"})

    @pytest.fixture(autouse=True)
    def _serve(self) -> Iterator[None]:
        with E2BServer() as self.server:
            yield

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return sandbox_at(self.server, limits)


def processes() -> str:
    lines = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                lines.append(file.read().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(lines)


async def until(condition: Any) -> None:
    """Wait until a condition holds; the timeout of the test bounds it."""
    async with asyncio.timeout(limit(5)):
        while not condition():
            await asyncio.sleep(0.01)


async def running(mark: str) -> None:
    await until(lambda: mark in processes())


async def gone(mark: str) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(limit(5)):
        while mark in processes():
            await asyncio.sleep(0.01)


async def everything(process: RemoteProcess, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await process.receive()
        assert piece, process.errors()
        data += piece
    return bytes(data)


# Requests to E2B


@pytest.mark.parametrize("network", ["none", "loopback"])
async def test_the_network_is_asked_to_be_off(server, network):
    async with sandbox_at(server, ResourceLimits(network=network), timeout_s=120):
        body = server.asked(CREATE)[0].body
    assert body["allow_internet_access"] is False
    assert body["network"] == {"allowPublicTraffic": False}
    assert body["timeout"] == 120
    assert body["templateID"] == "base"
    assert body["autoPause"] is False


async def test_the_full_network_is_asked_for_if_it_was_granted(server):
    async with sandbox_at(server, ResourceLimits(network="full")):
        body = server.asked(CREATE)[0].body
    assert body["allow_internet_access"] is True
    assert "allowPublicTraffic" not in body.get("network", {})


async def test_nothing_of_the_trainers_environment_is_sent(server, monkeypatch):
    monkeypatch.setenv("TORCHRL_AGENTIC_SECRET", "sesame")
    async with sandbox_at(server) as sandbox:
        await sandbox.run(["true"])
    assert "sesame" not in str(server.requests)


async def test_an_unknown_template_is_an_infrastructure_error(server):
    with pytest.raises(SandboxError, match=r"template 'mine' not found"):
        await sandbox_at(server, template="mine").open()


def test_limits_that_e2b_lacks_are_rejected_in_the_constructor():
    with pytest.raises(ValueError, match="network"):
        E2BSandbox(ResourceLimits(network="allowlist"))
    with pytest.raises(ValueError, match="folders of this host"):
        E2BSandbox(ResourceLimits(fs_read_roots=("/usr",)))
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        E2BSandbox(timeout_s=0)


def test_a_missing_sdk_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[e2b\]"):
        E2BSandbox()


def test_neither_import_nor_construction_loads_the_sdk():
    load = "import sys; from torchrl_agentic.sandbox.remote.e2b import E2BSandbox; E2BSandbox()"
    code = f"{load}; print('e2b' in sys.modules)"
    printed = run_program([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "False\n"


async def test_a_fresh_one_has_the_same_settings_and_a_machine_of_its_own(server):
    async with sandbox_at(server, timeout_s=77) as sandbox, sandbox.fresh() as other:
        assert (other.timeout_s, other.limits, other.api_key) == (77, sandbox.limits, server.api_key)
        assert len(server.machines) == 2


def test_unopened_sandbox_can_be_pickled():
    copy = pickle.loads(pickle.dumps(E2BSandbox(timeout_s=77)))
    assert copy.timeout_s == 77
    assert not copy.is_open


async def test_use_prolongs_the_life_of_the_machine(server):
    async with sandbox_at(server, timeout_s=100) as sandbox:
        (machine,) = server.machines.values()
        await sandbox.run(["true"], limits=ResourceLimits(wall_seconds=10))
        assert machine.timeout_s == 100
        assert not server.asked(f"/sandboxes/{machine.name}/timeout")
        sandbox.limits = replace(sandbox.limits, wall_seconds=400)
        await sandbox.run(["true"])
        assert machine.timeout_s == 430


# Opening and closing


async def test_a_bad_key_is_an_infrastructure_error(server):
    sandbox = sandbox_at(server, api_key="e2b_wrong")
    with pytest.raises(SandboxError, match="401"):
        await sandbox.open()
    assert not sandbox.is_open
    assert len(server.requests) == 1


async def test_no_key_at_all_is_an_infrastructure_error(server, monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxError, match="API key is required"):
        await sandbox_at(server, api_key=None).open()


async def test_a_quota_that_is_used_up_is_an_infrastructure_error():
    with E2BServer(quota=1) as server:
        async with sandbox_at(server):
            with pytest.raises(SandboxError, match=r"429.*maximum number of sandboxes \(1\)"):
                await sandbox_at(server).open()
            assert len(server.machines) == 1
        assert len(server.asked(CREATE)) > 2, "the SDK asks again after a 429"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_service_that_is_busy_for_a_moment_is_asked_again(server, status):
    server.faults.append(Fault(CREATE, status))
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["echo", "made it"])).stdout == "made it\n"


async def test_a_broken_service_is_an_infrastructure_error(server):
    server.faults.append(Fault(CREATE, 500, "out of order"))
    with pytest.raises(SandboxError, match="out of order"):
        await sandbox_at(server).open()


async def test_a_machine_whose_making_was_never_confirmed_is_found_and_ended(server):
    server.faults.append(Fault(CREATE, done=True))
    with pytest.raises(SandboxError):
        await sandbox_at(server).open()
    (machine,) = {seen.path for seen in server.requests if seen.method == "DELETE"}
    assert machine.startswith("/sandboxes/")
    assert not server.machines


async def test_a_machine_that_cannot_be_made_ready_is_ended(server):
    server.faults.append(Fault(START, 500, times=9))
    with pytest.raises(SandboxError):
        await sandbox_at(server).open()
    assert not server.machines


async def test_template_without_a_needed_program_is_named(server, monkeypatch):
    monkeypatch.setattr(E2BSandbox, "programs", (*E2BSandbox.programs, "no-such-program"))
    with pytest.raises(SandboxError, match="cannot be used for a sandbox: there is no no-such-program"):
        await sandbox_at(server).open()
    assert not server.machines


async def test_a_machine_that_is_not_known_everywhere_yet_is_waited_for(server):
    server.faults.append(Fault(START, 502, "The sandbox was not found", times=2))
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["true"])).exit_code == 0


async def test_an_open_that_is_cancelled_leaves_no_machine(server):
    """The machine is made only after the cancellation."""
    hold = threading.Event()
    server.faults.append(Fault(CREATE, None, hold=hold))
    sandbox = sandbox_at(server)
    opening = asyncio.create_task(sandbox.open())
    await until(lambda: server.asked(CREATE))
    opening.cancel()
    await asyncio.sleep(0)
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [seen.method for seen in server.requests] == ["POST", "DELETE"]
    assert not server.machines
    assert not sandbox.is_open


async def test_opening_twice_at_once_makes_one_machine(server):
    sandbox = sandbox_at(server)
    await asyncio.gather(sandbox.open(), sandbox.open())
    assert len(server.machines) == 1
    await sandbox.close()


async def test_close_is_repeated_until_the_machine_is_ended(server):
    sandbox = sandbox_at(server)
    await sandbox.open()
    (machine,) = server.machines
    server.faults.append(Fault(f"/sandboxes/{machine}"))
    server.faults.append(Fault(f"/sandboxes/{machine}", 500))
    await sandbox.close()
    assert not server.machines


async def test_a_close_that_fails_says_so_and_can_be_repeated(server):
    sandbox = sandbox_at(server)
    await sandbox.open()
    (machine,) = server.machines
    server.faults.append(Fault(f"/sandboxes/{machine}", 500, times=3))
    with pytest.raises(SandboxError, match=machine):
        await sandbox.close()
    assert not sandbox.is_open
    assert server.machines
    await sandbox.close()
    assert not server.machines
    assert not sandbox.is_open


async def test_a_close_that_is_cancelled_ends_the_machine(server):
    sandbox = sandbox_at(server)
    await sandbox.open()
    (machine,) = server.machines
    hold = threading.Event()
    server.faults.append(Fault(f"/sandboxes/{machine}", None, hold=hold))
    closing = asyncio.create_task(sandbox.close())
    await until(lambda: server.asked(f"/sandboxes/{machine}"))
    closing.cancel()
    await asyncio.sleep(0)
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not server.machines


async def test_code_that_fails_inside_leaves_no_machine(server):
    with pytest.raises(ZeroDivisionError):
        async with sandbox_at(server):
            raise ZeroDivisionError
    assert not server.machines


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run commands as root")
async def test_limits_are_not_claimed_where_code_runs_as_root():
    with E2BServer(user="root") as server:
        async with sandbox_at(server) as sandbox:
            assert not any(sandbox.limits_enforced[name] for name in ("cpu_seconds", "max_processes"))


# Commands


async def test_words_of_a_command_are_never_read_by_a_shell(server):
    words = ["$(id)", "a  b", "'", '"', "*", "\n", "", "-n", ";true", "é\u2028"]
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["printf", "%s|", *words])).stdout == "|".join([*words, ""])


async def test_invalid_utf8_is_replaced_and_characters_are_not_split(server):
    code = r"printf 'a\377b '; printf '\303'; sleep 0.1; printf '\251'"
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["sh", "-c", code])).stdout == "a\ufffdb é"


async def test_a_command_that_is_too_long_is_a_value_error(server):
    async with sandbox_at(server) as sandbox:
        with pytest.raises(ValueError, match="write long arguments to a file"):
            await sandbox.run(["echo", "x" * 200_000])


@pytest.mark.parametrize("env", [{"PATH": "/usr/bin:/bin", "A": "b=c d"}, {}])
async def test_environment_variables_are_exactly_the_given_ones(server, env):
    async with sandbox_at(server, ResourceLimits(env=env)) as sandbox:
        found = dict(line.split("=", 1) for line in (await sandbox.run(["env"])).stdout.splitlines())
    assert {name: value for name, value in found.items() if name not in ("PWD", "OLDPWD")} == env


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A": "\0"}])
async def test_invalid_environment_variables_are_rejected(server, env):
    async with sandbox_at(server, ResourceLimits(env=env)) as sandbox:
        with pytest.raises(ValueError, match="environment"):
            await sandbox.run(["true"])


async def test_limits_reach_the_command(server):
    limits = ResourceLimits(cpu_seconds=7, memory_bytes=1 << 30, disk_bytes=1 << 20, max_processes=900)
    async with sandbox_at(server, limits) as sandbox:
        code = "ulimit -t; ulimit -v; ulimit -f; ulimit -u 2>/dev/null || ulimit -p; ulimit -c"
        assert (await sandbox.run(["sh", "-c", code])).stdout.split() == ["7", "1048576", "2048", "900", "0"]


async def test_a_command_can_gain_no_rights_and_has_no_terminal(server):
    async with sandbox_at(server) as sandbox:
        status = (await sandbox.run(["cat", "/proc/self/status"])).stdout
        assert "NoNewPrivs:\t1\n" in status
        assert (await sandbox.run(["sh", "-c", ": </dev/tty"])).exit_code != 0


async def test_a_command_can_be_interrupted(server):
    """Shells make their background processes ignore SIGINT."""
    async with sandbox_at(server) as sandbox:
        result = await sandbox.run(["sh", "-c", "kill -INT $$; echo went on"])
    assert (result.exit_code, result.stdout) == (-2, "")


async def test_a_missing_folder_to_start_in_is_the_models_mistake(server):
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["true"], cwd="nowhere")).exit_code == 126
        await sandbox.run(["mkdir", "here"])
        assert (await sandbox.run(["pwd"], cwd="/work/here")).stdout.endswith("/work/here\n")
        with pytest.raises(PermissionError):
            await sandbox.run(["true"], cwd="/etc")


async def test_background_process_with_open_output_does_not_block(server):
    mark = f"81{os.getpid()}"
    async with sandbox_at(server) as sandbox:
        result = await sandbox.run(["sh", "-c", f"sleep {mark} & sleep {mark} & echo done"])
        assert (result.stdout, result.timed_out) == ("done\n", False)
        await gone(mark)


async def test_process_that_leaves_its_session_ends_with_the_machine(server):
    """As "Does not stop" says, it outlives its command."""
    mark = f"94{os.getpid()}"
    escape = f"mkfifo up; setsid sh -c 'echo >up; exec sleep {mark}' >/dev/null 2>&1 & cat up"
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["sh", "-c", escape])).exit_code == 0
        assert f"sleep {mark}" in processes()
    await gone(mark)


async def test_unread_input_does_not_block(server):
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["true"], stdin=bytes(1 << 20))).exit_code == 0
        late = await sandbox.run(
            ["sleep", "60"], stdin=bytes(1 << 20), limits=ResourceLimits(wall_seconds=0.3)
        )
        assert late.timed_out


async def test_much_input_arrives(server):
    async with sandbox_at(server) as sandbox:
        assert (await sandbox.run(["wc", "-c"], stdin=bytes(300_000))).stdout.strip() == "300000"


async def test_input_lost_by_e2b_gives_infra(server):
    mark = f"82{os.getpid()}"
    server.faults.append(Fault(INPUT, 500, "lost"))
    async with sandbox_at(server) as sandbox:
        with pytest.raises(SandboxError, match="lost"):
            await sandbox.run(["sh", "-c", f"cat; sleep {mark}"], stdin=b"x")
        await gone(mark)


async def test_commands_run_at_the_same_time(server):
    """Each waits for the other's file."""
    async with sandbox_at(server) as sandbox:
        await sandbox.run(["mkfifo", "a", "b"])
        first = sandbox.run(["sh", "-c", "echo x >a; cat b"])
        second = sandbox.run(["sh", "-c", "cat a; echo y >b"])
        results = await asyncio.gather(first, second)
    assert [result.stdout for result in results] == ["y\n", "x\n"]


async def test_lost_connection_gives_infra_and_ends_the_command(server):
    mark = f"83{os.getpid()}"
    async with sandbox_at(server) as sandbox:
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await running(mark)
        server.cut_streams()
        with pytest.raises(SandboxError, match="lost"):
            await task
        await gone(mark)


async def test_unconfirmed_start_gives_infra_and_ends_the_machine(server):
    """The command may run, and its PID is unknown."""
    mark = f"93{os.getpid()}"
    async with sandbox_at(server) as sandbox:
        server.faults.append(Fault(START, done=True))
        with pytest.raises(SandboxError):
            await sandbox.run(["sleep", mark])
        assert not sandbox.is_open
        assert not server.machines
        await gone(mark)


async def test_a_command_that_is_cancelled_before_it_runs_does_not_run_on(server):
    mark = f"84{os.getpid()}"
    hold = threading.Event()
    async with sandbox_at(server) as sandbox:
        before = len(server.asked(START))
        server.faults.append(Fault(START, None, hold=hold))
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await until(lambda: len(server.asked(START)) > before)
        task.cancel()
        await asyncio.sleep(0)
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(mark)


async def test_a_machine_whose_time_is_over_is_an_infrastructure_error(server):
    mark = f"85{os.getpid()}"
    async with sandbox_at(server) as sandbox:
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await running(mark)
        server.expire(next(iter(server.machines)))
        with pytest.raises(SandboxError):
            await task
        for use in (sandbox.run(["true"]), sandbox.spawn(["cat"]), sandbox.read_file("a")):
            with pytest.raises(SandboxError, match="could not be ended"):
                await use


async def test_a_sandbox_that_is_not_open_says_so(server):
    sandbox = sandbox_at(server)
    for use in (sandbox.run(["true"]), sandbox.spawn(["cat"]), sandbox.read_file("a")):
        with pytest.raises(SandboxError, match="not open"):
            await use


# Files


async def test_file_is_read_up_to_the_requested_size(server):
    async with sandbox_at(server) as sandbox:
        await sandbox.run(["sh", "-c", "head -c 9000000 /dev/zero >big"])
        assert await sandbox.read_file("big", 10) == bytes(10)


async def test_all_bytes_survive_in_files(server):
    async with sandbox_at(server) as sandbox:
        await sandbox.write_file("all", BYTES)
        assert await sandbox.read_file("all") == BYTES


async def test_file_and_folder_are_not_confused(server):
    async with sandbox_at(server) as sandbox:
        await sandbox.write_file("folder/file", b"")
        for path in ("folder/file/x", "folder/file/x/y"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(path)
            with pytest.raises(PermissionError):
                await sandbox.write_file(path, b"")
        with pytest.raises(IsADirectoryError):
            await sandbox.write_file("folder", b"")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nowhere/file")


# Long-lived processes


async def test_all_bytes_survive_both_ways(server):
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["cat"])
        sending = asyncio.create_task(process.send(BYTES))
        assert await everything(process, len(BYTES)) == BYTES
        await sending
        await process.send(b"\xff")
        assert await process.receive() == b"\xff"


async def test_the_end_of_a_process_is_an_empty_read_and_a_reason(server):
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["sh", "-c", "echo out; echo reason >&2; exit 3"])
        assert [await process.receive() for _ in range(3)] == [b"out\n", b"", b""]
        assert await process.wait() == "exit code 3"
        assert process.errors() == "reason\n"
        with pytest.raises(EOFError):
            await process.send(b"x")
        await process.kill()


@pytest.mark.parametrize(
    "message", ["error writing to stdin: write |1: broken pipe", "stdin not enabled or closed"]
)
async def test_errors_of_an_older_envd_are_understood(server, message):
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["cat"])
        server.faults.append(Fault(INPUT, 500, message))
        with pytest.raises(EOFError):
            await process.send(b"x")


async def test_kill_ends_a_session_with_unread_output(server):
    mark = f"91{os.getpid()}"
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["sh", "-c", f"sleep {mark} & yes"])
        await running(mark)
        await asyncio.wait_for(process.kill(), limit(5))
        await gone(mark)
        await process.kill()
        assert "killed" in await process.wait()
        while await process.receive():
            pass


async def test_a_process_ends_with_its_sandbox(server):
    mark = f"92{os.getpid()}"
    sandbox = sandbox_at(server)
    await sandbox.open()
    process = await sandbox.spawn(["sleep", mark])
    await running(mark)
    receiving = asyncio.create_task(process.receive())
    await sandbox.close()
    await gone(mark)
    assert await receiving == b""
    assert await process.wait() == "ended with its sandbox"
    await process.kill()


async def test_a_lost_connection_is_not_the_end_of_a_process(server):
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["cat"])
        server.cut_streams()
        with pytest.raises(SandboxError, match="lost"):
            await process.receive()
        with pytest.raises(SandboxError, match="lost"):
            await process.wait()
        await process.kill()
        (machine,) = server.machines.values()
        await until(lambda: not machine.processes)


async def test_started_message_is_sent_completely_after_cancellation(server):
    hold = threading.Event()
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["cat"])
        server.faults.append(Fault(INPUT, None, hold=hold))
        sending = asyncio.create_task(process.send(BYTES))
        await until(lambda: server.asked(INPUT))
        sending.cancel()
        await asyncio.sleep(0)
        next_one = asyncio.create_task(process.send(b"next"))
        hold.set()
        assert await everything(process, len(BYTES) + 4) == BYTES + b"next"
        await next_one
        assert sending.cancelled()


async def test_sending_keeps_the_machine_alive(server):
    async with sandbox_at(server, timeout_s=100) as sandbox:
        process = await sandbox.spawn(["cat"])
        sandbox._until -= 60
        await process.send(b"x")
        (machine,) = server.machines
        assert [seen.body for seen in server.asked(f"/sandboxes/{machine}/timeout")] == [{"timeout": 100}]


async def test_unread_output_waits_in_the_sandbox(server):
    """It is read to its end later; nothing is dropped."""
    size = 20_000_000
    async with sandbox_at(server) as sandbox:
        process = await sandbox.spawn(["sh", "-c", f"head -c {size} /dev/zero; sleep 60"])
        await until(lambda: len(process._unread) >= 1 << 20)
        assert len(process._unread) < 2 << 20
        assert len(await everything(process, size)) == size
