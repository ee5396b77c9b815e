"""What tools say of calls and trajectories becomes the reward of turns, ends or tokens."""

import contextlib
import json

import pytest
import torch
from helpers.chat_envs import dataset_env
from helpers.model_families import FAMILIES
from helpers.token_rollouts import Rollout, Says
from torchrl.envs import Compose, StepCounter, TransformedEnv, check_env_specs
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import (
    EndTrajectory,
    Tool,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    TurnTokenizer,
)
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.transforms.history import require_list_to_stack

require_list_to_stack()


class Scored(Tool):
    """The reward of a call is its argument, that of the trajectory 10."""

    name, description = "score", "Score."
    input_schema = {"type": "object", "properties": {"n": {"type": "number"}}}  # noqa: RUF012  a constant

    def session(self, trajectory):
        return _one(Scored())

    async def run(self, args, ctx):
        return ToolResult.from_value("scored", reward=args["n"])

    async def final_reward(self):
        return 10.0


@contextlib.asynccontextmanager
async def _one(tool):
    yield tool


def score(*numbers):
    return "".join(
        f"<tool_call>{json.dumps({'name': 'score', 'arguments': {'n': number}})}</tool_call>"
        for number in numbers
    )


def env_of(*behind, rows=2, before=()):
    compose = ToolCompose([Scored()])
    return TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(compose, *before, *behind))


def rewards(env, script, turns):
    from tensordict import TensorDict

    policy = ScriptedPolicy(script)
    td = env.reset(TensorDict({"query": ["q"] * len(script)}, batch_size=(len(script),)))
    found = []
    for _ in range(turns):
        td = env.step(policy(td))
        found.append(td["next", "reward"].flatten().tolist())
        td = env.step_mdp(td)
    env.close()
    return found


SCRIPT = [[score(1, 2), score(4), "done"], [score(0.5), "done", "more"]]


def test_each_turn_has_the_reward_of_its_calls_and_the_last_one_that_of_the_trajectory():
    env = env_of(EndTrajectory(when_no_calls=True), ToolRewardTransform())
    assert rewards(env, SCRIPT, 2) == [[3.0, 0.5], [4.0, 10.0]]
    env = env_of(EndTrajectory(when_no_calls=True), ToolRewardTransform(), rows=1)
    assert rewards(env, SCRIPT[:1], 3) == [[3.0], [4.0], [10.0]]


def test_last_step_has_the_sum_of_all_rewards():
    env = env_of(EndTrajectory(when_no_calls=True), ToolRewardTransform(place="end"), rows=1)
    assert rewards(env, SCRIPT[:1], 3) == [[0.0], [0.0], [17.0]]


def test_done_set_by_another_transform_ends_the_trajectory():
    env = env_of(StepCounter(max_steps=2), ToolRewardTransform(place="end"), rows=1)
    assert rewards(env, SCRIPT[:1], 2) == [[0.0], [17.0]]


def test_weights_of_calls_and_trajectories_are_applied():
    env = env_of(EndTrajectory(when_no_calls=True), ToolRewardTransform(calls=2, trajectories=0.1), rows=1)
    assert rewards(env, SCRIPT[:1], 3) == [[6.0], [8.0], [1.0]]


def test_existing_reward_is_increased():
    from torchrl.envs.transforms import Transform

    class One(Transform):
        def _step(self, tensordict, next_tensordict):
            return next_tensordict.set("reward", torch.ones(next_tensordict.get("done").shape))

    assert rewards(env_of(One(), ToolRewardTransform(), rows=1), SCRIPT[:1], 1) == [[4.0]]


def test_tokens_carry_the_reward_of_their_turn():
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    compose = ToolCompose([Scored()])
    turns = TurnTokenizer(tokenizer, tools=compose.tools)
    end = EndTrajectory(max_turns=2)
    env = TransformedEnv(
        ChatEnv(batch_size=(2,)), Compose(compose, end, turns, ToolRewardTransform(place="tokens"))
    )
    talk = Rollout(env, tokenizer)
    talk.turn(Says(score(1, 2)), Says("no"))
    talk.turn(Says(score(4)), Says("no"))
    for row, wanted in enumerate([[3.0, 14.0], [0.0, 10.0]]):  # each has its final reward of 10
        td = talk.next[row]
        given, mask = td["ledger", "rewards"], td["ledger", "mask"]
        assert given.shape == td["tokens", "prompt"].shape
        last = [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
        assert [given[i].item() for i in last] == wanted
        assert given.sum().item() == sum(wanted)
    env.close()


@pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
@pytest.mark.parametrize("place", ["turn", "end"])
def test_specs_match_the_written_keys(place):
    env = dataset_env(
        2, ToolCompose([Scored()]), EndTrajectory(max_turns=3), ToolRewardTransform(place=place)
    )
    check_env_specs(env)


def test_missing_requirements_are_named():
    with pytest.raises(ValueError, match="place is 'turn', 'end' or 'tokens'"):
        ToolRewardTransform(place="start")
    env = env_of(ToolRewardTransform(place="tokens"), rows=1)
    with pytest.raises(RuntimeError, match="needs a TurnTokenizer before"):
        rewards(env, SCRIPT[:1], 1)
