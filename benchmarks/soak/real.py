"""Real time, real sandboxes, vLLM on the CPU, and MCP and HTTP servers that are killed at random."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from soak.accounts import Accounts, Census, CountedEngine
from soak.chaos import Server, chaos, flaky_server, mcp_server
from soak.readings import Reading, descendants, take_last
from soak.watch import Feed, Watch
from torchrl_agentic import (
    HttpTool,
    MCPServerConfig,
    MCPToolset,
    PythonTool,
    RateLimiter,
    ShellTool,
    ToolCompose,
)
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.messages import JSON, ParsedCall, ParseResult, content_text
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.testing import TINY, load_tiny, tiny_questions
from torchrl_agentic.testing.servers import demo_mcp

GROUPS_PER_BATCH = 4
TRAJECTORY_TIMEOUT_S = 60.0
IN_FLIGHT = 12
ENGINE_ARGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "max_model_len": 1024}
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # without the tools, whose descriptions are longer than the context of the tiny model
COUNT = """
seen = globals().setdefault("seen", [])
seen.append({key!r})
print(seen.count({key!r}), {key!r})
"""
PYTHON = (
    "import time; time.sleep(60)",
    "import os; os._exit(3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "raise SystemExit(1)",
    "print('x' * 500_000)",
    "1 / 0",
    "import subprocess; subprocess.Popen(['sleep', '1000'])",
    "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "open('f', 'w').write('x' * 100_000)",
    "kept = bytearray(20_000_000); len(kept)",
    "open('/proc/self/fd/0').read",
)
SHELL = (
    "sleep 60",
    "sleep 1000 &",
    "yes | head -c 400000",
    "kill -9 $$",
    "echo x >> log; wc -l < log",
    "exit 7",
    "mkdir -p a/b/c && ls -R",
    "head -c 2000000 /dev/zero > zeros",
)
PATHS = ("ok", "ok", "ok", "error", "cut", "refuse", "slow", "hang", "big", "nonsense")


class Drawn(ToolCallParser):
    """Reads any message as calls that are drawn at random, since the model knows one tool only.

    Args:
        seed: Seed of what is drawn.
        url: Address of the HTTP server.
    """

    name: ClassVar[str] = "drawn"

    def __init__(self, seed: int, url: str) -> None:
        super().__init__()
        self._seed, self._url, self._numbers = seed, url, itertools.count()

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Draw the calls of a message.

        Args:
            response: The message.
            tools: Ignored.
            turn: Number of the turn.
        """
        text = response if isinstance(response, str) else content_text(response.get("content"))
        number = next(self._numbers)
        rng = random.Random(f"{self._seed} {number}")
        if turn >= rng.choice([0, 1, 2, 3, 3, 4]):
            return ParseResult(text, (), text)
        count = rng.choice([1, 1, 2, 3])
        spans = [(index * len(text) // count, (index + 1) * len(text) // count) for index in range(count)]
        calls = [
            ParsedCall(*self._draw(rng, f"k{number}.{index}"), f"call_{turn}_{index}", index=index, span=span)
            for index, span in enumerate(spans)
        ]
        return ParseResult("", tuple(calls), text)

    def _draw(self, rng: random.Random, key: str) -> tuple[str, dict[str, JSON]]:
        """Return the name and the arguments of a call."""
        kind = rng.choices(
            ["count", "python", "shell", "http", "echo", "die", "web_echo", "web_count", "unknown", "bad"],
            [30, 8, 12, 14, 12, 1, 10, 6, 1, 1],
        )[0]
        match kind:
            case "count":
                return "python", {"code": COUNT.format(key=key)}
            case "python":
                return "python", {"code": rng.choice(PYTHON)}
            case "shell":
                return "shell", {"command": rng.choice(SHELL)}
            case "http":
                return "http", {"url": f"{self._url}/{rng.choice(PATHS)}?{key}"}
            case "echo" | "web_echo":
                return ("pipe_echo" if kind == "echo" else kind), {"text": key}
            case "die":
                return "pipe_die", {}
            case "web_count":
                return kind, {}
            case "unknown":
                return "nothing", {}
            case _:
                return "python", {"program": 1}

    def render_call(self, call: ParsedCall) -> str:
        """Write nothing."""
        del call
        return ""


class RealAccounts(Accounts):
    """Also checks that code ran once in its own interpreter, and that answers belong to their calls."""

    def turn(self, turn: Any) -> None:
        """Enter a turn."""
        super().turn(turn)
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=False):
            if result.is_error:
                continue
            code = str(call.args.get("code", ""))
            if "seen.append(" in code:
                key = code.partition("seen.append('")[2].partition("'")[0]
                if result.text.split() != ["1", key]:
                    self.fault(f"{turn.trajectory}: code {key} answered {result.text[:80]!r}")
            text = call.args.get("text")
            if isinstance(text, str) and text not in result.text:
                self.fault(f"{turn.trajectory}: echo of {text} answered {result.text[:80]!r}")


class RealWorld:
    """Engine, tools and servers.

    Args:
        engine: The engine.
        engine_pids: Ids of its processes.
        seed: Seed of what is drawn.
        flaky_port: Port of the HTTP server.
        mcp_port: Port of the MCP server.
    """

    def __init__(
        self, engine: Any, engine_pids: Collection[int], seed: int, flaky_port: int, mcp_port: int
    ) -> None:
        self.accounts = RealAccounts()
        self.engine_pids = engine_pids
        self.tokenizer = load_tiny()[1]
        self.engine = CountedEngine(engine, self.accounts, self.tokenizer.eos_token_id)
        self.rng = random.Random(seed)
        self.questions = tiny_questions(200, seed=seed)
        self.limiters = {
            "python": RateLimiter(max_concurrent=4),
            "shell": RateLimiter(max_concurrent=3),
            "http": RateLimiter(max_concurrent=6, rate_per_second=50),
        }
        self.seed, self._flaky_port, self._mcp_port = seed, flaky_port, mcp_port

    def task_of(self, number: int) -> Any:
        """Return a task; a few rows are none."""
        if number % 97 == 96:
            return {"nothing": number}
        question = self.questions[number % len(self.questions)]
        return Task(str(number), [{"role": "user", "content": question["query"]}], answer=question["answer"])

    def reward(self, trajectory: Any) -> float:
        """Return a number; fail now and then."""
        if self.rng.random() < 0.02:
            raise ValueError("the judge is down")
        self.accounts.reward(trajectory)
        return self.rng.random()

    def collector(self, feed: Feed, name: str) -> AgentCollector:
        """Return a collector of this world.

        Args:
            feed: Its tasks.
            name: Last part of the names of its trajectories.
        """
        url = f"http://127.0.0.1:{self._flaky_port}"
        http = HttpTool(
            allowed_hosts=[f"127.0.0.1:{self._flaky_port}"], ports=None, timeout=3.0, output_max_chars=200
        )
        compose = ToolCompose(
            [
                PythonTool(timeout=3.0, output_max_chars=200),
                ShellTool(output_max_chars=200),
                http,
                Census(self.accounts),
            ],
            Drawn(self.seed, url),
            per_call_timeout=6.0,
            rate_limits=self.limiters,
            recorder=self.accounts.turn,
        )
        self.compose = compose
        compose.add_toolset(
            MCPToolset(demo_mcp.config(name="pipe"), name_prefix="pipe_", tools=["echo", "die"])
        )
        web = MCPServerConfig(
            url=f"http://127.0.0.1:{self._mcp_port}/mcp", transport="streamable_http", name="web"
        )
        compose.add_toolset(
            MCPToolset(
                web, name_prefix="web_", tools=["echo", "count"], sessions="trajectory", start_timeout=5.0
            )
        )
        return AgentCollector(
            compose,
            engine=self.engine,
            tokenizer=self.tokenizer,
            tasks=feed,
            group_size=3,
            groups_per_batch=GROUPS_PER_BATCH,
            max_in_flight=IN_FLIGHT,
            max_turns=5,
            max_new_tokens=48,
            max_trajectory_tokens=1000,
            reward=self.reward,
            trajectory_timeout=TRAJECTORY_TIMEOUT_S,
            max_replacements=1,
            name=name,
            failure_hook=self.accounts.failed,
            max_failures=None,
            tokenizer_options={
                "max_tool_response_tokens": 60,
                "template_kwargs": {"chat_template": TEMPLATE},
            },
        )

    def gauges(self) -> dict[str, int]:
        """Return what must be 0 while the collector is idle."""
        found: dict[str, int] = {}
        for name, limiter in self.limiters.items():
            stats = limiter.stats()
            found |= {f"slots of {name}": stats.in_flight, f"waiting calls of {name}": stats.waiting}
        return found


def run(
    world: RealWorld, servers: Sequence[Server], folder: Path, name: str, *, seconds: float, period_s: float
) -> tuple[Watch, Reading]:
    """Run one collector from its begin to its end.

    Args:
        world: Engine and tools.
        servers: The servers, which are killed at random meanwhile.
        folder: Where the program creates its temporary folders.
        name: Last part of the names of its trajectories.
        seconds: Seconds after which the tasks end.
        period_s: Seconds between two readings.

    Returns:
        The readings, and another one after the collector was closed.
    """
    accounts = world.accounts
    feed = Feed(accounts, world.task_of)
    watch = Watch(
        f"{seconds / 60:g} real minutes",
        accounts,
        feed,
        folder,
        groups_per_batch=GROUPS_PER_BATCH,
        idle_limit_s=8 * TRAJECTORY_TIMEOUT_S,
        gauges=world.gauges,
        engine=world.engine_pids,
    )
    weights = dict(load_tiny()[0].state_dict())
    for server in servers:
        server.wait()
    with world.collector(feed, name) as collector, chaos(servers, world.seed) as kills:
        watching = event_loop.submit(watch.run(collector, seconds=seconds, period_s=period_s))
        for batch in collector:
            accounts.batch(batch)
            threading.Event().wait(world.rng.uniform(0, 2))  # training
            noisy = {key: value + 1e-4 * torch.randn_like(value) for key, value in weights.items()}
            collector.update_policy_weights_(noisy if world.rng.random() < 0.5 else None)
        watching.result()
        watch.check(collector)
    world.compose.close()  # its tools outlive a collector
    print(f"servers were killed {kills[0]} times", flush=True)
    del collector, watching, batch, feed
    return watch, event_loop.run(take_last(seconds, folder, world.engine_pids))


def soak_real(folder: Path, *, seconds: float, seed: int = 0) -> list[str]:
    """Run for so many seconds, after a short run that fills what is kept on purpose.

    Args:
        folder: Where the program creates its temporary folders.
        seconds: Seconds.
        seed: Seed of what is drawn.

    Returns:
        A line for each thing that is wrong.
    """
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", TORCH_COMPILE_DISABLE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from torchrl_agentic.engines import VLLMEngine

    engine = VLLMEngine.from_model(TINY, engine_args=ENGINE_ARGS, weights_parent=folder)
    pids = descendants(os.getpid())
    flaky, mcp = servers = flaky_server(), mcp_server()
    try:
        first = RealWorld(engine, pids, seed + 1, flaky.port, mcp.port)
        before = run(first, servers, folder, "first", seconds=min(60.0, seconds / 4), period_s=30.0)[1]
        del first  # its tools and limiters would count as left over; the readings refer to them, too
        world = RealWorld(engine, pids, seed, flaky.port, mcp.port)
        period_s = max(20.0, seconds / 30)
        watch, after = run(world, servers, folder, "soak", seconds=seconds, period_s=period_s)
        return watch.verdict(before, after)
    finally:
        for server in servers:
            server.kill()
        event_loop.run(engine.close())
