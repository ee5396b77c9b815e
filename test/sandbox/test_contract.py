"""The local sandboxes pass `SandboxContract`; test_other_user.py runs this file as another user."""

import warnings

import pytest

from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ForkServerSandbox,
    LandlockSandbox,
    ResourceLimits,
    Sandbox,
    UnsafeSubprocessSandbox,
)
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.landlock import why_not as no_landlock
from torchrl_agentic.testing import SandboxContract


@pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
class TestBubblewrap(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return BubblewrapSandbox(limits)


@pytest.mark.skipif(cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}")
class TestForkServer(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return ForkServerSandbox(limits)


@pytest.mark.skipif(no_landlock() is not None, reason=f"Landlock does not work here: {no_landlock()}")
class TestLandlock(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return LandlockSandbox(limits)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
class TestUnsafe(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return UnsafeSubprocessSandbox(limits)


async def test_the_unsafe_one_warns_each_time_it_opens():
    sandbox = UnsafeSubprocessSandbox()
    for _ in range(2):
        with pytest.warns(UserWarning, match="all your rights"):
            await sandbox.open()
        await sandbox.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UnsafeSubprocessSandbox()
