"""The table of system calls, and the filters that are made of it, run by an interpreter of classic BPF."""

import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.sandbox import seccomp
from torchrl_agentic.sandbox.seccomp import NETWORK, notify_program, program
from torchrl_agentic.sandbox.system_calls import MACHINES, TABLE, numbers

ALLOW, KILL, ASK, REFUSE = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = (REFUSE | number for number in (1, 38, 97))
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMED = {name for calls in TABLE for name in {**calls.of("x86_64"), **calls.of("aarch64")}}
CHECKED = {name for calls in TABLE if calls.verdict == "checked" for name in calls.of("x86_64")}
machines = pytest.mark.parametrize("machine", MACHINES)


def verdict(filter_, machine, number, *arguments):
    """Run a filter over `struct seccomp_data`, as bpf(2) of old would."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, ARCHITECTURES[machine], 0, *(word % (1 << 64) for word in words))
    code = list(struct.iter_unpack("<HBBI", filter_))
    at = loaded = 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x54:
                loaded &= value
            case 0x06:
                return value
            case _:
                holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
                at += if_true if holds else if_false


@machines
def test_every_syscall_gets_the_action_of_the_table(machine):
    expected = {
        number: {"allowed": ALLOW, "denied": EPERM}.get(calls.verdict)
        for calls in TABLE
        for number in calls.of(machine).values()
    }
    for number in range(600):
        found = verdict(program(machine=machine), machine, number)
        assert found == expected.get(number, ENOSYS) or expected.get(number, 0) is None, number


@machines
def test_a_name_is_in_one_group_and_a_number_has_one_name(machine):
    names = [name for calls in TABLE for name in calls.of(machine)]
    assert len(names) == len(set(names)) == len(set(numbers(machine).values()))


@machines
def test_all_that_is_checked_has_a_check_and_the_filter_is_not_too_long(machine):
    assert set(seccomp._checks((), False, 6, True)) == CHECKED
    assert len(program(families=NETWORK, enters=True, landlock=1, machine=machine)) // 8 < 4096


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the header is that of x86-64")
def test_the_table_has_every_call_of_the_header_of_this_system():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the headers of the kernel are not installed")
    found = {name: int(number) for name, number in re.findall(r"__NR_(\w+)\s+(\d+)", header.read_text())}
    assert {name: numbers("x86_64").get(name) for name in found} == found


@machines
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_another_architecture_is_killed_and_other_numbers_do_not_exist(machine, number, arguments):
    other = next(one for one in MACHINES if one != machine)
    assert verdict(program(machine=machine), other, number - 2**31, *arguments) == KILL
    if number not in numbers(machine).values():
        signed = number - 2**32 if number >= 2**31 else number
        assert verdict(program(machine=machine), machine, signed, *arguments) == ENOSYS


@machines
@given(st.sampled_from(sorted(CHECKED)), st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_only_low_halves_of_arguments_count(machine, name, arguments):
    number = numbers(machine).get(name)
    if number is not None:
        filter_ = program(families=NETWORK, landlock=1, machine=machine)
        low = [word % (1 << 32) for word in arguments]
        assert verdict(filter_, machine, number, *arguments) == verdict(filter_, machine, number, *low)


@machines
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (17,), ALLOW),
        ("clone", (0x10000000 | 17,), EPERM),
        ("clone3", (1, 88), ENOSYS),
        ("setns", (3, 0x10000000), EPERM),
        ("setns", (3, 0), EPERM),
        ("socket", (1, 1), EAFNOSUPPORT),
        ("socketpair", (1, 2), ALLOW),
        ("socketpair", (2, 1), EAFNOSUPPORT),
        ("socketpair", (16, 3), EAFNOSUPPORT),
        ("ioctl", (0, 0x5412), EPERM),
        ("ioctl", (0, 0x541C), EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("fcntl", (0, 1026), EPERM),
        ("fcntl", (0, 1024, 1), EPERM),
        ("fcntl", (0, 1040, 1), EPERM),
        ("fcntl", (0, 1031, 1 << 20), EPERM),
        ("sendmsg", (3, 1), EPERM),
        ("sendmmsg", (3, 1, 1), EPERM),
        ("timer_create", (1,), ENOSYS),
        ("fcntl", (0, 8, 1), ALLOW),
        ("mmap", (0, 4096, 3, 0x40022), EPERM),
        ("mmap", (0, 4096, 3, 0x22), ALLOW),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), EPERM),
        ("prlimit64", (7, 7), ALLOW),
        ("sched_setscheduler", (0, 5), ALLOW),
        ("sched_setscheduler", (1, 5), EPERM),
        ("sched_setscheduler", (7, 5), ALLOW),
        ("setpriority", (0, 0, 5), ALLOW),
        ("setpriority", (0, 1, 5), EPERM),
        ("setpriority", (1, 0, 5), EPERM),
        ("ioprio_set", (1, 0, 5), ALLOW),
        ("setpriority", (0, 7, 5), ALLOW),
        ("setpriority", (2, 0, 5), EPERM),
        ("ioprio_set", (1, 1, 5), EPERM),
        ("seccomp", (1, 0), ALLOW),
        ("seccomp", (1, 1 << 3), EPERM),
        ("seccomp", (1, 1 << 3 | 1), EPERM),
        ("truncate", (0, 0), ALLOW),
        ("pidfd_send_signal", (3, 9), ALLOW),
    ],
)
def test_arguments_decide(machine, name, arguments, expected):
    assert verdict(program(machine=machine), machine, numbers(machine)[name], *arguments) == expected


@machines
@pytest.mark.parametrize(
    ("options", "name", "arguments", "expected"),
    [
        ({"families": NETWORK}, "socket", (2, 1), ALLOW),
        ({"families": NETWORK}, "socket", (16, 3), EAFNOSUPPORT),
        ({"families": NETWORK}, "sendmsg", (3, 1), ALLOW),
        ({"enters": True}, "setns", (3, 0x10000000), ALLOW),
        ({"enters": True}, "setns", (3, 0), EPERM),
        ({"landlock": 5}, "socketpair", (1, 2), EPERM),
        ({"has_namespaces": False}, "socketpair", (1, 2 | 0o2000000), EPERM),
        ({"has_namespaces": False}, "socketpair", (1, 1 | 0o2000000), ALLOW),
        ({"has_namespaces": False}, "sched_setscheduler", (0, 5), ALLOW),
        ({"has_namespaces": False}, "sched_setscheduler", (7, 5), EPERM),
        ({"has_namespaces": False}, "setpriority", (0, 7, 5), EPERM),
        ({"landlock": 5}, "pidfd_send_signal", (3, 9), EPERM),
        ({"landlock": 5}, "fcntl", (0, 8, 1), EPERM),
        ({"landlock": 5}, "ioctl", (0, 0x8902), EPERM),
        ({"landlock": 2}, "truncate", (0, 0), ALLOW),
        ({"landlock": 2, "has_namespaces": False}, "truncate", (0, 0), EPERM),
        ({"landlock": 3, "has_namespaces": False}, "truncate", (0, 0), ALLOW),
    ],
)
def test_options_open_and_close(machine, options, name, arguments, expected):
    assert (
        verdict(program(machine=machine, **options), machine, numbers(machine)[name], *arguments) == expected
    )


@machines
@pytest.mark.parametrize(("landlock", "asked"), [(6, False), (5, True)])
def test_the_gate_is_asked_about_new_processes_and_about_signals_that_landlock_does_not_scope(
    machine, landlock, asked
):
    filter_, starts = notify_program(landlock=landlock, machine=machine)
    known = numbers(machine)
    assert {known[name] for name in ("clone", "fork", "vfork") if name in known} == set(starts)
    for name, number in known.items():
        signal = name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
        wanted = ASK if number in starts or (asked and signal) else ALLOW
        assert verdict(filter_, machine, number) == wanted


def test_a_processor_that_is_not_known_has_no_filter():
    assert program(machine="riscv64") is None
    assert numbers("riscv64") == {}
