"""What code does to its own sandbox is a result of its call: it is never counted as the infrastructure's."""

import pytest
from helpers.chat_envs import begin, call, chat_env, flags, results, step

from torchrl_agentic import PythonTool, ShellTool, ToolCompose
from torchrl_agentic.repl import ForkServerRepl, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, LandlockSandbox
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.landlock import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cannot_work() is not None, reason=str(cannot_work())),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
SANDBOXES = {"forkserver": ForkServerSandbox, "bubblewrap": BubblewrapSandbox, "landlock": LandlockSandbox}
CELLS = [
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.kill(-1, 9)",
    "import os, signal; signal.signal(14, lambda *_: os.kill(os.getpid(), 9)); signal.setitimer(0, 0.05)",
]
COMMANDS = ["kill -9 $PPID", "kill -9 -1", "kill -9 0", "kill -9 $$"]


@pytest.mark.parametrize("kind", SANDBOXES)
def test_calls_that_kill_their_worker_are_not_infra(kind: str):
    sandbox = SANDBOXES[kind]()
    repl = (ForkServerRepl if kind == "forkserver" else SubprocessRepl)(sandbox)
    env = chat_env((1,), ToolCompose([PythonTool(repl), ShellTool(sandbox)], "hermes"))
    td = begin(env)
    for attack in [
        *(call("python", code=code) for code in CELLS),
        *(call("shell", command=command) for command in COMMANDS),
    ]:
        for message in (
            attack,
            call("python", code="import time; time.sleep(0.2)"),
            call("python", code="40 + 2"),
        ):
            stepped = step(env, td, message)
            assert flags(stepped["next"], "n_infra") == [0], message
            td = stepped["next"]
        assert "42" in results(td)[-1], attack
    env.close()
