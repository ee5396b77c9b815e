"""Commands: their arguments, folder, input, output and end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import THREATS, Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import python, refused, until
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import SECRET, files_named, host_folder, new_mark
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("protocol")
MEANT_AS_OPTIONS = (
    ["--bind", "/", "/", "touch"], ["--"], ["-c", "id"], ["--help"], ["--version"], ["--args", "0"], ["-e"],
    ["--cap-add", "ALL", "id"], ["--reuid=0", "id"], ["--privileged", "id"], ["-i", "id"], [""], ["=x", "id"],
)  # fmt: skip


@group.case()
async def output_and_exit_code_come_back(sandbox: Sandbox) -> None:
    result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3), result
    assert not result.timed_out, result
    assert not result.truncated, result


@group.case()
async def large_exit_codes_are_not_signals(sandbox: Sandbox) -> None:
    for code in (1, 2, 125, 126, 127, 200, 254, 255):
        assert (await sandbox.run(["sh", "-c", f"exit {code}"])).exit_code == code


@group.case()
async def a_signal_is_a_negative_exit_code(sandbox: Sandbox) -> None:
    for number in (9, 15, 11, 6):
        assert (await sandbox.run(["sh", "-c", f"kill -{number} $$"])).exit_code == -number


@group.case()
async def a_missing_command_is_the_models_mistake(sandbox: Sandbox) -> None:
    result = await sandbox.run(["no-such-command-here"])
    assert result.exit_code == 127, result
    assert "no-such-command-here" in result.stderr, result


@group.case(needs=["files"])
async def a_file_that_is_not_a_program_is_the_models_mistake(sandbox: Sandbox) -> None:
    await sandbox.run(
        ["sh", "-c", "echo no program > text; mkdir folder; printf '\\0\\1' > junk; chmod +x junk"]
    )
    for argv in (["./text"], ["./folder"], ["./junk"], ["./text/below"], ["x" * 300], ["/"], ["."]):
        assert (await sandbox.run(argv)).exit_code in (126, 127), argv


@group.case()
async def an_invalid_command_is_refused(sandbox: Sandbox) -> None:
    for argv in ([], ["a\0b"], ["\ud800"], ["echo", "a\0b"], ["echo", "\udcff"], "echo"):
        await refused(sandbox.run(argv), ValueError)


@group.case()
async def arguments_are_never_options_of_the_sandbox(sandbox: Sandbox) -> None:
    marker = f"conformance-{new_mark()}"
    for argv in MEANT_AS_OPTIONS:
        result = await sandbox.run([*argv, f"/tmp/{marker}"])
        assert result.exit_code in (126, 127), f"{argv}: {result}"
    assert not files_named(marker)


@group.case()
async def arguments_arrive_as_they_are(sandbox: Sandbox) -> None:
    words = [
        "", " ", "--", "-c", "--bind", "a b", "a\nb\n", "\t", "'", '"', "\\", "$(id)", "`id`", "$HOME", ";id",
        "|id", "*", "~", "%s", "{}", "\x01\x1b[31m\x7f", "ünï", "日本", "🙂", "\u2028", "\ufeff", "é" * 1000,
        "x" * 100_000,
    ]  # fmt: skip
    echo = "import json, os, sys; print(json.dumps([os.fsencode(w).decode() for w in sys.argv[1:]]))"
    result = await sandbox.run([*sandbox.python_argv, "-c", echo, *words])
    assert json.loads(result.stdout) == words


@group.case()
async def a_command_that_is_too_long_is_the_models_mistake(sandbox: Sandbox) -> None:
    for words in (["x" * 200_000], ["x" * 1000] * 4000):
        with contextlib.suppress(ValueError):
            assert (await sandbox.run(["true", *words])).exit_code != 0
    assert (await sandbox.run(["true"])).exit_code == 0


@group.case()
async def stdin_is_empty_or_what_was_given(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["cat"])).stdout == ""
    assert (await sandbox.run(["cat"], stdin=b"")).stdout == ""
    assert (await sandbox.run(["cat"], stdin=b"hello")).stdout == "hello"


@group.case()
async def a_long_stdin_arrives_whole(sandbox: Sandbox) -> None:
    data = random.Random(0).randbytes(5_000_000)
    code = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    result = await sandbox.run([*sandbox.python_argv, "-c", code], stdin=data)
    assert result.stdout.strip() == hashlib.sha256(data).hexdigest(), result


@group.case()
async def unread_stdin_does_not_block(sandbox: Sandbox) -> None:
    async with asyncio.timeout(HANG_S):
        assert (await sandbox.run(["true"], stdin=bytes(5_000_000))).exit_code == 0


@group.case()
async def output_that_is_not_text_is_decoded(sandbox: Sandbox) -> None:
    result = await sandbox.run(["printf", r"a\000b\377c\r\n\355\240\200\033[0m"])
    assert result.stdout.startswith("a\0b\ufffdc\r\n\ufffd"), result
    assert result.stdout.endswith("\x1b[0m"), result
    assert result.stdout.encode(), "it holds half of a surrogate pair"


@group.case()
async def long_output_arrives_whole_below_the_limit(sandbox: Sandbox) -> None:
    """More than a pipe holds, stderr first, in characters that reads split."""
    code = (
        "import sys; sys.stderr.write('ü日' * 100_000); sys.stderr.flush(); sys.stdout.write('é' * 300_000)"
    )
    result = await python(sandbox, code)
    assert result.stderr == "ü日" * 100_000
    assert result.stdout == "é" * 300_000
    assert not result.truncated


@group.case()
async def a_flood_of_output_is_cut_in_the_middle(sandbox: Sandbox) -> None:
    limits = ResourceLimits(output_bytes=10_000)
    result = await sandbox.run(["sh", "-c", "echo first; yes | head -c 5000000; echo last"], limits=limits)
    assert result.truncated
    assert len(result.stdout) < 11_000, len(result.stdout)
    assert result.stdout.startswith("first\n"), result.stdout[:100]
    assert result.stdout.endswith("last\n"), result.stdout[-100:]
    assert "bytes omitted" in result.stdout


@group.case(needs=["files"])
async def commands_start_in_the_folder_that_was_named(sandbox: Sandbox) -> None:
    for folder in ("sub", "sub/below", "with space", "-P", "--", "$(id)", "new\nline", "ünï", "...", ";id"):
        await sandbox.write_file(f"{folder}/here", b"yes")
        for cwd in (folder, f"./{folder}", f"/work/{folder}/"):
            result = await sandbox.run(["cat", "here"], cwd=cwd)
            assert result.stdout == "yes", f"{cwd!r}: {result}"


@group.case(needs=["files"])
async def a_missing_folder_is_the_models_mistake(sandbox: Sandbox) -> None:
    await sandbox.run(
        ["sh", "-c", "touch file; mkdir shut; chmod 000 shut; ln -s nowhere dangling; ln -s . loop"]
    )
    for cwd in (
        "missing",
        "file",
        "dangling",
        "missing/..x",
        "x" * 300,
        "/".join(["loop"] * 60),
        "a/" * 3000,
    ):
        assert (await sandbox.run(["true"], cwd=cwd)).exit_code != 0, cwd
    assert isinstance((await sandbox.run(["true"], cwd="shut")).exit_code, int)


@group.case()
async def a_folder_outside_of_work_is_refused(sandbox: Sandbox) -> None:
    for cwd in ("/", "/tmp", "..", "/work/../etc", "a/../..", "/proc/self/cwd", "a\0b"):
        await refused(sandbox.run(["pwd"], cwd=cwd), PermissionError)


@group.case("host_files", needs=["files"])
async def a_folder_that_is_a_link_leads_to_nothing_of_the_hosts(sandbox: Sandbox) -> None:
    with host_folder() as folder:
        await sandbox.run(["ln", "-s", str(folder), "link"])
        result = await sandbox.run(["cat", "secret"], cwd="link")
        assert SECRET not in result.stdout
        await sandbox.run(["touch", "planted"], cwd="link")
        assert not (folder / "planted").exists()


@group.case(limits=ResourceLimits(env={"PATH": "/usr/bin:/bin", "A": "b\n$(id)"}))
async def the_environment_is_the_one_in_the_limits(sandbox: Sandbox) -> None:
    printed = (await sandbox.run(["env", "-0"])).stdout.split("\0")
    found = {line.partition("=")[0]: line.partition("=")[2] for line in printed if line}
    assert found["A"] == "b\n$(id)", found
    assert set(found) <= {"A", "PATH", "PWD", "OLDPWD", "SHLVL", "_", "HOME", "HOSTNAME"}, found


@group.case()
async def python_inside_does_what_programs_need(sandbox: Sandbox) -> None:
    """Threads, processes, pipes, an event loop and temporary files work in spite of the restrictions."""
    code = """
        import asyncio, multiprocessing, sqlite3, subprocess, tempfile, threading
        asyncio.run(asyncio.sleep(0))
        threads = [threading.Thread(target=int) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        forked = multiprocessing.get_context('fork')
        ours, theirs = forked.Pipe()
        child = forked.Process(target=theirs.send, args=('done',))
        child.start()
        with tempfile.NamedTemporaryFile('w') as file: file.write('x')
        sqlite3.connect(':memory:').execute('select 1')
        subprocess.run(['true'], capture_output=True, check=True)
        print(ours.recv())
        child.join()
    """
    result = await python(sandbox, code)
    assert result.stdout.split() == ["done"], result


@group.case()
async def a_long_lived_process_answers_what_it_is_sent(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "while read -r line; do echo got $line; done; exit 3"])
    for word in (b"one", b"two"):
        await process.send(word + b"\n")
        assert await until(process, b"\n") == b"got " + word
    await process.kill()
    await process.kill()
    assert await process.receive() == b""


@group.case()
async def a_long_lived_process_takes_and_gives_any_amount(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 8000
    process = await sandbox.spawn(["cat"])
    sending = asyncio.create_task(process.send(data))
    got = b""
    while len(got) < len(data):
        piece = await process.receive()
        assert piece, f"it ended after {len(got)} bytes"
        got += piece
    await sending
    assert got == data
    await process.kill()


@group.case()
async def a_long_lived_process_that_ends_reports_how(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert await until(process, b"out\n") == b""
    assert await process.receive() == b""
    assert "3" in await process.wait()
    assert "err" in process.errors()
    try:
        for _ in range(20):
            await process.send(bytes(100_000))
            await asyncio.sleep(0.01)
    except EOFError:
        pass
    else:
        raise AssertionError("it accepts input that is never read")
    finally:
        await process.kill()


@group.case()
async def a_long_lived_process_may_say_any_amount_of_errors(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(["sh", "-c", "yes error | head -c 3000000 >&2; echo done"])
    assert await until(process, b"done\n") == b""
    assert 0 < len(process.errors()) < 100_000
    await process.kill()


@group.case()
async def a_missing_long_lived_command_is_reported(sandbox: Sandbox) -> None:
    try:
        process = await sandbox.spawn(["no-such-command-here"])
    except SandboxError as error:
        assert "no-such-command-here" in str(error)
        return
    assert "127" in await process.wait()
    await process.kill()


@group.factory_case()
async def limits_are_reported(make: Make) -> None:
    enforced = make().limits_enforced
    names = {
        "cpu_seconds",
        "memory_bytes",
        "memory_total",
        "max_processes",
        "disk_bytes",
        "disk_total",
        "network",
    }
    assert names | {"seccomp"} <= set(enforced), enforced
    assert all(isinstance(value, bool) for value in enforced.values()), enforced


@group.factory_case()
async def enforced_limits_agree_with_the_threats_that_are_not_stopped(make: Make) -> None:
    sandbox = make()
    assert sandbox.not_stopped <= set(THREATS), f"unknown threats: {sandbox.not_stopped - set(THREATS)}"
    pairs = {
        "cpu": "cpu_seconds", "memory": "memory_bytes", "processes": "max_processes",
        "file_size": "disk_bytes", "network": "network",
    }  # fmt: skip
    for threat, limit in pairs.items():
        held = sandbox.limits_enforced[limit]
        assert held is (threat not in sandbox.not_stopped), (
            f"{limit}: {held}, not_stopped: {set(sandbox.not_stopped)}"
        )
