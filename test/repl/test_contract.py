"""All interpreters pass `ReplContract`."""

import pytest

from torchrl_agentic.repl import ForkServerRepl, Repl, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, LandlockSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.landlock import why_not as no_landlock
from torchrl_agentic.testing import ReplContract


@pytest.mark.skipif(cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}")
class TestForkServer(ReplContract):
    def make(self) -> Repl:
        return ForkServerRepl()


@pytest.mark.skipif(cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}")
class TestSecondInterpreterInAForkServersSandbox(ReplContract):
    def make(self) -> Repl:
        return SubprocessRepl(ForkServerSandbox())


@pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
class TestSubprocess(ReplContract):
    def make(self) -> Repl:
        return SubprocessRepl(BubblewrapSandbox())


@pytest.mark.skipif(no_landlock() is not None, reason=f"Landlock does not work here: {no_landlock()}")
class TestSubprocessWithoutNamespaces(ReplContract):
    def make(self) -> Repl:
        return SubprocessRepl(LandlockSandbox())
