"""DockerSandbox with a fake daemon, and with a real one if `TORCHRL_AGENTIC_DOCKER` names an image.

The fake isolates nothing: what only Docker can enforce is tested there up to the request for it.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes.docker import FakeDocker
from fakes.docker_container import FakeContainer
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox import ResourceLimits, Sandbox
from torchrl_agentic.sandbox.conformance.host_cases import check_gone as _gone
from torchrl_agentic.sandbox.conformance.host_cases import command_lines
from torchrl_agentic.sandbox.remote.docker import DockerSandbox
from torchrl_agentic.testing import SandboxContract

pytest.importorskip("aiodocker")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake daemon needs /proc")

REAL_IMAGE = os.environ.get("TORCHRL_AGENTIC_DOCKER")
CREATE, START, ATTACH = (
    "POST /containers/create",
    "POST /containers/[^/]*/start",
    "POST /containers/.*/attach",
)
EXEC, EXEC_START, DELETE = "POST /containers/.*/exec", "POST /exec/.*/start", "DELETE /containers/.*"


@pytest_asyncio.fixture
async def daemon() -> AsyncGenerator[FakeDocker]:
    async with FakeDocker() as daemon:
        yield daemon


async def until(true: Callable[[], object]) -> None:
    """Wait until a condition holds, which another task or process makes true."""
    async with asyncio.timeout(limit(10)):
        while not true():
            await asyncio.sleep(0.01)


async def only(daemon: FakeDocker) -> FakeContainer:
    await until(lambda: daemon.containers)
    (container,) = daemon.containers.values()
    return container


def _processes() -> str:
    """Return the command lines of all visible processes."""
    return "\n".join(command_lines().values())


class Promises(SandboxContract):
    """Requirements with the fake and with Docker."""

    async def test_a_process_takes_and_gives_100_kb_of_any_bytes(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 400
        process = await sandbox.spawn(["cat"])
        sending = asyncio.create_task(process.send(data))
        got = b""
        while len(got) < len(data):
            got += await process.receive()
        await sending
        assert got == data
        await process.kill()

    async def test_a_process_can_be_talked_to_and_fro(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "while read -r line; do echo got $line; done"])
        for word in (b"one", b"two"):
            await process.send(word + b"\n")
            assert await process.receive() == b"got " + word + b"\n"
        await process.kill()

    async def test_a_process_that_ends_says_how(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert await process.receive() == b"out\n"
        assert await process.receive() == b""
        assert await process.receive() == b""
        assert await process.wait() == "exit code 3"
        assert process.errors() == "err\n"
        with pytest.raises(EOFError, match="exit code 3"):
            await process.send(b"more")
        await process.kill()

    async def test_killing_a_process_ends_all_that_it_started(self, sandbox: Sandbox) -> None:
        mark = f"81{os.getpid()}"
        process = await sandbox.spawn(["sh", "-c", f"sleep {mark} & echo begun; yes"])
        assert (await process.receive()).startswith(b"begun\n")
        await process.kill()
        await _gone(mark)
        assert await process.wait() == "killed by SIGKILL"
        assert await process.receive() == b""
        await process.kill()

    async def test_closing_ends_processes(self, sandbox: Sandbox) -> None:
        mark = f"82{os.getpid()}"
        process = await sandbox.spawn(["sh", "-c", f"echo begun; exec sleep {mark}"])
        assert await process.receive() == b"begun\n"
        await sandbox.close()
        await _gone(mark)
        assert await process.receive() == b""
        assert await process.wait()

    async def test_unread_output_is_bounded(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["sh", "-c", "head -c 8000000 /dev/zero; echo end"])
        size, last = 0, b""
        while data := await process.receive():
            assert len(data) < 2 << 20
            size, last = size + len(data), data
        assert size == 8_000_004
        assert last.endswith(b"end\n")
        assert await process.wait() == "exit code 0"

    async def test_a_command_that_kills_the_shell_above_it_is_ended(self, sandbox: Sandbox) -> None:
        mark = f"84{os.getpid()}"
        result = await sandbox.run(
            ["sh", "-c", f"sleep {mark} >/dev/null 2>&1 & kill -9 $PPID; sleep {mark}"]
        )
        assert result.exit_code == 126
        await _gone(mark)
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_long_lived_process_survives_other_commands(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["cat"])
        await sandbox.run(["sh", "-c", "sleep 60 & kill -9 $$"])
        await sandbox.run(["sleep", "60"], limits=replace(sandbox.limits, wall_seconds=0.2))
        await process.send(b"alive")
        assert await process.receive() == b"alive"

    async def test_commands_overlap(self, sandbox: Sandbox) -> None:
        """Each waits for the other: in sequence, neither would end."""
        await sandbox.run(["mkfifo", "pipe"])
        results = await asyncio.gather(
            sandbox.run(["sh", "-c", "echo through > pipe"]), sandbox.run(["sh", "-c", "cat pipe"])
        )
        assert [result.stdout for result in results] == ["", "through\n"]

    async def test_stdin_may_be_large_and_need_not_be_read(self, sandbox: Sandbox) -> None:
        data = b"x" * 1_000_003
        assert (await sandbox.run(["wc", "-c"], stdin=data)).stdout.strip() == "1000003"
        for size in (1, 10_000, 1_000_003):
            assert (await sandbox.run(["true"], stdin=data[:size])).exit_code == 0
        limits = replace(sandbox.limits, wall_seconds=1)
        assert (await sandbox.run(["sleep", "60"], stdin=data * 5, limits=limits)).timed_out

    async def test_a_process_that_ends_over_its_input_is_at_its_end(self, sandbox: Sandbox) -> None:
        """Docker keeps such a connection half-open forever."""
        for argv in (["sh", "-c", "sleep 0.3; exit 3"], ["sleep", "60"]):
            process = await sandbox.spawn(argv)
            sending = asyncio.create_task(process.send(b"x" * 5_000_000))
            if argv[0] == "sleep":
                await process.kill()
            with pytest.raises(EOFError):
                await sending
            assert await process.receive() == b""
            assert await process.wait() in ("exit code 3", "killed by SIGKILL")

    async def test_a_process_that_is_killed_unread_is_at_its_end(self, sandbox: Sandbox) -> None:
        process = await sandbox.spawn(["yes"])
        assert await process.receive()
        await asyncio.sleep(0.2)  # so that it fills every buffer; less would prove nothing
        await process.kill()
        assert await process.wait() == "killed by SIGKILL"
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_the_folder_of_a_command_is_inside(self, sandbox: Sandbox) -> None:
        await sandbox.run(["mkdir", "-p", "folder", "./-"])
        for folder in ("folder", "/work/folder", "-"):
            assert (await sandbox.run(["pwd"], cwd=folder)).stdout.endswith(f"{os.path.basename(folder)}\n")
        assert (await sandbox.run(["pwd"], cwd="missing")).exit_code == 126
        with pytest.raises(PermissionError):
            await sandbox.run(["pwd"], cwd="../etc")

    async def test_the_environment_is_ours_to_choose(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["sh", "-c", "echo $HOME $LANG"])).stdout == "/work C.UTF-8\n"
        async with self.make(replace(sandbox.limits, env={"A": "b=c d"})) as other:
            assert (await other.run(["sh", "-c", "echo $A $LANG"])).stdout == "b=c d\n"

    async def test_words_are_passed_on_as_they_are(self, sandbox: Sandbox) -> None:
        words = ["", "a b", "$HOME", "'\"", "\n", "ü", "-n", "*"]
        code = "import os, sys; os.write(1, '\\0'.join(sys.argv[1:]).encode())"
        result = await sandbox.run([*sandbox.python_argv, "-c", code, *words])
        assert result.stdout.split("\0") == words

    async def test_shell_builtins_are_not_commands(self, sandbox: Sandbox) -> None:
        """They would run in the supervising shell."""
        for argv in (["exit", "0"], ["eval", "true"], ["exec", "true"], [":"]):
            assert (await sandbox.run(argv)).exit_code == 127

    async def test_too_long_command_is_rejected(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["true", "x" * ((1 << 17) - 1)])).exit_code == 0
        for argv in (["true", "x" * (1 << 17)], ["true", *["x" * 1000] * 1100]):
            with pytest.raises(ValueError, match="too long"):
                await sandbox.run(argv)

    async def test_a_flood_until_the_deadline_is_bounded(self, sandbox: Sandbox) -> None:
        result = await sandbox.run(["yes"], limits=replace(sandbox.limits, wall_seconds=1, output_bytes=1000))
        assert result.timed_out
        assert result.exit_code == -9
        assert result.truncated
        assert len(result.stdout) < 1100

    async def test_a_deadline_of_the_callers_ends_a_command(self, sandbox: Sandbox) -> None:
        mark = f"85{os.getpid()}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sandbox.run(["sleep", mark])
        await _gone(mark)
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_a_file_of_any_size_and_name(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 8_000
        for path in ("-n", "a b/ü\n'", "-/-"):
            await sandbox.write_file(path, data)
            assert await sandbox.read_file(path) == data
        await sandbox.write_file("-n", b"")
        assert await sandbox.read_file("-n") == b""
        assert await sandbox.read_file("-/-", 5) == data[:5]

    async def test_file_error_has_its_reason(self, sandbox: Sandbox) -> None:
        await sandbox.run(
            ["sh", "-c", "mkdir folder; echo > file; mkfifo pipe; ln -s file link; ln -s no dangling"]
        )
        for path, error in (
            ("missing", FileNotFoundError), ("no/file", FileNotFoundError), ("folder", IsADirectoryError),
            ("/work", IsADirectoryError), ("file/x", PermissionError), ("pipe", PermissionError),
            ("link", PermissionError), ("dangling", PermissionError), ("a\0", PermissionError),
        ):  # fmt: skip
            with pytest.raises(error):
                await sandbox.read_file(path)
        for path in ("folder", "file/x", "pipe", "link", "dangling", "/tmp/x"):
            with pytest.raises(OSError):  # noqa: PT011  whichever
                await sandbox.write_file(path, b"x")

    async def test_two_openings_make_one_container(self) -> None:
        sandbox = self.make()
        await asyncio.gather(sandbox.open(), sandbox.open())
        await sandbox.write_file("file", b"x")
        await sandbox.open()
        assert await sandbox.read_file("file") == b"x"
        await sandbox.close()
        with pytest.raises(SandboxError, match="not open"):
            await sandbox.run(["true"])

    async def test_a_closed_sandbox_can_be_opened_again(self) -> None:
        sandbox = self.make()
        for _ in range(2):
            async with sandbox:
                assert (await sandbox.run(["ls"])).stdout == ""
                await sandbox.write_file("file", b"x")

    async def test_network_of_a_single_command_cannot_change(self, sandbox: Sandbox) -> None:
        sandbox.limits = replace(sandbox.limits, network="full")
        with pytest.raises(ValueError, match="one network for all"):
            await sandbox.run(["true"], limits=ResourceLimits())
        assert (await sandbox.run(["true"], limits=replace(sandbox.limits, wall_seconds=9))).exit_code == 0


class TestFake(Promises):
    # The fake runs plain processes. Docker stops these threats, see TestReal.
    untestable = frozenset({"host_files", "host_processes", "network", "privileges", "processes", "terminal"})
    groups = frozenset({"protocol"})

    @pytest.fixture(autouse=True)
    def _url(self, daemon: FakeDocker) -> None:
        self.url = daemon.url

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return DockerSandbox(limits, url=self.url)


@pytest.mark.skipif(
    REAL_IMAGE is None, reason="TORCHRL_AGENTIC_DOCKER does not name an image of a real daemon"
)
class TestReal(Promises):
    # The contract allows no unused sockets, but a container has its own loopback, and netlink.
    untestable = frozenset({"network"})

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return DockerSandbox(limits, image=REAL_IMAGE or "")

    async def test_nothing_outside_can_be_reached(self, sandbox: Sandbox) -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert "refused" in await self.python(sandbox, code)
        assert (await sandbox.run(["ls", "/sys/class/net"])).stdout.split() == ["lo"]
        server.close()

    async def test_ending_everything_does_not_end_the_container(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["sh", "-c", "kill -9 -1; sleep 60"])).exit_code == -9
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_a_fork_bomb_is_ended(self) -> None:
        async with self.make(ResourceLimits(wall_seconds=2, max_processes=20)) as sandbox:
            code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
            assert (await sandbox.run([*sandbox.python_argv, "-c", code])).timed_out
            assert (await sandbox.run(["true"])).exit_code == 0

    async def test_folders_together_are_bounded(self) -> None:
        async with DockerSandbox(image=REAL_IMAGE or "", work_bytes=1 << 20) as sandbox:
            result = await sandbox.run(["sh", "-c", "for n in 1 2 3; do head -c 500000 /dev/zero > $n; done"])
            assert "No space left" in result.stderr
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_file("more", bytes(2 << 20))

    async def test_memory_of_all_processes_is_bounded(self) -> None:
        async with self.make(ResourceLimits(memory_bytes=128 << 20)) as sandbox:
            code = (
                "import os, time\n"
                "for _ in range(3):\n    os.fork()\n"  # 8 processes of 40 MB each
                "x = b'x' * (40 << 20); time.sleep(1); os.write(1, b'.')"
            )
            assert len((await sandbox.run([*sandbox.python_argv, "-c", code])).stdout) < 4

    async def test_rights_that_were_taken_away_are_respected(self, sandbox: Sandbox) -> None:
        await sandbox.run(["sh", "-c", "echo > file; chmod 0 file"])
        for work in (sandbox.read_file("file"), sandbox.write_file("file", b"x")):
            with pytest.raises(PermissionError):
                await work

    async def test_host_folders_that_were_granted_can_be_read(self, tmp_path: Any) -> None:
        (tmp_path / "file").write_text("granted")
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        async with self.make(ResourceLimits(fs_read_roots=(str(tmp_path),))) as sandbox:
            assert (await sandbox.run(["cat", str(tmp_path / "file")])).stdout == "granted"
            assert (await sandbox.run(["sh", "-c", f"echo x > {tmp_path}/file"])).exit_code != 0


async def test_the_request_asks_for_every_kind_of_isolation(daemon: FakeDocker):
    limits = ResourceLimits(memory_bytes=256 << 20, max_processes=10, fs_read_roots=("/data",))
    async with DockerSandbox(limits, url=daemon.url, runtime="runsc", cpus=0.5, work_bytes=1 << 20):
        (request,) = daemon.asked(CREATE)
    host = request.body["HostConfig"]
    asked = {
        name: host[name] for name in ("CapDrop", "SecurityOpt", "ReadonlyRootfs", "Privileged", "NetworkMode")
    }
    assert asked == {
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "Privileged": False,
        "NetworkMode": "none",
    }
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["NanoCpus"]) == (
        256 << 20, 256 << 20, 17, 500_000_000,
    )  # fmt: skip
    assert host["Runtime"] == "runsc"
    assert (host["Init"], host["AutoRemove"]) == (True, True)
    for folder, size in (("/work", 1 << 20), ("/tmp", 64 << 20)):
        assert {"nosuid", "nodev", f"size={size}", "uid=1000"} <= set(host["Tmpfs"][folder].split(","))
    (mount,) = host["Mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == ("/data", "/data", True)
    assert request.body["User"] == "1001:1001"
    assert request.body["Labels"]["torchrl_agentic.pid"] == str(os.getpid())
    assert request.query["name"].startswith("torchrl_agentic-")


async def test_absent_limits_are_not_requested(daemon: FakeDocker):
    limits = ResourceLimits(memory_bytes=None, max_processes=None, network="full", fs_write_roots=("/data",))
    async with DockerSandbox(limits, url=daemon.url, cpus=None):
        host = daemon.asked(CREATE)[0].body["HostConfig"]
    assert not {"Memory", "PidsLimit", "NanoCpus", "Runtime"} & set(host)
    assert host["NetworkMode"] == "bridge"
    assert host["Mounts"][0]["ReadOnly"] is False


async def test_no_command_runs_as_root(daemon: FakeDocker):
    async with DockerSandbox(url=daemon.url) as sandbox:
        process = await sandbox.spawn(["cat"])
        await sandbox.write_file("file", b"x")
        asked = daemon.asked(EXEC)
        await process.kill()
    assert len(asked) == 3
    for request in asked:
        assert request.body["User"] == "1000:1000"
        assert not request.body["Privileged"]
        assert request.body["WorkingDir"] == "/work"
        assert not request.body.get("Env")


@pytest.mark.parametrize("url", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1", "nonsense", None])
async def test_a_daemon_that_cannot_be_reached_is_named(url: str | None, monkeypatch: Any, tmp_path: Any):
    monkeypatch.setattr("aiodocker.docker._sock_search_paths", [])
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    sandbox = DockerSandbox(url=url)
    with pytest.raises(SandboxError, match=r"no Docker daemon answers .*docker info.*DOCKER_HOST"):
        await sandbox.open()
    assert not sandbox.is_open
    await sandbox.close()


async def test_a_missing_image_says_how_to_get_it(daemon: FakeDocker):
    with pytest.raises(SandboxError, match=r"No such image: nope:1.*docker pull nope:1"):
        await DockerSandbox(url=daemon.url, image="nope:1").open()


@pytest.mark.parametrize("step", [CREATE, ATTACH, START])
@pytest.mark.parametrize("status", [500, 400, None])
async def test_an_opening_that_fails_leaves_nothing(daemon: FakeDocker, step: str, status: int | None):
    """With None the connection is closed after doing what was requested."""
    daemon.fail(step, status, "the storage driver is unhappy")
    sandbox = DockerSandbox(url=daemon.url)
    with pytest.raises(SandboxError, match="could not create the container"):
        await sandbox.open()
    assert not sandbox.is_open
    await until(lambda: not daemon.containers)
    await sandbox.open()
    assert (await sandbox.run(["true"])).exit_code == 0
    await sandbox.close()


@pytest.mark.parametrize("step", [CREATE, ATTACH, START])
async def test_an_opening_that_is_cancelled_leaves_nothing(daemon: FakeDocker, step: str):
    """Docker is creating the container, which is removed before the task ends."""
    go_on = daemon.pause(step)
    sandbox = DockerSandbox(url=daemon.url)
    opening = asyncio.create_task(sandbox.open())
    await until(lambda: daemon.asked(step))
    opening.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not sandbox.is_open
    await until(lambda: not daemon.containers)
    await sandbox.close()


@pytest.mark.parametrize("step", [ATTACH, START])
async def test_an_opening_that_docker_never_answers_leaves_nothing(
    daemon: FakeDocker, step: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torchrl_agentic.sandbox.remote.remote_sandbox.CLEANUP_S", 0.2)
    go_on = daemon.pause(step)
    opening = asyncio.create_task(DockerSandbox(url=daemon.url).open())
    await until(lambda: daemon.asked(step))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not daemon.containers
    go_on.set()


async def test_a_closing_that_is_cancelled_is_done_all_the_same(daemon: FakeDocker):
    sandbox = DockerSandbox(url=daemon.url)
    await sandbox.open()
    go_on = daemon.pause(DELETE)
    closing = asyncio.create_task(sandbox.close())
    await until(lambda: daemon.asked(DELETE))
    closing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not daemon.containers


async def test_idempotent_requests_are_retried(daemon: FakeDocker):
    for pattern in ("GET /version", DELETE, "GET /exec/.*/json"):
        daemon.fail(pattern, 500, times=2)
    async with DockerSandbox(url=daemon.url) as sandbox:
        assert (await sandbox.run(["true"])).exit_code == 0
    assert not daemon.containers


async def test_container_that_cannot_be_removed_is_logged_and_ends_by_itself(daemon: FakeDocker):
    sandbox = DockerSandbox(url=daemon.url)
    await sandbox.open()
    daemon.fail(DELETE, 500, "device or resource busy", times=99)
    with pytest.raises(SandboxError, match=r"could not remove the container: .*device or resource busy"):
        await sandbox.close()
    assert not sandbox.is_open
    await until(lambda: not daemon.containers)
    await sandbox.close()


async def test_a_container_goes_when_the_trainer_is_killed(daemon: FakeDocker):
    code = (
        "import asyncio, sys\n"
        "from torchrl_agentic.sandbox.remote.docker import DockerSandbox\n"
        "async def main():\n"
        "    await DockerSandbox(url=sys.argv[1]).open()\n"
        "    print('open', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, daemon.url, stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    assert await trainer.stdout.readline() == b"open\n"
    assert daemon.containers
    trainer.kill()
    await trainer.wait()
    await until(lambda: not daemon.containers)


@pytest.mark.parametrize("step", [EXEC, EXEC_START])
@pytest.mark.parametrize("status", [500, 409, None])
async def test_command_that_docker_does_not_start_gives_infra(
    daemon: FakeDocker, step: str, status: int | None
):
    async with DockerSandbox(url=daemon.url) as sandbox:
        for work in (
            lambda: sandbox.run(["true"]),
            lambda: sandbox.spawn(["true"]),
            lambda: sandbox.read_file("file"),
        ):
            daemon.fail(step, status)
            with pytest.raises(SandboxError, match="could not start a command"):
                await work()
        assert (await sandbox.run(["true"])).exit_code == 0


def folder_with(folder: Path, *programs: str) -> str:
    """Create a PATH with only these programs."""
    for program in programs:
        (folder / program).symlink_to(f"/bin/{program}")
    return str(folder)


async def test_error_instead_of_output_gives_infra(daemon: FakeDocker):
    """Docker sends messages of runc like output of the command, with the exit code 126."""
    async with DockerSandbox(url=daemon.url) as sandbox:
        work = Path((await only(daemon)).folder, "work")
        work.rmdir()
        for start in (sandbox.run, sandbox.spawn):
            with pytest.raises(
                SandboxError, match=r"could not start a command: OCI runtime exec failed.*No such"
            ):
                await start(["true"])
        work.mkdir()
        assert (await sandbox.run(["true"])).exit_code == 0


async def test_image_that_cannot_start_is_rejected(daemon: FakeDocker, tmp_path: Path):
    daemon.path = folder_with(tmp_path, "sh")
    with pytest.raises(SandboxError, match=r"could not create the container: .*executable file not found"):
        await DockerSandbox(url=daemon.url).open()
    assert not daemon.containers


async def test_image_without_a_needed_program_is_rejected(daemon: FakeDocker, tmp_path: Path):
    daemon.path = folder_with(tmp_path, "sh", "cat", "mkdir", "setsid", "env")
    with pytest.raises(SandboxError, match="image cannot be used for a sandbox: there is no head"):
        await DockerSandbox(url=daemon.url).open()
    assert not daemon.containers


async def test_an_exit_code_that_comes_late_is_waited_for(daemon: FakeDocker):
    daemon.late_s = 0.1
    async with DockerSandbox(url=daemon.url) as sandbox:
        assert (await sandbox.run(["sh", "-c", "exit 7"])).exit_code == 7


async def test_input_that_docker_says_nothing_about_is_lost(daemon: FakeDocker):
    async with DockerSandbox(url=daemon.url) as sandbox:
        process = await sandbox.spawn(["sleep", "60"])
        daemon.fail("GET /exec/.*/json", 500, "the daemon is unhappy")
        for end in (process.send(b"x" * 5_000_000), process.receive()):
            with pytest.raises(SandboxError, match=r"takes input: .*the daemon is unhappy"):
                await end


async def test_lost_connection_gives_infra_and_leaves_no_process(daemon: FakeDocker):
    mark = f"79{os.getpid()}"
    async with DockerSandbox(url=daemon.url) as sandbox:
        running = asyncio.create_task(sandbox.run(["sh", "-c", f"echo begun; exec sleep {mark}"]))
        await until(lambda: f"sleep {mark}" in _processes())
        daemon.cut()
        with pytest.raises(SandboxError, match="was lost"):
            await running
        await _gone(f"sleep {mark}")


async def test_a_cut_connection_is_the_end_of_a_process(daemon: FakeDocker):
    mark = f"78{os.getpid()}"
    async with DockerSandbox(url=daemon.url) as sandbox:
        process = await sandbox.spawn(["sh", "-c", f"echo begun; exec sleep {mark}"])
        assert await process.receive() == b"begun\n"
        daemon.cut()
        for end in (process.receive, process.wait):
            with pytest.raises(SandboxError, match="was lost"):
                await end()
        await process.kill()
        await _gone(f"sleep {mark}")


async def test_dead_container_gives_infra(daemon: FakeDocker):
    """A command in it ends as if by SIGKILL, which the model could have caused."""
    daemon.ending_s = 0.5
    mark = f"77{os.getpid()}"
    async with DockerSandbox(url=daemon.url) as sandbox:
        running = asyncio.create_task(sandbox.run(["sleep", mark]))
        await until(lambda: f"sleep {mark}" in _processes())
        await (await only(daemon)).kill()
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError):
            await sandbox.run(["true"])
        await sandbox.close()
        await sandbox.open()
        assert (await sandbox.run(["true"])).exit_code == 0


async def test_a_command_that_is_killed_in_a_container_that_runs_is_a_result(daemon: FakeDocker):
    async with DockerSandbox(url=daemon.url) as sandbox:
        assert (await sandbox.run(["sh", "-c", "kill -9 $$"])).exit_code == -9


async def test_lost_daemon_gives_infra(daemon: FakeDocker):
    sandbox = DockerSandbox(url=daemon.url)
    await sandbox.open()
    running = asyncio.create_task(sandbox.run(["sleep", "60"]))
    await until(lambda: daemon.asked(EXEC_START))
    daemon.stop()
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError):
        await sandbox.close()
    assert not sandbox.is_open


async def test_command_that_cannot_be_stopped_closes_the_container(daemon: FakeDocker):
    mark = f"76{os.getpid()}"
    async with DockerSandbox(url=daemon.url) as sandbox:
        running = asyncio.create_task(sandbox.run(["sleep", mark], limits=ResourceLimits(wall_seconds=1)))
        await until(lambda: f"sleep {mark}" in _processes())
        daemon.fail(EXEC, 500, "no more processes")
        assert (await running).timed_out
        assert not daemon.containers
        assert not sandbox.is_open
        with pytest.raises(SandboxError, match=r"could not be ended: .*no more processes"):
            await sandbox.run(["true"])
        await sandbox.open()
        assert (await sandbox.run(["true"])).exit_code == 0


async def test_a_daemon_that_hangs_holds_up_the_caller_for_a_bounded_time(
    daemon: FakeDocker, monkeypatch: pytest.MonkeyPatch
):
    """The command may have begun, so the container is ended."""
    monkeypatch.setattr("torchrl_agentic.sandbox.remote.remote_process.END_S", 0.3)
    async with DockerSandbox(url=daemon.url) as sandbox:
        go_on = daemon.pause(EXEC)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.run(["true"])
        assert not sandbox.is_open
        go_on.set()


async def test_a_cancelled_start_leaves_no_process(daemon: FakeDocker):
    mark = f"75{os.getpid()}"
    async with DockerSandbox(url=daemon.url) as sandbox:
        go_on = daemon.pause(EXEC_START)
        running = asyncio.create_task(sandbox.run(["sleep", mark]))
        await until(lambda: daemon.asked(EXEC_START))
        running.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await _gone(f"sleep {mark}")


async def test_a_process_that_leaves_its_group_ends_with_the_container(daemon: FakeDocker):
    """The line in "Does not stop": it outlives its command."""
    mark = f"74{os.getpid()}"
    escape = f"mkfifo up; setsid sh -c 'echo >up; exec sleep {mark}' >/dev/null 2>&1 & cat up"
    async with DockerSandbox(url=daemon.url) as sandbox:
        assert (await sandbox.run(["sh", "-c", escape])).exit_code == 0
        assert f"sleep {mark}" in _processes()
    await _gone(f"sleep {mark}")


def test_without_the_package_the_extra_is_named(monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[docker\]"):
        DockerSandbox()


def test_importing_the_module_does_not_import_the_package():
    code = "import sys, torchrl_agentic.sandbox.remote.docker; sys.exit('aiodocker' in sys.modules)"
    assert run_program([sys.executable, "-c", code], check=False).returncode == 0


def test_invalid_settings_are_rejected():
    for wrong in ({"cpus": 0}, {"work_bytes": -1}):
        with pytest.raises(ValueError, match="above 0"):
            DockerSandbox(**wrong)
    with pytest.raises(ValueError, match="network"):
        DockerSandbox(ResourceLimits(network="loopback"))


def test_pickled_template_creates_equal_sandboxes():
    settings: dict[str, Any] = {
        "image": "a",
        "runtime": "runsc",
        "cpus": 2.0,
        "work_bytes": 5,
        "url": "unix:///x",
    }
    template = DockerSandbox(ResourceLimits(wall_seconds=1), **settings)
    for other in (template.fresh(), pickle.loads(pickle.dumps(template))):
        assert {name: getattr(other, name) for name in settings} == settings
        assert other.limits == template.limits
        assert not other.is_open
