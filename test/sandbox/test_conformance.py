"""The cases themselves: each can fail, reports what failed, and is skipped only with a reason."""

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from torchrl_agentic.repl.repl_cases import CASES as OF_INTERPRETERS
from torchrl_agentic.sandbox import ResourceLimits, UnsafeSubprocessSandbox
from torchrl_agentic.sandbox.base import THREATS
from torchrl_agentic.sandbox.conformance import CASES, Case, check
from torchrl_agentic.sandbox.conformance.base import CaseGroup

pytestmark = pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
HARMLESS = """
protocol: a folder that is a link leads to nothing of the hosts
filesystem: files of the host cannot be read
filesystem: files and services of the host are out of sight
filesystem: paths of the host are hidden
filesystem: temporary files of the host are not those inside
filesystem: paths through proc lead to no other root
filesystem: files that others have open are out of reach
filesystem: two sandboxes share no terminals
leftovers: daemons end with their command
leftovers: a killed trainer leaves no processes
process: processes of the host are out of sight
process: no process in sight has the environment of the trainer
process: two sandboxes are out of each others sight
process: two sandboxes share no system v objects
process: two sandboxes share no message queues
process: two sandboxes share no memory by name
rights: no namespace can be made
rights: keyrings cannot be used
rights: parts of the kernel that only attacks need are denied
rights: other numbers of system calls lead no further
network: tcp services of the host are out of reach
network: datagrams do not arrive at the host
network: sockets of the host are out of reach by path
network: abstract sockets of the host are out of reach
network: interfaces and connections of the host are out of sight
network: a call cannot widen the network
limits: memory of a process is bounded
limits: processes are bounded
limits: threads are bounded
limits: the size of a file is bounded
""".strip().splitlines()
"""Cases whose attacks do no harm on a machine without protection."""


def named(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


@pytest.mark.parametrize("name", HARMLESS)
async def test_a_case_fails_where_nothing_stops_its_attack(name: str, monkeypatch: pytest.MonkeyPatch):
    """Otherwise it would prove nothing about sandboxes that pass."""
    monkeypatch.setattr("torchrl_agentic.sandbox.conformance.host_cases.END_S", 1.0)  # they never end
    case = named(name)
    if reason := case.skip_reason(Undeclared()):
        pytest.skip(reason)
    with pytest.raises(AssertionError):
        await case.run(Undeclared)


async def test_an_open_file_is_attacked_in_a_host_that_has_many_open():
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(open(os.devnull))
        with pytest.raises(AssertionError):
            await named("filesystem: files that others have open are out of reach").run(Undeclared)


@pytest.mark.skipif(not os.path.exists("/proc/sysvipc"), reason="no System V objects to be seen here")
async def test_nothing_is_left_of_a_case_whose_attack_succeeded():
    def objects() -> list[str]:
        return [Path("/proc/sysvipc", kind).read_text() for kind in ("shm", "sem", "msg")]

    before = objects()
    with pytest.raises(AssertionError):
        await named("process: two sandboxes share no system v objects").run(Undeclared)
    assert objects() == before


class Undeclared(UnsafeSubprocessSandbox):
    """The unsafe sandbox, as if it stopped all threats and enforced its limits."""

    not_stopped: ClassVar[frozenset[str]] = frozenset()

    @property
    def limits_enforced(self) -> dict[str, bool]:
        return dict.fromkeys(super().limits_enforced, True)


def test_the_sentences_are_many_and_no_two_are_alike():
    cases = (*CASES, *OF_INTERPRETERS)
    assert len(cases) >= 80
    assert len({str(case) for case in cases}) == len(cases)
    assert {case.threat for case in cases} == {None, *THREATS}


def test_a_case_is_left_out_only_for_a_reason():
    assert "host_files" in (named(HARMLESS[0]).skip_reason(UnsafeSubprocessSandbox()) or "")
    assert named(HARMLESS[0]).skip_reason(Undeclared()) is None
    assert named(HARMLESS[0]).skip_reason(Undeclared(), {"host_files"}) == "cannot be tested here: host_files"
    total = named("limits: all files together are bounded")
    declared_total = type("Small", (Undeclared,), {"limits_enforced": {"disk_total": False}})
    assert "does not enforce disk_total: it isolates nothing" in (total.skip_reason(declared_total()) or "")


async def test_outcomes_name_the_failure_and_its_reason():
    group = CaseGroup("here")

    @group.case()
    async def it_has_a_message(sandbox: UnsafeSubprocessSandbox) -> None:
        raise AssertionError("first line\nsecond line")

    @group.case("network")
    async def it_is_declared(sandbox: UnsafeSubprocessSandbox) -> None:
        raise AssertionError

    @group.factory_case()
    async def it_is_broken(make: object) -> None:
        raise ZeroDivisionError("by 0")

    @group.case(limits=ResourceLimits(wall_seconds=5))
    async def it_holds(sandbox: UnsafeSubprocessSandbox) -> None:
        assert sandbox.limits.wall_seconds == 5

    seen: list[object] = []
    outcomes = await check(UnsafeSubprocessSandbox, group.cases, on_outcome=seen.append)
    assert seen == outcomes
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [
        ("failed", "first line"),
        ("excused", "unsafe does not stop this threat: network"),
        ("failed", "ZeroDivisionError: by 0 (await self.body(make))"),
        ("passed", ""),
    ]
    assert str(outcomes[0].case) == "here: it has a message"


async def test_a_case_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchrl_agentic.sandbox.conformance.base.CASE_S", 0.05)
    case = replace(CASES[0], body=lambda make: asyncio.Event().wait())
    with pytest.raises(AssertionError, match="longer than"):
        await case.run(UnsafeSubprocessSandbox)


def test_unknown_claim_is_rejected():
    with pytest.raises(ValueError, match="unknown threat 'magic'; expected one of host_files"):
        CaseGroup("here").case("magic")(lambda sandbox: asyncio.sleep(0))
