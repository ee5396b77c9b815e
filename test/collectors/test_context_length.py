"""A collector keeps its trajectories within the context of the engine."""

import pytest

from torchrl_agentic import ToolCompose, agent_policy, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.engines import ScriptedEngine, TransformersEngine
from torchrl_agentic.rollout import LockStep
from torchrl_agentic.testing import SimulatedEngine, load_tiny

MODEL, TOKENIZER = load_tiny()
QUESTION = "Tom has 37 pens and buys 12 more. How many pens does he have now?"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "37 + 12"}}\n</tool_call>'


@tool
def python(code: str) -> str:
    """Run code.

    Args:
        code: The code.
    """
    return f"the value of {code} is {'49 ' * 40}"


def ids(key, turn, prompt):
    return [*TOKENIZER.encode(CALL, add_special_tokens=False), TOKENIZER.eos_token_id]


ENGINES = {
    "transformers": lambda size: TransformersEngine(MODEL, TOKENIZER, temperature=0, context_length=size),
    "lock-step": lambda size: LockStep(
        agent_policy(MODEL, TOKENIZER, temperature=0), TOKENIZER, context_length=size
    ),
    "scripted": lambda size: ScriptedEngine(
        ids, context_length=size, stop_token_ids=[TOKENIZER.eos_token_id]
    ),
    "simulated": lambda size: SimulatedEngine(ids, context_length=size),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trajectory_that_fills_the_context_of_the_engine_is_truncated(engine: str):
    task = Task("pens", [{"role": "user", "content": QUESTION}])
    compose = ToolCompose([python])
    size = 260
    collector = AgentCollector(compose, engine=ENGINES[engine](size), tokenizer=TOKENIZER, tasks=[task])
    with collector:
        ((trajectory,),) = collector.trajectories()
    assert trajectory.ledger is not None
    assert (trajectory.reason, trajectory.truncated) == ("max_trajectory_tokens", True)
    assert trajectory.n_calls > 0


@tool
def noise() -> str:
    """Return a mebibyte."""
    return "x" * 2**20


def test_a_result_that_can_never_fit_is_not_encoded_as_a_whole():
    call = '<tool_call>\n{"name": "noise", "arguments": {}}\n</tool_call>'
    engine = ScriptedEngine(lambda key, turn, prompt: call, TOKENIZER, context_length=512)
    task = Task("pens", [{"role": "user", "content": QUESTION}])
    with AgentCollector(ToolCompose([noise]), engine=engine, tokenizer=TOKENIZER, tasks=[task]) as collector:
        ((trajectory,),) = collector.trajectories()
    assert (trajectory.reason, trajectory.truncated) == ("max_trajectory_tokens", True)
    assert trajectory.ledger is not None
    assert len(trajectory.ledger) == 512
    assert trajectory.turns[0].outcome.results[0].text == "x" * 2**20
    assert trajectory.messages[-1].text == "x" * len(trajectory.messages[-1].text)
    assert trajectory.token_drift == 0
