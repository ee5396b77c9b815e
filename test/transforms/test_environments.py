"""ToolCompose under TorchRL's rollouts, collectors, batched and asynchronous environments."""

import functools
import warnings

import pytest
from chats import STOP, Counter, add, add_env, call, chats, count_env, dataset_env, results, step
from torchrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_agentic import EndTrajectory, StopTool, ToolCompose
from torchrl_agentic.testing import ScriptedPolicy

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

# TorchRL warns of the histories that it makes itself, from its own specs.
pytestmark = pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")

CALL = call("add", a=1, b=2)


def answer_or_call(chat):
    """Calls once, then stops: a whole task."""
    return STOP if chat[-1].role == "tool" else CALL


class TestRollout:
    def test_it_ends_when_all_rows_have_stopped(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]))
        policy = ScriptedPolicy([[CALL, STOP], [CALL, STOP]])
        rollout = env.rollout(10, policy=policy, break_when_any_done=False, break_when_all_done=True)
        assert rollout.shape == (2, 2)
        assert rollout["next", "done"].squeeze(-1).tolist() == [[False, True], [False, True]]

    def test_a_row_that_has_stopped_waits_for_the_other(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]))
        policy = ScriptedPolicy([[STOP], [CALL, CALL * 2, STOP]])
        rollout = env.rollout(10, policy=policy, break_when_any_done=False, break_when_all_done=True)
        assert rollout["next", "done"][1].flatten().tolist()[-1] is True
        assert results(rollout[1, -1:]["next"])[0].count("3") == 3

    def test_rows_of_a_long_rollout_keep_their_conversations_apart(self):
        env = dataset_env(3, ToolCompose([add]), StepCounter())
        rollout = env.rollout(4, policy=ScriptedPolicy([[CALL] * 4, ["x"] * 4, [CALL * 2] * 4]))
        last = rollout[:, -1]["next"]
        assert [len(row) for row in results(last)] == [4, 0, 8]


class TestLLMCollector:
    def test_it_yields_trajectories_that_are_whole(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]), queries=16)
        collector = LLMCollector(
            env,
            policy=ScriptedPolicy(answer_or_call),
            dialog_turns_per_batch=1,
            total_dialog_turns=8,
            yield_completed_trajectories=True,
        )
        try:
            found = list(collector)
        finally:
            collector.shutdown()
        assert found
        for trajectory in found:
            trajectory = trajectory.reshape(-1)
            assert trajectory["next", "done"].flatten().tolist() == [False, True]
            assert [m.role for m in chats(trajectory[-1:]["next"])[0]] == [
                "system", "user", "assistant", "tool", "assistant", "tool",
            ]  # fmt: skip

    def test_rows_of_unequal_length_keep_their_state_while_others_are_reset(self):
        """Each trajectory counts its own calls: 1, 2, … without a gap, however often the other row begins anew."""
        env = dataset_env(2, ToolCompose([Counter(), StopTool()]), queries=16)

        def said(chat):
            turns = 1 if int(chat[1].content[1:]) % 2 else 3
            done = sum(m.role == "assistant" for m in chat)
            return call("count") + (STOP if done >= turns else "")

        collector = LLMCollector(
            env,
            policy=ScriptedPolicy(said),
            dialog_turns_per_batch=1,
            total_dialog_turns=16,
            yield_completed_trajectories=True,
        )
        try:
            found = [trajectory.reshape(-1) for trajectory in collector]
        finally:
            collector.shutdown()
        lengths = set()
        for trajectory in found:
            counted = [text for text in results(trajectory[-1:]["next"])[0] if text.isdigit()]
            assert counted == [str(i + 1) for i in range(len(counted))]
            lengths.add(len(counted))
        assert len(lengths) == 2

    def test_it_yields_batches_of_steps_with_the_flags(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]), EndTrajectory(max_turns=2))
        collector = LLMCollector(
            env, policy=ScriptedPolicy(lambda chat: CALL), dialog_turns_per_batch=4, total_dialog_turns=8
        )
        try:
            batches = list(collector)
        finally:
            collector.shutdown()
        assert batches
        assert all(batch["next", "agentic", "any_tool_calls"].all() for batch in batches)

    def test_a_policy_version_is_tracked_where_the_tools_are_the_environment_s_only_transform(self):
        """The collector appends a transform of its own to the environment."""
        from tensordict import TensorDict
        from torchrl.envs.llm import ChatEnv

        env = TransformedEnv(ChatEnv(batch_size=(1,)), ToolCompose([add, StopTool()]))
        collector = LLMCollector(
            env,
            policy=ScriptedPolicy(answer_or_call),
            dialog_turns_per_batch=1,
            total_dialog_turns=2,
            track_policy_version=True,
            reset_at_each_iter=False,
        )
        try:
            td = collector.env.reset(TensorDict({"query": ["q"]}, batch_size=(1,)))
            td = step(collector.env, td, CALL)
        finally:
            collector.shutdown()
        assert results(td["next"]) == [["3"]]
        assert "policy_version" in td["next"].keys()


class TestBatched:
    def check(self, env):
        td = step(env, env.reset(), call("count"), "x")
        assert results(td["next"]) == [["1"], []]
        assert td["next", "agentic", "n_calls"].shape == (2, 1, 1)
        td = step(env, env.step_mdp(td), call("count"), call("count") + STOP)
        assert results(td["next"]) == [["1", "2"], ["1", "[stop] done"]]
        assert td["next", "done"].flatten().tolist() == [False, True]

    def test_serial(self):
        env = SerialEnv(2, count_env)
        self.check(env)
        env.close()

    def test_serial_environments_reset_themselves(self):
        env = SerialEnv(2, count_env)
        policy = ScriptedPolicy([[call("count") + STOP] * 4, [call("count")] * 4])
        _, td = env.step_and_maybe_reset(policy(env.reset()))
        _, td = env.step_and_maybe_reset(policy(td))
        assert results(td)[1] == ["1", "2"]
        env.close()

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
    @pytest.mark.parametrize("start", ["spawn", "fork"])
    def test_parallel(self, start):
        env = ParallelEnv(2, count_env, consolidate=False, mp_start_method=start)
        try:
            self.check(env)
        finally:
            env.close()

    def test_tools_may_stand_outside_a_batched_environment(self):
        """One ToolCompose for all: its batch is (2, 1)."""
        env = TransformedEnv(SerialEnv(2, functools.partial(dataset_env, 1)), ToolCompose([add, StopTool()]))
        td = step(env, env.reset(), CALL, STOP)
        assert results(td["next"]) == [["3"], ["[stop] done"]]
        assert td["next", "done"].tolist() == [[[False]], [[True]]]
        env.close()


class TestAsync:
    @pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
    def test_each_environment_keeps_its_own_state(self, backend):
        env = AsyncEnvPool([count_env] * 2, backend=backend, stack="lazy")
        try:
            td = env.reset()
            for _ in range(2):
                td = step(env, td, call("count"), "x")
                td = env.step_mdp(td)
            assert results(td) == [["1", "2"], []]
        finally:
            env._maybe_shutdown()

    @pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
    def test_a_rollout_runs_in_it(self, backend):
        env = AsyncEnvPool([add_env] * 2, backend=backend, stack="lazy")
        try:
            rollout = env.rollout(2, policy=ScriptedPolicy(answer_or_call), break_when_any_done=False)
            assert rollout["next", "done"].flatten().tolist() == [False, True] * 2
        finally:
            env._maybe_shutdown()
