"""
6 · Services and cluster limits
===============================

Code that a model writes can run in a sandbox service that many workers share. This tutorial starts such a
service on this machine, calls it, and runs rollouts on two Ray workers that share one limit.
"""

# %%
# A sandbox service
# -----------------
# The command for it is ``torchrl-agentic serve sandbox --port 8080``. Here it is a process that ends with
# this program. It implements the protocol of Sandbox Fusion, so any service with that protocol can replace
# it.
import contextlib
import time

from torchrl_agentic.testing.servers.embedded import serving

stack = contextlib.ExitStack()
url = stack.enter_context(serving("torchrl_agentic.serve.sandbox_app:sandbox_app"))

# %%
# The tool and its client
# -----------------------
# A model calls `SandboxFusionTool`. Rewards can use the client directly, and both share one limit. Each way
# in which a run can end has its own outcome; errors of the service itself are kept apart.
import asyncio

from torchrl_agentic.tools.sandbox_fusion import SandboxFusionClient


async def by_hand() -> None:
    async with SandboxFusionClient(url) as client:
        for code in ("print(6 * 7)", "print('so far'); 1 / 0", "while True: pass"):
            run = await client.run_code(code, run_timeout=1)
            print(f"{code!r}: {run.outcome}, {run.stdout!r}, exit code {run.exit_code}")


asyncio.run(by_hand())

# %%
# A rollout
# ---------
# The tool goes into a `ToolCompose` like any other. ``rate_limit`` bounds the number of concurrent calls of
# all processes that use this service. A scripted policy replaces the model.
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, SandboxFusionTool, ToolCompose

ROWS, LIMIT = 4, 3


def rollout(url: str) -> list[list[str]]:
    """Let four rows make two calls each; return what each prints: its result, its start and its end.

    A call that lost its slot, as happens on a very busy machine, printed nothing.
    """
    from torchrl_agentic.testing import ScriptedPolicy

    call = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "%s"}}</tool_call>'
    code = "import time; began = time.time(); time.sleep(0.3); print({sum}, began, time.time())"
    script = [
        [call % code.format(sum=f"{row} + {turn}") for turn in range(2)] + ["Done."] for row in range(ROWS)
    ]
    turns = []
    tool = SandboxFusionTool(url, rate_limit=LIMIT)
    compose = ToolCompose([tool], parser="hermes", recorder=turns.append)
    env = TransformedEnv(
        ChatEnv(batch_size=(ROWS,)), Compose(compose, EndTrajectory(when_no_calls=True, max_turns=3))
    )
    policy = ScriptedPolicy(script)
    td = env.reset(TensorDict({"query": ["Add."] * ROWS}, batch_size=(ROWS,)))
    for _ in range(3):
        step = env.step(policy(td))
        td = env.step_mdp(step)
    env.close()
    results = [result for turn in turns for result in turn.outcome.results]
    return [[] if result.is_error else result.text.split() for result in results]


# %%
# Two workers, one limit
# ----------------------
# With Ray, the limit holds for the whole cluster: a named actor grants leases, so workers do not have to ask
# it for each call, and the share of a worker that dies becomes free after two seconds.
import ray

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
began = time.time()
workers = [ray.remote(num_cpus=1)(rollout).remote(url) for _ in range(2)]
results = [result for found in ray.get(workers) for result in found]
ray.shutdown()
ran = [(text, float(start), float(end)) for text, start, end in filter(None, results)]
print(
    f"{len(results)} calls of two workers in {time.time() - began:.1f} s:",
    sorted({text for text, _, _ in ran}),
)

# %%
# The number of programs that ran at once never exceeded the limit:
events = sorted([(start, 1) for _, start, _ in ran] + [(end, -1) for _, _, end in ran])
at_once, most = 0, 0
for _, change in events:
    at_once += change
    most = max(most, at_once)
print("most programs at once:", most)
assert len(results) == 2 * 2 * ROWS
assert most <= LIMIT

# %%
# More
# ----
# - ``ClusterRateLimiter("name", max_concurrent=…, rate_per_second=…)`` protects any service in this way;
#   without Ray, the processes of one machine share it. ``stats()`` returns its current state.
# - All workers slow down when a service answers 429 or 503. After repeated failures they stop calling it
#   for a while.
# - ``torchrl-agentic check load --tool sandbox_fusion --concurrency 16`` measures the capacity of a service.
# - ``SearchTool`` and ``torchrl-agentic serve search FOLDER`` do the same for search in documents.
stack.close()
