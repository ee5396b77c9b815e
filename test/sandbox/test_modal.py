"""The Modal sandbox, against a stand-in for Modal on loopback.

Promises that only Modal itself can keep are tested up to the request.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox import ResourceLimits
from torchrl_agentic.sandbox.remote import remote_process, remote_sandbox
from torchrl_agentic.sandbox.remote.modal import ModalSandbox
from torchrl_agentic.testing import SandboxContract

modal = pytest.importorskip("modal")
if sys.platform != "linux":
    pytest.skip("the stand-in looks into /proc", allow_module_level=True)

from fakes.modal import FakeModal  # noqa: E402
from grpclib import Status  # noqa: E402
from helpers.limit import limit  # noqa: E402
from helpers.processes import run_program  # noqa: E402
from modal_proto import api_pb2  # noqa: E402

Make = Callable[..., ModalSandbox]
BYTES = bytes(range(256)) * 400


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeModal]:
    async with FakeModal() as fake:
        yield fake


@pytest_asyncio.fixture
async def make(fake: FakeModal) -> AsyncGenerator[Make]:
    async with fake.client() as client:
        yield lambda limits=None, **settings: ModalSandbox(limits, **({"client": client} | settings))


@pytest_asyncio.fixture
async def sandbox(make: Make) -> AsyncGenerator[ModalSandbox]:
    async with make() as sandbox:
        yield sandbox


class TestContract(SandboxContract):
    # It is the stand-in that cannot: its containers are plain processes on this host. Only the number of
    # processes is something that Modal cannot either, where code is root.
    untestable = frozenset({"host_files", "host_processes", "network", "privileges", "processes", "terminal"})
    groups = frozenset({"protocol"})
    inapplicable = {"arguments arrive as they are": "Modal takes 64 KiB of arguments"}  # noqa: RUF012

    @pytest_asyncio.fixture(autouse=True)
    async def served(self, make: Make) -> None:
        self.make = make


def running(mark: str) -> bool:
    """Whether a process with this word in its command line runs."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{name}/cmdline").read_text("utf-8", "replace"):
                return True
        except OSError:
            continue
    return False


async def begun(mark: str) -> None:
    async with asyncio.timeout(limit(10)):
        while not running(mark):
            await asyncio.sleep(0.01)


async def gone(mark: str) -> None:
    async with asyncio.timeout(limit(5)):
        while running(mark):
            await asyncio.sleep(0.01)


class TestWhatIsAsked:
    async def test_the_network_is_blocked_and_the_container_limited(self, fake, make):
        limits = ResourceLimits(memory_bytes=256 << 20)
        async with make(limits, cores=0.5, timeout_s=77, app="mine"):
            (request,) = fake.asked("SandboxCreateV2")
        definition, resources = request.definition, request.definition.resources
        assert definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        assert (resources.memory_mb, resources.memory_mb_max) == (256, 512)
        assert (resources.milli_cpu, resources.milli_cpu_max) == (125, 500)
        assert (definition.timeout_secs, definition.workdir) == (77, "/work")
        assert (request.app_id, definition.image_id) == ("ap-mine", "im-1")
        assert [tag.tag_name for tag in request.tags] == ["torchrl-agentic"]

    async def test_the_network_is_open_where_it_was_granted(self, fake, make):
        async with make(ResourceLimits(network="full", memory_bytes=None)):
            (request,) = fake.asked("SandboxCreateV2")
        assert request.definition.network_access.network_access_type == api_pb2.NetworkAccess.OPEN
        assert request.definition.resources.memory_mb_max == 0

    async def test_an_image_by_name_comes_from_a_registry(self, fake, make):
        async with make(image="python:3.12-slim"):
            (request,) = fake.asked("ImageGetOrCreate")
        assert request.image.dockerfile_commands[0] == "FROM python:3.12-slim"

    async def test_an_app_that_was_found_before_is_not_looked_up(self, fake, make):
        async with fake.client() as client:
            app = await modal.App.lookup.aio("found", client=client, create_if_missing=True)
            async with make(app=app, client=client):
                assert len(fake.asked("AppGetOrCreate")) == 1
        assert fake.asked("SandboxCreateV2")[0].app_id == "ap-found"

    async def test_a_fresh_one_is_asked_for_in_the_same_way(self, fake, make):
        first = make(ResourceLimits(memory_bytes=1 << 30), cores=2, timeout_s=99, app="mine")
        async with first, first.fresh():
            one, other = fake.asked("SandboxCreateV2")
        assert one.tags != other.tags
        one.ClearField("tags")
        other.ClearField("tags")
        assert one == other
        assert len(fake.asked("ImageGetOrCreate")) == 1

    async def test_modal_ends_a_command_of_ours_if_we_do_not(self, fake, make, sandbox):
        await sandbox.run(["true"], limits=replace(sandbox.limits, wall_seconds=1.5))
        assert fake.asked("TaskExecStart")[-1].timeout_secs == 12

    async def test_without_a_client_it_is_that_of_the_environment(self, fake, monkeypatch):
        monkeypatch.setenv("MODAL_SERVER_URL", fake.url)
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-fake")
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-fake")
        async with ModalSandbox() as sandbox:
            assert (await sandbox.run(["echo", "x"])).stdout == "x\n"
        await (await modal.Client.from_env.aio()).close.aio()

    async def test_without_any_token_it_says_so(self, monkeypatch):
        for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            monkeypatch.setenv(name, "")
        with pytest.raises(SandboxError, match="Token missing"):
            await ModalSandbox().open()


class TestConstruction:
    def test_without_the_sdk_it_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "modal", None)
        with pytest.raises(MissingExtra, match=r"torchrl-agentic\[modal\]"):
            ModalSandbox()

    @pytest.mark.skipif(not os.access(sys.executable, os.X_OK), reason="this user cannot start our Python")
    def test_importing_the_module_does_not_import_the_sdk(self):
        code = "import sys, torchrl_agentic.sandbox.remote.modal; sys.exit('modal' in sys.modules)"
        run_program([sys.executable, "-c", code], check=True)

    def test_limits_that_modal_lacks_are_rejected(self):
        for limits in (ResourceLimits(network="loopback"), ResourceLimits(fs_read_roots=("/usr",))):
            with pytest.raises(ValueError, match=r"network|folders"):
                ModalSandbox(limits)
        for settings in ({"cores": 0}, {"timeout_s": 0}):
            with pytest.raises(ValueError, match="above 0"):
                ModalSandbox(**settings)


class TestOpening:
    @pytest.mark.parametrize(
        ("method", "statuses"),
        [
            ("AppGetOrCreate", [Status.UNAUTHENTICATED]),
            ("ImageGetOrCreate", [Status.INVALID_ARGUMENT]),
            ("SandboxCreateV2", [Status.RESOURCE_EXHAUSTED]),
            ("SandboxCreateV2", [Status.UNAVAILABLE] * 4),
            ("TaskExecStart", [Status.NOT_FOUND]),
        ],
        ids=lambda value: value if isinstance(value, str) else value[0].name,
    )
    async def test_a_failure_leaves_nothing_and_can_be_tried_again(self, fake, make, method, statuses):
        sandbox = make()
        fake.fail(method, *statuses)
        with pytest.raises(SandboxError, match="told to fail"):
            await sandbox.open()
        assert not fake.containers
        assert not sandbox.is_open
        async with sandbox:
            assert (await sandbox.run(["true"])).exit_code == 0
        assert not fake.containers

    async def test_wrong_token_is_reported(self, fake, make):
        async with fake.client(("ak-wrong", "as-wrong")) as client:
            with pytest.raises(SandboxError, match="no such token"):
                await make(client=client).open()

    async def test_transient_errors_are_retried(self, fake, make):
        fake.fail("SandboxCreateV2", Status.UNAVAILABLE)
        async with make():
            assert len(fake.containers) == 1

    async def test_a_container_whose_creation_was_not_answered_is_ended(self, fake, make):
        fake.fail("SandboxCreateV2", Status.DATA_LOSS, done=True)
        with pytest.raises(SandboxError, match="told to fail"):
            await make().open()
        assert fake.asked("SandboxTerminateV2")
        assert not fake.containers

    async def test_image_without_the_programs_is_reported(self, fake, make, tmp_path):
        (tmp_path / "mkdir").symlink_to("/bin/mkdir")
        fake.path = str(tmp_path)
        with pytest.raises(SandboxError, match="there is no setsid"):
            await make().open()
        assert not fake.containers

    async def test_cancelling_while_the_container_is_made_ends_it(self, fake, make):
        held = fake.hold("SandboxCreateV2")
        opening = asyncio.create_task(make().open())
        await held.reached.wait()
        opening.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert fake.asked("SandboxTerminateV2")
        assert not fake.containers

    async def test_cancelling_does_not_wait_for_ever_for_a_container(self, fake, make, monkeypatch):
        """It is there, but Modal does not say so: it is found by its tag."""
        monkeypatch.setattr(remote_sandbox, "CLEANUP_S", 0.1)
        held = fake.hold("SandboxCreateV2")
        opening = asyncio.create_task(make().open())
        await held.reached.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not fake.containers

    async def test_close_ends_processes_left_by_many_cancellations(self, fake, make):
        sandbox = make()
        held = fake.hold("SandboxCreateV2")
        opening = asyncio.create_task(sandbox.open())
        await held.reached.wait()
        for _ in range(3):
            opening.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert fake.containers
        held.go.set()
        await sandbox.close()
        assert not fake.containers

    async def test_whether_code_can_raise_its_limits_is_known(self, sandbox):
        status = Path("/proc/self/status").read_text()
        effective = int(status.partition("CapEff:")[2].split()[0], 16)
        raises = bool(effective >> 24 & 1)
        assert sandbox.limits_enforced["memory_bytes"] is not raises
        assert sandbox.limits_enforced["memory_total"]
        assert not sandbox.limits_enforced["max_processes"]


class TestClosing:
    async def test_a_failure_that_passes_is_tried_again(self, fake, make):
        async with make():
            fake.fail("SandboxTerminateV2", Status.UNAVAILABLE)
        assert not fake.containers

    async def test_permanent_failure_of_close_is_raised_and_close_can_be_repeated(self, fake, make):
        sandbox = make()
        await sandbox.open()
        fake.fail("SandboxTerminateV2", *[Status.UNAVAILABLE] * 4)
        with pytest.raises(SandboxError, match="could not end the sandbox sb-"):
            await sandbox.close()
        assert not sandbox.is_open
        await sandbox.close()
        assert not fake.containers

    async def test_terminated_sandbox_can_be_closed(self, fake, make):
        async with make():
            fake.fail("SandboxTerminateV2", Status.NOT_FOUND)

    async def test_cancelling_does_not_stop_it(self, fake, make):
        sandbox = make()
        await sandbox.open()
        held = fake.hold("SandboxTerminateV2")
        closing = asyncio.create_task(sandbox.close())
        await held.reached.wait()
        closing.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not fake.containers
        await sandbox.close()

    async def test_a_closed_one_cannot_be_used(self, make):
        sandbox = make()
        with pytest.raises(SandboxError, match="not open"):
            await sandbox.run(["true"])
        with pytest.raises(SandboxError, match="not open"):
            await sandbox.read_file("x")

    async def test_a_process_in_a_session_of_its_own_ends_with_the_sandbox(self, make):
        """The one thing that outlives its command."""
        mark = f"91{os.getpid()}"
        async with make() as sandbox:
            start = f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True, stdout=-3, stderr=-3)"
            await sandbox.run([*sandbox.python_argv, "-c", f"import subprocess; {start}"])
            assert running(mark)
        await gone(mark)


class TestRunning:
    async def test_the_environment_is_clean_but_for_the_path_of_the_image(self, fake, make, sandbox):
        names = (await sandbox.run(["env"])).stdout
        assert f"PATH={fake.path}\n" in names
        assert "IMAGE" not in names
        async with make(replace(sandbox.limits, env={"ONLY": "a b"})) as other:
            result = await other.run(["/usr/bin/env"])
        assert set(result.stdout.split("\n")) - {"ONLY=a b", ""} <= {
            line for line in result.stdout.split("\n") if line.startswith(("PWD=", "OLDPWD="))
        }
        assert "ONLY=a b" in result.stdout

    async def test_a_command_keeps_its_handling_of_interrupts(self, sandbox):
        """Shells start background jobs with SIGINT ignored, and Python then leaves it so."""
        code = "import signal; print(signal.getsignal(signal.SIGINT))"
        assert "default_int_handler" in (await sandbox.run([*sandbox.python_argv, "-c", code])).stdout

    async def test_the_shell_adds_nothing_to_what_is_printed(self, sandbox):
        result = await sandbox.run(["sh", "-c", "kill -9 $$"])
        assert (result.stdout, result.stderr, result.exit_code) == ("", "", -9)

    async def test_it_starts_in_the_folder_that_was_named(self, sandbox):
        await sandbox.run(["mkdir", "-p", "a/b"])
        assert (await sandbox.run(["pwd"], cwd="a/b")).stdout.endswith("/a/b\n")
        assert (await sandbox.run(["pwd"], cwd="/work/a")).stdout.endswith("/a\n")
        assert (await sandbox.run(["pwd"], cwd="missing")).exit_code == 126
        with pytest.raises(PermissionError):
            await sandbox.run(["pwd"], cwd="/etc")

    async def test_stdin_may_be_long_and_need_not_be_read(self, sandbox):
        data = b"x" * 3_000_000
        assert (await sandbox.run(["wc", "-c"], stdin=data)).stdout.split() == ["3000000"]
        assert (await sandbox.run(["true"], stdin=data)).exit_code == 0

    async def test_too_long_command_is_rejected(self, sandbox):
        with pytest.raises(ValueError, match="to a file"):
            await sandbox.run(["echo", "x" * 70_000])
        assert (await sandbox.run(["echo", "x" * 50_000])).exit_code == 0

    async def test_network_of_a_single_command_cannot_be_reduced(self, make):
        async with make(ResourceLimits(network="full")) as sandbox:
            with pytest.raises(ValueError, match="one network for all"):
                await sandbox.run(["true"], limits=ResourceLimits())

    async def test_commands_of_one_sandbox_overlap(self, sandbox):
        """Each waits for the file of the other."""
        wait = "touch {}; until [ -e {} ]; do sleep 0.01; done"
        limits = replace(sandbox.limits, wall_seconds=20)
        both = await asyncio.gather(
            sandbox.run(["sh", "-c", wait.format("a", "b")], limits=limits),
            sandbox.run(["sh", "-c", wait.format("b", "a")], limits=limits),
        )
        assert [result.exit_code for result in both] == [0, 0]

    async def test_cancelling_ends_the_command(self, sandbox):
        mark = f"92{os.getpid()}"
        task = asyncio.create_task(sandbox.run(["sh", "-c", f"sleep {mark} & sleep {mark}"]))
        await begun(mark)
        task.cancel()
        async with asyncio.timeout(limit(5)):
            with pytest.raises(asyncio.CancelledError):
                await task
        await gone(mark)
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_cancelling_while_the_command_is_started_ends_it(self, fake, sandbox):
        mark = f"93{os.getpid()}"
        held = fake.hold("TaskExecStart")
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await held.reached.wait()
        await begun(mark)
        task.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(mark)

    async def test_a_command_that_stops_its_supervisor_is_ended_all_the_same(self, sandbox):
        """Nor does it turn a mistake of the model's into a failure of ours."""
        limits = replace(sandbox.limits, wall_seconds=0.3)
        result = await sandbox.run(["sh", "-c", "echo begun; kill -STOP $PPID; sleep 60"], limits=limits)
        assert result.timed_out
        assert result.stdout == "begun\n"
        assert sandbox.is_open


class TestLosing:
    async def streams(self, fake: FakeModal) -> None:
        """Wait until the output of the first command is being read; two streams were those of `open`."""
        while len(fake.asked("TaskExecStdioRead")) < 4:
            await asyncio.sleep(0.01)

    async def test_running_command_reports_that_modal_ended_the_sandbox(self, fake, sandbox):
        mark = f"94{os.getpid()}"
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await begun(mark)
        await fake.lose()
        async with asyncio.timeout(limit(20)):
            with pytest.raises(SandboxError, match="no such task"):
                await task
            with pytest.raises(SandboxError, match="no such task"):
                await sandbox.run(["true"])
            with pytest.raises(SandboxError, match="no such task"):
                await sandbox.write_file("x", b"")

    async def test_rejected_command_does_not_close_the_sandbox(self, fake, sandbox):
        fake.fail("TaskExecStart", Status.RESOURCE_EXHAUSTED)
        with pytest.raises(SandboxError, match="told to fail"):
            await sandbox.run(["true"])
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_credentials_that_have_expired_are_renewed(self, fake, sandbox):
        fake.fail("TaskExecStart", Status.UNAUTHENTICATED)
        assert (await sandbox.run(["true"])).exit_code == 0

    async def test_a_stream_that_fails_ends_the_command(self, fake, sandbox):
        mark = f"95{os.getpid()}"
        fake.fail("TaskExecStdioRead", Status.DATA_LOSS)
        with pytest.raises(SandboxError, match="told to fail"):
            await sandbox.run(["sleep", mark])
        await gone(mark)

    async def test_a_connection_that_is_cut_loses_nothing(self, fake, sandbox):
        code = "echo begun; until [ -e go ]; do sleep 0.01; done; seq 100000"
        task = asyncio.create_task(sandbox.run(["sh", "-c", code]))
        await self.streams(fake)
        fake.relay.cut()
        await sandbox.write_file("go", b"")
        result = await task
        assert result.stdout == "begun\n" + "".join(f"{number}\n" for number in range(1, 100_001))

    async def test_command_that_cannot_be_stopped_closes_the_sandbox(self, fake, sandbox, monkeypatch):
        """The way to the commands is cut for good, that to Modal is not."""
        monkeypatch.setattr(remote_process, "END_S", 0.3)
        mark = f"96{os.getpid()}"
        task = asyncio.create_task(
            sandbox.run(["sleep", mark], limits=replace(sandbox.limits, wall_seconds=1))
        )
        await self.streams(fake)
        fake.relay.cut(for_good=True)
        assert (await task).timed_out
        assert not sandbox.is_open
        assert not fake.containers
        await gone(mark)

    async def test_unanswered_start_closes_the_sandbox(self, fake, sandbox, monkeypatch):
        """The command may run, but its process id is unknown."""
        monkeypatch.setattr(remote_process, "END_S", 0.3)
        mark = f"99{os.getpid()}"
        fake.hold("TaskExecStart")
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        await begun(mark)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not sandbox.is_open
        assert not fake.containers
        await gone(mark)

    @pytest.mark.slow
    async def test_start_with_lost_responses_closes_the_sandbox(self, fake, sandbox):
        """The SDK asks again for 10 seconds."""
        mark = f"90{os.getpid()}"
        fake.fail("TaskExecStart", *[Status.UNAVAILABLE] * 11, done=True)
        with pytest.raises(SandboxError, match="told to fail"):
            await sandbox.run(["sleep", mark])
        assert not sandbox.is_open
        await gone(mark)


class TestSpawning:
    async def test_arbitrary_bytes_pass_both_ways(self, sandbox):
        process = await sandbox.spawn(["cat"])
        sending = asyncio.create_task(process.send(BYTES))
        received = b""
        while len(received) < len(BYTES):
            received += await process.receive()
        await sending
        assert received == BYTES
        await process.kill()
        assert await process.receive() == b""

    async def test_process_reports_exit_code_and_stderr(self, sandbox):
        process = await sandbox.spawn(["sh", "-c", "echo oh >&2; exit 3"])
        assert await process.receive() == b""
        assert await process.wait() == "exit code 3"
        assert process.errors() == "oh\n"
        with pytest.raises(EOFError):
            await process.send(b"x")

    async def test_kill_ends_child_processes(self, sandbox):
        mark = f"97{os.getpid()}"
        process = await sandbox.spawn(["sh", "-c", f"sleep {mark} & sleep {mark}"])
        await begun(mark)
        waiting = asyncio.create_task(process.wait())
        await process.kill()
        await process.kill()
        assert not running(mark)
        assert await waiting == "killed by SIGKILL"

    async def test_it_has_no_limit_of_time(self, fake, make):
        async with make(ResourceLimits(cpu_seconds=1, wall_seconds=0.1)) as sandbox:
            process = await sandbox.spawn(["sh", "-c", "ulimit -t"])
            assert await process.receive() == b"unlimited\n"
        assert not fake.asked("TaskExecStart")[-1].HasField("timeout_secs")

    async def test_a_receive_that_is_cancelled_loses_nothing(self, sandbox):
        process = await sandbox.spawn(["cat"])
        for part in (b"one", b"two"):
            receiving = asyncio.create_task(process.receive())
            await asyncio.sleep(0)
            receiving.cancel()
            await process.send(part)
            assert await process.receive() == part

    async def test_unread_output_waits(self, sandbox):
        """Other commands continue, while the unread rest stays in the sandbox."""
        process = await sandbox.spawn(["sh", "-c", "yes | head -c 5000000"])
        while len(process._unread) < 1 << 20:
            await asyncio.sleep(0.01)
        assert (await sandbox.run(["sh", "-c", "seq 300000"])).exit_code == 0
        assert len(process._unread) < 2 << 20
        total = 0
        while data := await process.receive():
            total += len(data)
        assert total == 5_000_000

    async def test_closing_the_sandbox_ends_it(self, make):
        mark = f"98{os.getpid()}"
        async with make() as sandbox:
            process = await sandbox.spawn(["sleep", mark])
            await begun(mark)
            receiving = asyncio.create_task(process.receive())
            waiting = asyncio.create_task(process.wait())
        assert await receiving == b""
        assert await waiting == "ended with its sandbox"
        await gone(mark)

    async def test_lost_sandbox_is_not_an_end_of_the_stream(self, fake, sandbox):
        process = await sandbox.spawn(["cat"])
        receiving = asyncio.create_task(process.receive())
        await asyncio.sleep(0)
        await fake.lose()
        with pytest.raises(SandboxError, match="no such task"):
            await receiving
        with pytest.raises(SandboxError, match="no such task"):
            await process.wait()
        await process.kill()

    async def test_process_that_cannot_start_raises(self, fake, sandbox):
        fake.fail("TaskExecStart", Status.RESOURCE_EXHAUSTED)
        with pytest.raises(SandboxError, match="told to fail"):
            await sandbox.spawn(["cat"])


class TestFiles:
    async def test_a_long_file_is_read_back(self, sandbox):
        await sandbox.write_file("a/b/long", BYTES * 30)
        assert await sandbox.read_file("a/b/long") == BYTES * 30
        assert await sandbox.read_file("a/b/long", 300) == (BYTES * 30)[:300]

    async def test_each_refusal_has_its_exception(self, sandbox):
        await sandbox.run(["sh", "-c", "mkdir -- -folder; echo x > file; ln -s file link; mkfifo pipe"])
        for path, expected in (
            ("missing", FileNotFoundError),
            ("missing/file", FileNotFoundError),
            ("-folder", IsADirectoryError),
            ("/work", IsADirectoryError),
            ("link", PermissionError),
            ("pipe", PermissionError),
            ("file/below", PermissionError),
        ):
            with pytest.raises(expected):
                await sandbox.read_file(path)
        for path, expected in (
            ("-folder", IsADirectoryError),
            ("/work", IsADirectoryError),
            ("link", PermissionError),
            ("pipe", PermissionError),
            ("file/below", PermissionError),
        ):
            with pytest.raises(expected):
                await sandbox.write_file(path, b"y")
        await sandbox.write_file("-folder/$(touch planted)\n; x", b"y")
        assert await sandbox.read_file("-folder/$(touch planted)\n; x") == b"y"
        assert (await sandbox.run(["ls"])).stdout.split() == ["-folder", "file", "link", "pipe"]

    async def test_a_file_that_cannot_be_written_says_why(self, sandbox):
        with pytest.raises(OSError, match="too long"):
            await sandbox.write_file("x" * 300, b"y")


class TestLoops:
    async def test_a_sandbox_per_event_loop(self, fake, make):
        """The SDK runs on a loop and a thread of its own, whichever we call it from."""
        printed = []

        async def work(number: int) -> None:
            async with make() as sandbox:
                process = await sandbox.spawn(["cat"])
                await process.send(b"%d" % number)
                printed.append((await process.receive(), (await sandbox.run(["echo", "x"])).stdout))

        threads = [threading.Thread(target=asyncio.run, args=(work(number),)) for number in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert sorted(printed) == [(b"%d" % number, "x\n") for number in range(3)]
        assert not fake.containers

    async def test_one_sandbox_on_several_event_loops(self, fake, make):
        sandbox = make()
        await asyncio.to_thread(asyncio.run, sandbox.open())
        process = await sandbox.spawn(["cat"])
        result = await asyncio.to_thread(asyncio.run, sandbox.run(["echo", "x"]))
        assert result.stdout == "x\n"
        await asyncio.to_thread(asyncio.run, sandbox.close())
        assert await process.receive() == b""
        assert not fake.containers
