"""EndTrajectory: when a trajectory is over without a tool saying so."""

import pytest
import torch
from helpers.chat_envs import STOP, add, advance, begin, call, chat_env, dataset_env, step
from torchrl.envs import StepCounter, TransformedEnv, check_env_specs
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, StopTool, ToolCompose
from torchrl_agentic.testing import ScriptedPolicy

CALL = call("add", a=1, b=1)


def ended(td):
    return [td[key].flatten().tolist() for key in ("done", "terminated", "truncated")]


def test_max_turns_truncates_and_does_not_terminate():
    env = dataset_env(2, ToolCompose([add]), EndTrajectory(max_turns=2))
    td = step(env, env.reset(), CALL, "x")
    assert ended(td["next"]) == [[False, False]] * 3
    td = step(env, env.step_mdp(td), CALL, "x")
    assert ended(td["next"]) == [[True, True], [False, False], [True, True]]


@pytest.mark.parametrize("options", [{"max_turns": 2}, {"when_no_calls": True}])
def test_truncated_is_in_the_specs(options):
    """Also without max_turns: a row that leaves the policy no room is truncated."""
    spec = dataset_env(2, ToolCompose([add]), EndTrajectory(**options)).full_done_spec
    assert spec["truncated"].shape == (2, 1)
    assert spec["truncated"].dtype == torch.bool


@pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
@pytest.mark.parametrize(
    "options", [{"max_turns": 2}, {"when_no_calls": True}, {"max_turns": 1, "when_no_calls": True}]
)
def test_the_specs_are_kept(options):
    check_env_specs(dataset_env(2, ToolCompose([add]), EndTrajectory(**options)))


def test_truncated_is_false_on_reset_and_has_the_shape_of_done():
    td = dataset_env(2, ToolCompose([add]), EndTrajectory(max_turns=1)).reset()
    assert td["truncated"].shape == td["done"].shape == (2, 1)
    assert not td["truncated"].any()


def test_a_message_without_calls_terminates_its_row():
    env = dataset_env(3, ToolCompose([add]), EndTrajectory(when_no_calls=True))
    td = step(env, env.reset(), CALL, "the answer is 2", "<tool_call>{oops</tool_call>")["next"]
    assert td["done"].flatten().tolist() == td["terminated"].flatten().tolist() == [False, True, False]


def test_both_options_terminate_and_truncate_independently():
    env = dataset_env(2, ToolCompose([add]), EndTrajectory(max_turns=1, when_no_calls=True))
    assert ended(step(env, env.reset(), CALL, "x")["next"]) == [[True, True], [False, True], [True, True]]


def test_a_stop_in_the_same_turn_stays():
    env = dataset_env(2, ToolCompose([add, StopTool()]), EndTrajectory(max_turns=5))
    assert ended(step(env, env.reset(), STOP, CALL)["next"]) == [[True, False], [True, False], [False, False]]


@pytest.mark.parametrize("counter_first", [True, False])
def test_a_step_counter_s_truncation_is_kept(counter_first):
    both = [StepCounter(max_steps=1), EndTrajectory(max_turns=2)]
    env = dataset_env(1, ToolCompose([add]), *(both if counter_first else reversed(both)))
    td = step(env, env.reset(), CALL)["next"]
    assert td["truncated"].all()
    assert td["done"].all()


def test_turns_of_a_row_that_was_reset_are_counted_from_its_reset():
    env = dataset_env(2, ToolCompose([add, StopTool()]), EndTrajectory(max_turns=2))
    policy = ScriptedPolicy([[STOP, "x", "x"], ["x", "x", "x"]])
    _, td = env.step_and_maybe_reset(policy(env.reset()))
    assert td["agentic", "turn"].flatten().tolist() == [0, 1]
    stepped, td = env.step_and_maybe_reset(policy(td))
    assert ended(stepped["next"])[2] == [False, True]
    assert not td["truncated"].any()  # both rows have ended, and begin anew


def test_a_batch_of_two_dimensions_is_ended_row_by_row():
    env = chat_env((2, 2), ToolCompose([add]), EndTrajectory(max_turns=2, when_no_calls=True))
    td = step(env, begin(env), CALL, "x", CALL, CALL)["next"]
    assert td["terminated"].tolist() == [[[False], [True]], [[False], [False]]]


def test_a_grid_is_truncated_in_its_shape():
    env = chat_env((2, 2), ToolCompose([add]), EndTrajectory(max_turns=1))
    td = step(env, begin(env), CALL, "x", CALL, CALL)["next"]
    assert td["truncated"].shape == (2, 2, 1)
    assert td["truncated"].all()


def test_a_rollout_ends_with_it():
    env = dataset_env(1, ToolCompose([add]), EndTrajectory(max_turns=3))
    rollout = env.rollout(10, policy=ScriptedPolicy(lambda chat: CALL))
    assert rollout.shape == (1, 3)


@pytest.mark.parametrize("max_turns", [0, -1])
def test_max_turns_below_one_is_rejected(max_turns):
    with pytest.raises(ValueError, match="1 or more"):
        EndTrajectory(max_turns=max_turns)


def test_options_that_never_end_a_trajectory_are_rejected():
    with pytest.raises(ValueError, match="never end"):
        EndTrajectory()


def test_before_the_tools_the_error_names_the_right_place():
    env = chat_env((1,), EndTrajectory(max_turns=1), ToolCompose([add]))
    with pytest.raises(ValueError, match=r"behind|Compose\(ToolCompose\(\.\.\.\), EndTrajectory"):
        begin(env)


def test_without_tools_the_error_names_the_requirement():
    env = TransformedEnv(ChatEnv(batch_size=(1,)), EndTrajectory(when_no_calls=True))
    with pytest.raises(RuntimeError, match="ToolCompose"):
        step(env, begin(env), CALL)


def test_turn_counter_continues_in_rows_that_are_not_done():
    env = dataset_env(1, ToolCompose([add]), EndTrajectory(when_no_calls=True))
    td = env.reset()
    for turn in range(1, 4):
        td = advance(env, td, CALL)
        assert td["agentic", "turn"].item() == turn
        assert not td["done"].any()
