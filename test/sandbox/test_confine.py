"""Signals do not disturb the process that answers for confined ones."""

import os
import select
import types

import pytest

from torchrl_agentic.sandbox.inside import confine, seccomp_notify
from torchrl_agentic.sandbox.landlock import why_not

works = pytest.mark.skipif(why_not() is not None, reason=f"Landlock does not work here: {why_not()}")


class InterruptedPoll:
    """A poll whose first result is an error, as poll(2) reports when a signal interrupts the kernel."""

    def __init__(self):
        self.real = REAL_POLL()
        self.register, self.unregister = self.real.register, self.real.unregister
        self.looks = 0

    def poll(self):
        self.looks += 1
        found = self.real.poll()
        return [(fd, select.POLLERR) for fd, _ in found] if self.looks == 1 else found


REAL_POLL = getattr(select, "poll", None)


@works
def test_a_signal_that_comes_during_a_look_at_the_gate_does_not_shut_it(monkeypatch):
    awake, wake = os.pipe()
    asked, ask = os.pipe()
    told = []
    gate = types.SimpleNamespace(fd=asked, answer=lambda: told.append(os.read(asked, 1)))
    os.write(ask, b"?")
    monkeypatch.setattr(confine.select, "poll", InterruptedPoll)
    try:
        confine._supervise(0, gate, awake, told)
    finally:
        for fd in (awake, wake, asked, ask):
            os.close(fd)
    assert told == [b"?"]


@works
def test_an_answer_that_a_signal_interrupts_is_given_again(monkeypatch):
    calls = []

    def ioctl(fd, request, argument):
        calls.append(request)
        if len(calls) == 2:
            raise InterruptedError

    monkeypatch.setattr(seccomp_notify.fcntl, "ioctl", ioctl)
    seccomp_notify.SeccompNotify(-1, [], None).answer()
    receive, *sends = calls
    assert len(sends) == 2
    assert receive != sends[0] == sends[1]
