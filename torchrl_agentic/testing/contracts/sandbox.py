"""What every sandbox promises, unless it says that it cannot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.sandbox import ResourceLimits, Sandbox


class SandboxContract:
    """Promises of a `Sandbox`. A backend that cannot keep one says so in `cannot`, and no other way.

    make: a fresh sandbox with these limits. cannot: what it does not stop, of `CLAIMS`.
    """

    CLAIMS: ClassVar[frozenset[str]] = frozenset(
        {
            "host_files",
            "host_processes",
            "network",
            "privileges",
            "memory",
            "cpu",
            "processes",
            "file_size",
            "terminal",
        }
    )
    cannot: ClassVar[frozenset[str]] = frozenset()

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        """Make the sandbox under test."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncGenerator[Sandbox]:
        """An open sandbox."""
        async with self.make() as sandbox:
            yield sandbox

    def claims(self, name: str) -> None:
        """Skip where the backend says that it does not stop this."""
        assert name in self.CLAIMS
        if name in self.cannot:
            pytest.skip(f"{type(self.make()).__name__} says that it does not stop this: {name}")

    async def python(self, sandbox: Sandbox, code: str) -> str:
        """Run Python inside, and give what it printed."""
        result = await sandbox.run([*sandbox.python_argv, "-c", code])
        return result.stdout + result.stderr

    @pytest.mark.asyncio
    async def test_output_and_exit_code_come_back(self, sandbox: Sandbox) -> None:
        result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)

    @pytest.mark.asyncio
    async def test_a_missing_command_is_the_models_mistake(self, sandbox: Sandbox) -> None:
        result = await sandbox.run(["no-such-command-here"])
        assert result.exit_code == 127
        assert "no-such-command-here" in result.stderr

    @pytest.mark.asyncio
    async def test_a_signal_is_a_negative_exit_code(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["sh", "-c", "kill -9 $$"])).exit_code == -9

    @pytest.mark.asyncio
    async def test_stdin_is_empty_or_what_was_given(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["cat"])).stdout == ""
        assert (await sandbox.run(["cat"], stdin=b"hello")).stdout == "hello"

    @pytest.mark.asyncio
    async def test_arguments_are_never_options_of_the_sandbox(self, sandbox: Sandbox) -> None:
        """The class of CVE-2024-32462."""
        marker = f"/tmp/torchrl_agentic-marker-{os.getpid()}"
        for argv in (["--bind", "/", "/", "touch", marker], ["--", "touch"], ["-c", "id"], ["--help"]):
            assert (await sandbox.run(argv)).exit_code == 127
        assert not os.path.exists(marker)  # noqa: ASYNC240

    @pytest.mark.asyncio
    async def test_a_command_that_cannot_be_one_is_refused(self, sandbox: Sandbox) -> None:
        for argv in ([], ["a\0b"], ["\ud800"]):
            with pytest.raises(ValueError):  # noqa: PT011  whichever
                await sandbox.run(argv)

    @pytest.mark.asyncio
    async def test_the_wall_limit_ends_a_command_and_its_children(self, sandbox: Sandbox) -> None:
        limits = ResourceLimits(wall_seconds=0.3)
        mark = f"87{os.getpid()}"
        result = await sandbox.run(["sh", "-c", f"echo begun; sleep {mark} & sleep 60"], limits=limits)
        assert result.timed_out
        assert result.stdout == "begun\n"
        await _gone(mark)

    @pytest.mark.asyncio
    async def test_what_a_command_leaves_running_ends_with_it(self, sandbox: Sandbox) -> None:
        mark = f"88{os.getpid()}"
        assert (await sandbox.run(["sh", "-c", f"sleep {mark} >/dev/null 2>&1 &"])).exit_code == 0
        await _gone(mark)

    @pytest.mark.asyncio
    async def test_large_exit_codes_are_no_signals(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["sh", "-c", "exit 200"])).exit_code == 200

    @pytest.mark.asyncio
    async def test_processor_time_is_bounded(self) -> None:
        self.claims("cpu")
        async with self.make(ResourceLimits(cpu_seconds=1, wall_seconds=30)) as sandbox:
            result = await sandbox.run([*sandbox.python_argv, "-c", "while True: pass"])
            assert not result.timed_out
            assert result.exit_code < 0

    @pytest.mark.asyncio
    async def test_cancelling_leaves_no_process(self, sandbox: Sandbox) -> None:
        mark = f"86{os.getpid()}"
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        while mark not in _processes():
            assert not task.done()
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _gone(mark)

    @pytest.mark.asyncio
    async def test_a_flood_of_output_is_cut_in_the_middle(self, sandbox: Sandbox) -> None:
        limits = ResourceLimits(output_bytes=10_000)
        result = await sandbox.run(
            ["sh", "-c", "echo first; yes | head -c 5000000; echo last"], limits=limits
        )
        assert result.truncated
        assert len(result.stdout) < 11_000
        assert result.stdout.startswith("first\n")
        assert result.stdout.endswith("last\n")
        assert "bytes omitted" in result.stdout

    @pytest.mark.asyncio
    async def test_files_stay_from_call_to_call_and_not_beyond(self, sandbox: Sandbox) -> None:
        await sandbox.run(["sh", "-c", "echo content > file"])
        assert (await sandbox.run(["cat", "file"])).stdout == "content\n"
        async with sandbox.fresh() as other:
            assert (await other.run(["cat", "file"])).exit_code != 0

    @pytest.mark.asyncio
    async def test_environment_of_the_trainer_is_not_passed_on(self, sandbox: Sandbox) -> None:
        os.environ["TORCHRL_AGENTIC_SECRET"] = "sesame"
        try:
            everywhere = "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"
            result = await sandbox.run(["sh", "-c", "env" if "host_processes" in self.cannot else everywhere])
            assert "sesame" not in result.stdout
        finally:
            del os.environ["TORCHRL_AGENTIC_SECRET"]

    @pytest.mark.asyncio
    async def test_opening_and_closing_again_does_nothing(self) -> None:
        sandbox = self.make()
        await sandbox.close()
        await sandbox.open()
        await sandbox.open()
        assert (await sandbox.run(["true"])).exit_code == 0
        await sandbox.close()
        await sandbox.close()
        assert not sandbox.is_open

    @pytest.mark.asyncio
    async def test_limits_are_reported(self) -> None:
        enforced = self.make().limits_enforced
        assert {"cpu_seconds", "memory_bytes", "max_processes", "network"} <= set(enforced)
        assert all(isinstance(value, bool) for value in enforced.values())

    @pytest.mark.asyncio
    async def test_a_file_that_is_written_is_read_back(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("folder/file.bin", b"\0\xff data")
        assert await sandbox.read_file("/work/folder/file.bin") == b"\0\xff data"
        assert await sandbox.read_file("folder/file.bin", 2) == b"\0\xff"
        assert (await sandbox.run(["cat", "folder/file.bin"])).stdout.endswith(" data")
        assert (await sandbox.run(["sh", "-c", "echo more >> folder/file.bin"])).exit_code == 0

    @pytest.mark.asyncio
    async def test_paths_that_leave_the_workspace_are_refused(self, sandbox: Sandbox) -> None:
        for path in ("../secret", "/etc/passwd", "a/../../b", "/work/../etc/passwd", "/", "a\0b"):
            with pytest.raises(OSError):  # noqa: PT011  whichever
                await sandbox.read_file(path)
            with pytest.raises(OSError):  # noqa: PT011  whichever
                await sandbox.write_file(path, b"x")

    @pytest.mark.asyncio
    async def test_links_of_the_models_are_not_followed(self, sandbox: Sandbox) -> None:
        await sandbox.run(["sh", "-c", "ln -s /etc/passwd link; ln -s /etc folder; ln -s /tmp out"])
        for path in ("link", "folder/passwd"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(path)
        with pytest.raises(PermissionError):
            await sandbox.write_file("out/planted", b"x")

    @pytest.mark.asyncio
    async def test_what_is_no_file_is_refused_at_once(self, sandbox: Sandbox) -> None:
        """A FIFO would hold the reader up for ever."""
        await sandbox.run(["sh", "-c", "mkfifo pipe; mkdir folder"])
        async with asyncio.timeout(5):
            for path in ("pipe", "folder", "missing"):
                with pytest.raises(OSError):  # noqa: PT011  whichever
                    await sandbox.read_file(path)

    @pytest.mark.asyncio
    async def test_host_files_are_out_of_reach(self, sandbox: Sandbox, tmp_path: Any) -> None:
        self.claims("host_files")
        secret = tmp_path / "secret"
        secret.write_text("sesame")
        tmp_path.chmod(0o777)
        for argv in (["cat", str(secret)], ["cat", "/etc/shadow"], ["ls", os.path.expanduser("~")]):  # noqa: ASYNC240
            result = await sandbox.run(argv)
            assert result.exit_code != 0
            assert "sesame" not in result.stdout
        for target in (str(tmp_path / "planted"), "/planted", "/usr/planted", "/etc/planted"):
            assert (await sandbox.run(["sh", "-c", f"echo x > {target}"])).exit_code != 0
        assert not (tmp_path / "planted").exists()

    @pytest.mark.asyncio
    async def test_host_processes_are_out_of_sight(self, sandbox: Sandbox) -> None:
        self.claims("host_processes")
        numbers = (await sandbox.run(["sh", "-c", "ls /proc"])).stdout.split()
        assert len([name for name in numbers if name.isdigit()]) < 10
        assert (await sandbox.run(["kill", "-0", str(os.getpid())])).exit_code != 0

    @pytest.mark.asyncio
    async def test_the_network_is_out_of_reach(self, sandbox: Sandbox) -> None:
        self.claims("network")
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for family, kind, address in (
            ("AF_INET", "SOCK_STREAM", f"('127.0.0.1', {port})"),
            ("AF_INET", "SOCK_DGRAM", "('127.0.0.1', 53)"),
            ("AF_NETLINK", "SOCK_RAW", "(0, 0)"), ("AF_UNIX", "SOCK_STREAM", "'\\0abstract'"),
        ):  # fmt: skip
            connect = f"c = s.socket(s.{family}, s.{kind}); c.connect({address})"
            code = f"import socket as s; {connect}; print('through')"
            assert "through" not in await self.python(sandbox, code)
        server.close()

    @pytest.mark.asyncio
    async def test_no_privilege_can_be_had(self, sandbox: Sandbox) -> None:
        self.claims("privileges")
        status = (await sandbox.run(["cat", "/proc/self/status"])).stdout
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert fields["Uid"].split()[0] != "0"
        for argv in (
            ["unshare", "-Ur", "true"],
            ["mount", "-t", "tmpfs", "none", "/tmp"],
            ["chroot", "/tmp", "true"],
        ):
            assert (await sandbox.run(argv)).exit_code != 0

    @pytest.mark.asyncio
    async def test_system_calls_that_only_attacks_need_are_denied(self, sandbox: Sandbox) -> None:
        """By number, on x86-64.

        Ptrace, keyctl, bpf, io_uring_setup, unshare, mount, userfaultfd, open_by_handle_at.
        """
        self.claims("privileges")
        if not sandbox.limits_enforced.get("seccomp"):
            pytest.skip("no filter is known for this processor")
        code = (
            "import ctypes, errno; libc = ctypes.CDLL(None, use_errno=True)\n"
            "for n in (101, 250, 321, 425, 272, 165, 323, 304):\n"
            "    libc.syscall(n, 0, 0, 0, 0, 0); print(errno.errorcode[ctypes.get_errno()])"
        )
        assert (await self.python(sandbox, code)).split() == ["EPERM"] * 8

    @pytest.mark.asyncio
    async def test_the_trainers_terminal_cannot_be_typed_into(self, sandbox: Sandbox) -> None:
        self.claims("terminal")
        code = "import fcntl, os; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); print('through')"
        assert "through" not in await self.python(sandbox, code)

    @pytest.mark.asyncio
    async def test_memory_of_a_process_is_bounded(self) -> None:
        self.claims("memory")
        async with self.make(ResourceLimits(memory_bytes=256 << 20)) as sandbox:
            assert "MemoryError" in await self.python(sandbox, "x = bytearray(400 << 20)")

    @pytest.mark.asyncio
    async def test_processes_are_bounded(self) -> None:
        """40 children that sleep, of which at most 16 can be made; all are gone afterwards."""
        self.claims("processes")
        async with self.make(ResourceLimits(max_processes=16, wall_seconds=10)) as sandbox:
            code = (
                "import os, time\nmade = 0\n"
                "for _ in range(40):\n"
                "    try:\n        pid = os.fork()\n"
                "    except BlockingIOError:\n        break\n"
                "    if pid == 0:\n        time.sleep(30); os._exit(0)\n"
                "    made += 1\n"
                "print(made)"
            )
            assert int((await self.python(sandbox, code)).split()[0]) < 16

    @pytest.mark.asyncio
    async def test_the_size_of_a_file_is_bounded(self) -> None:
        self.claims("file_size")
        async with self.make(ResourceLimits(disk_bytes=1 << 20)) as sandbox:
            await sandbox.run(["sh", "-c", "head -c 3000000 /dev/zero > big"])
            assert len(await sandbox.read_file("big")) <= 1 << 20


async def _gone(mark: str) -> None:
    """Wait a moment for a process to be gone, by a word of its command line."""
    for _ in range(50):
        if mark not in _processes():
            return
        await asyncio.sleep(0.02)
    pytest.fail("a process runs on that should have ended")


def _processes() -> str:
    """The command lines of all processes that we can see."""
    if sys.platform == "linux":
        lines: list[str] = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        lines.append(file.read().replace(b"\0", b" ").decode("utf-8", "replace"))
                except OSError:
                    continue
        return "\n".join(lines)
    return subprocess.run(["ps", "-axo", "args"], capture_output=True, text=True, check=True).stdout
