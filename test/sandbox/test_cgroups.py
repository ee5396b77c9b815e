"""Control groups bound what all processes of a sandbox take together, where they can be made."""

import pytest

from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, cgroups
from torchrl_agentic.sandbox.bubblewrap import why_not

works = pytest.mark.skipif(
    cgroups.why_not() is not None or why_not() is not None, reason=f"{cgroups.why_not() or why_not()}"
)
SEVERAL = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        data = bytearray(b'x') * (80 << 20); time.sleep(2); print('held', flush=True); os._exit(0)
for _ in range(5): os.wait()
"""


@works
async def test_several_processes_together_are_killed_over_the_limit_that_each_keeps():
    limits = ResourceLimits(memory_total_bytes=200 << 20, memory_bytes=200 << 20)
    async with BubblewrapSandbox(limits) as sandbox:
        assert sandbox.limits_enforced["memory_total"]
        result = await sandbox.run([*sandbox.python_argv, "-c", SEVERAL])
        assert result.stdout.count("held") < 5
        assert (await sandbox.run(["echo", "still"])).stdout == "still\n"


@works
async def test_the_group_is_gone_after_close():
    sandbox = BubblewrapSandbox()
    await sandbox.open()
    folder = sandbox._group._folder
    await sandbox.run(["true"])
    assert folder.exists()
    await sandbox.close()
    assert not folder.exists()


def test_without_groups_the_limit_is_reported_as_not_enforced(monkeypatch):
    monkeypatch.setattr(cgroups, "why_not", lambda: "no")
    assert not BubblewrapSandbox().limits_enforced["memory_total"]


def test_a_group_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(cgroups, "_hierarchy", lambda: None)
    with pytest.raises(PermissionError):
        cgroups.MemoryGroup(1 << 20)
