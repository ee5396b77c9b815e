"""The Seatbelt sandbox as far as it can be tested off macOS: profile, command, shell script and refusal."""

import itertools
import os
import re
import sys

import pytest
from helpers.processes import run_program

from torchrl_agentic.sandbox import ResourceLimits, Sandbox, SandboxError
from torchrl_agentic.sandbox.seatbelt import READ, SERVICES, SeatbeltSandbox, command, profile
from torchrl_agentic.testing import SandboxContract

EVIL = '/tmp/a")) (allow default) (b "'


@pytest.mark.skipif(sys.platform != "darwin", reason="Seatbelt is a part of macOS")
class TestSeatbelt(SandboxContract):
    untestable = frozenset({"memory", "processes", "host_processes", "privileges"})

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return SeatbeltSandbox(limits)


def expressions(text):
    """Parse the profile into nested lists of words."""
    stack = [[]]
    for token in re.findall(r'"[^"]*"|[()]|[^\s()]+', text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(tuple(done))
        else:
            stack[-1].append(token)
    assert len(stack) == 1, "the parentheses do not match"
    return stack[0]


def rules(*, read=2, write=1, services=SERVICES, network=False):
    return expressions(profile(read=read, write=write, services=services, network=network))


def allowed(operation, found):
    """The filters under which an operation is allowed; None where it is not."""
    return next((rule[2:] for rule in found if rule[:2] == ("allow", operation)), None)


def test_unlisted_operations_are_denied():
    found = rules()
    assert found[:2] == [("version", "1"), ("deny", "default")]
    assert {rule[1] for rule in found if rule[0] == "allow"} == {
        "process-fork",
        "process-exec*",
        "process-info*",
        "signal",
        "sysctl-read",
        "mach-lookup",
        "file-read-metadata",
        "file-read*",
        "file-map-executable",
        "file-write*",
        "file-write-data",
    }


def test_only_metadata_and_processes_are_allowed_without_a_filter():
    bare = {rule[1] for rule in rules() if rule[0] == "allow" and len(rule) == 2}
    assert bare == {"process-fork", "process-exec*", "file-read-metadata"}


def test_files_are_read_and_written_below_parameters_only():
    found = rules(read=2, write=2)
    subpaths = {filter_[1] for filter_ in allowed("file-read*", found) if filter_[0] == "subpath"}
    parameters = {("param", f'"{name}"') for name in ("READ_0", "READ_1", "WRITE_0", "WRITE_1")}
    assert subpaths == parameters | {'"/dev/fd"'}
    written = allowed("file-write*", found)
    assert set(written) == {("subpath", ("param", '"WRITE_0"')), ("subpath", ("param", '"WRITE_1"'))}


def test_services_are_looked_up_by_name_only():
    """Any service would do for `open -a`, which starts programs outside of the sandbox."""
    assert allowed("mach-lookup", rules()) == tuple(("global-name", f'"{name}"') for name in SERVICES)


def test_signals_stay_in_the_process_group_and_processes_see_themselves():
    found = rules()
    assert allowed("signal", found) == (("target", "pgrp"),)
    assert allowed("process-info*", found) == (("target", "self"),)


def test_sysctl_names_about_other_processes_are_not_allowed():
    """kern.procargs2 gives the arguments and the environment of any process of the user."""
    names = {filter_[1].strip('"') for filter_ in allowed("sysctl-read", rules())}
    assert "hw." in names
    assert not any("kern.proc".startswith(name) or name.startswith("kern.proc") for name in names)


def test_setuid_programs_are_denied_after_the_rest_is_allowed():
    """The last rule that matches counts."""
    found = rules()
    denied = ("deny", "process-exec*", ("file-mode", "#o4000"), ("file-mode", "#o2000"))
    assert found.index(denied) > found.index(("allow", "process-exec*"))


@pytest.mark.parametrize(("network", "given"), [("none", False), ("full", True)])
def test_the_network_is_there_only_if_it_was_granted(network, given):
    words = command(["true"], folder="/w", cwd="/w", limits=ResourceLimits(network=network))
    found = expressions(words[2])
    assert (allowed("network*", found) == ()) is given
    assert ("READ_" in " ".join(words) and any("resolv.conf" in word for word in words)) is given
    assert ("com.apple.trustd" in words[2]) is given


def test_profile_contains_neither_paths_nor_the_command():
    limits = ResourceLimits(fs_read_roots=(EVIL,), fs_write_roots=(EVIL + "w",))
    words = command(["echo", EVIL], folder=EVIL, cwd=EVIL, limits=limits)
    assert words[:2] == ["/usr/bin/sandbox-exec", "-p"]
    assert "allow default" not in words[2]
    assert [word for word in words[3:] if word.startswith("WRITE_")] == [
        f"WRITE_0={EVIL}",
        f"WRITE_1={EVIL}w",
    ]
    assert f"READ_{len(READ)}={EVIL}" in words
    assert words[-4:] == ["sh", EVIL, "echo", EVIL]


def test_each_parameter_of_the_profile_is_given():
    words = command(["true"], folder="/w", cwd="/w", limits=ResourceLimits(fs_read_roots=("/a", "/b")))
    given = {word.partition("=")[0] for before, word in itertools.pairwise(words) if before == "-D"}
    assert given == set(re.findall(r'\(param "(\w+)"\)', words[2]))


def run_shim(*argv, shell="/bin/sh", cwd="/", **limits):
    """Run the shell script alone; it is the same on every system."""
    words = command(argv, folder="/", cwd=cwd, limits=ResourceLimits(**limits))
    start = words.index("/bin/sh")
    env = {"PATH": "/usr/bin:/bin"}
    return run_program([shell, *words[start + 1 :]], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("shell", [path for path in ("/bin/sh", "/bin/bash") if os.path.exists(path)])
def test_shell_script_sets_limits_and_distinguishes_errors(shell):
    asked = run_shim("sh", "-c", "ulimit -t; ulimit -c; pwd", shell=shell, cwd="/usr", cpu_seconds=6.5)
    assert asked.stdout == "7\n0\n/usr\n"
    assert run_shim("sh", "-c", "exit 5", shell=shell).returncode == 5
    assert run_shim("no-such-command-here", shell=shell).returncode == 127
    assert run_shim("true", shell=shell, cwd="/no/such/folder").returncode == 126
    for word in ("-c", "--", "-a", "--help"):
        taken = run_shim(word, "id", shell=shell)
        assert (taken.returncode, taken.stdout) == (127, "")
        assert word in taken.stderr
    limited = run_shim("sh", "-c", "ulimit -f", shell="/bin/sh", disk_bytes=1 << 20)
    assert limited.stdout == "2048\n"


@pytest.mark.skipif(sys.platform == "darwin", reason="it is not refused there")
async def test_other_platforms_are_rejected_with_the_alternative():
    sandbox = SeatbeltSandbox()
    with pytest.raises(SandboxError, match=r"macOS only.*BubblewrapSandbox"):
        await sandbox.open()
    assert not sandbox.is_open
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.run(["true"])
    await sandbox.close()


def test_unenforced_limits_are_not_claimed():
    enforced = SeatbeltSandbox().limits_enforced
    assert {name for name, holds in enforced.items() if holds} == {"cpu_seconds", "disk_bytes", "network"}
    assert SeatbeltSandbox(ResourceLimits(network="full")).fresh().limits.network == "full"
    with pytest.raises(ValueError, match="'full' or 'none'"):
        SeatbeltSandbox(ResourceLimits(network="loopback"))
