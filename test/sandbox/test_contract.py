"""The local sandboxes keep the promises of `SandboxContract`."""

import warnings

import pytest

from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, Sandbox, UnsafeSubprocessSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.testing import SandboxContract


@pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
class TestBubblewrap(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return BubblewrapSandbox(limits)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
class TestUnsafe(SandboxContract):
    cannot = SandboxContract.CLAIMS

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
