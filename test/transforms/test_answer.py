"""The last message of a trajectory is compared with the data set's answer, once, at its end."""

import pytest
from helpers.chat_envs import dataset_env
from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv, check_env_specs
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    collate_rows,
)
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools.verl.graders import same_mathematics


def scored(n: float) -> ToolResult:
    """Score."""
    return ToolResult.from_value("ok", reward=n)


CALL = '<tool_call>{"name": "scored", "arguments": {"n": 0.5}}</tool_call>'


def rewards(rows, script, *transforms):
    loader = DataLoader(rows, batch_size=1, collate_fn=collate_rows)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(len(script),))
    end = EndTrajectory(when_no_calls=True)
    env = TransformedEnv(env, Compose(ToolCompose([scored]), end, *transforms))
    policy, td, found = ScriptedPolicy(script), env.reset(), []
    for _ in range(max(map(len, script))):
        td = env.step(policy(td))
        found.append(td["next", "reward"].flatten().tolist())
        td = env.step_mdp(td)
    env.close()
    return found


@pytest.mark.parametrize(
    "where",
    [
        {"ground_truth": "72"},
        {"answer": "48 + 24 = 72\n#### 72"},
        {"reward_model": {"style": "rule", "ground_truth": 72}},
        {"extra_info": {"ground_truth": "72"}},
    ],
)
def test_correct_last_message_gets_its_reward_at_the_end(where):
    rows = [{"query": "q", **where}] * 2
    script = [[CALL, "<think>70?</think>It is 72."], [CALL, "<think>72</think>It is 70."]]
    assert rewards(rows, script, AnswerRewardTransform()) == [[0.0, 0.0], [1.0, 0.0]]


def test_grader_and_reward_value_are_configurable():
    rows = [{"query": "q", "solution": r"\frac{1}{2}"}]
    judge = AnswerRewardTransform(same_mathematics, column="solution", right=2.0, wrong=-1.0)
    assert rewards(rows, [[r"So \boxed{0.5}"]], judge) == [[2.0]]
    assert rewards(rows, [["3"]], judge.clone()) == [[-1.0]]


def test_reward_is_added_to_tool_rewards():
    rows = [{"query": "q", "ground_truth": 3}]
    both = (ToolRewardTransform(), AnswerRewardTransform())
    assert rewards(rows, [[CALL, "3"]], *both) == [[0.5], [1.0]]


def test_missing_answer_error_lists_the_searched_columns():
    with pytest.raises(ValueError, match=r"row 0 .* none of the columns 'ground_truth'.* column="):
        rewards([{"query": "q"}], [["3"]], AnswerRewardTransform())


@pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
def test_specs_match_the_written_keys():
    check_env_specs(dataset_env(2, ToolCompose([scored]), AnswerRewardTransform()))
