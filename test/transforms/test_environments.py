"""ToolCompose under TorchRL's rollouts, collectors, batched and asynchronous environments."""

import functools
import warnings

import pytest
from helpers.chat_envs import STOP, Counter, add, call, conversations, count_env, dataset_env, results, step
from helpers.forked import starts_by_fork
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


missing_transforms = pytest.mark.filterwarnings(
    "ignore:The env passed to LLMCollector is missing:FutureWarning",
    "ignore:frames_per_batch .* is not exactly divisible",
)


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

    def test_rows_of_a_long_rollout_do_not_mix_conversations(self):
        env = dataset_env(3, ToolCompose([add]), StepCounter())
        rollout = env.rollout(4, policy=ScriptedPolicy([[CALL] * 4, ["x"] * 4, [CALL * 2] * 4]))
        last = rollout[:, -1]["next"]
        assert [len(row) for row in results(last)] == [4, 0, 8]


@missing_transforms
class TestLLMCollector:
    def test_collector_yields_whole_trajectories(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]), queries=16)
        found = collected(
            env,
            policy=ScriptedPolicy(answer_or_call),
            dialog_turns_per_batch=1,
            total_dialog_turns=8,
            yield_completed_trajectories=True,
        )
        assert found
        for trajectory in found:
            trajectory = trajectory.reshape(-1)
            assert trajectory["next", "done"].flatten().tolist() == [False, True]
            assert [m.role for m in conversations(trajectory[-1:]["next"])[0]] == [
                "system", "user", "assistant", "tool", "assistant", "tool",
            ]  # fmt: skip

    def test_rows_of_unequal_length_keep_their_state_while_others_are_reset(self):
        """Each trajectory counts its own calls without a gap, however often the other row restarts."""
        env = dataset_env(2, ToolCompose([Counter(), StopTool()]), queries=16)

        def said(chat):
            turns = 1 if int(chat[1].content[1:]) % 2 else 3
            done = sum(m.role == "assistant" for m in chat)
            return call("count") + (STOP if done >= turns else "")

        found = collected(
            env,
            policy=ScriptedPolicy(said),
            dialog_turns_per_batch=1,
            total_dialog_turns=16,
            yield_completed_trajectories=True,
        )
        found = [trajectory.reshape(-1) for trajectory in found]
        lengths = set()
        for trajectory in found:
            counted = [text for text in results(trajectory[-1:]["next"])[0] if text.isdigit()]
            assert counted == [str(i + 1) for i in range(len(counted))]
            lengths.add(len(counted))
        assert len(lengths) == 2

    def test_it_yields_batches_of_steps_with_the_flags(self):
        env = dataset_env(2, ToolCompose([add, StopTool()]), EndTrajectory(max_turns=2))
        batches = collected(
            env, policy=ScriptedPolicy(lambda chat: CALL), dialog_turns_per_batch=4, total_dialog_turns=8
        )
        assert batches
        assert all(batch["next", "agentic", "any_tool_calls"].all() for batch in batches)

    def test_a_policy_version_is_tracked(self):
        """The collector appends a transform of its own to the environment."""
        env = TransformedEnv(dataset_env(1), ToolCompose([add, StopTool()]), auto_unwrap=False)
        batches = collected(
            env,
            policy=ScriptedPolicy(answer_or_call),
            dialog_turns_per_batch=2,
            total_dialog_turns=4,
            track_policy_version=True,
        )
        assert len(batches) == 2
        assert all("policy_version" in set(batch["next"].keys()) for batch in batches)
        assert batches[0]["next", "agentic", "any_tool_calls"].all()


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
    @pytest.mark.parametrize("start", ["forkserver", "fork"])
    def test_parallel(self, start):
        env = ParallelEnv(2, count_env, consolidate=False, mp_start_method=start)
        try:
            self.check(env)
        finally:
            env.close()

    def test_tools_work_outside_a_batched_environment(self):
        """One ToolCompose for all: its batch is (2, 1)."""
        env = TransformedEnv(SerialEnv(2, functools.partial(dataset_env, 1)), ToolCompose([add, StopTool()]))
        td = step(env, env.reset(), CALL, STOP)
        assert results(td["next"]) == [["3"], ["[stop] done"]]
        assert td["next", "done"].tolist() == [[[False]], [[True]]]
        env.close()


@missing_transforms
class TestAsync:
    """`AsyncEnvPool.step` itself fails for children of the shape (1,), tools or not; collectors work."""

    @pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
    def test_a_collector_gets_whole_trajectories_each_with_its_own_state(self, backend):
        with starts_by_fork():
            env = AsyncEnvPool([count_env] * 2, backend=backend, stack="lazy", **exchange(backend))
        try:
            found = collected(
                env,
                policy=ScriptedPolicy(count_to_three),
                dialog_turns_per_batch=1,
                total_dialog_turns=12,
                yield_completed_trajectories=True,
            )
        finally:
            env._maybe_shutdown()
        found = [trajectory.reshape(-1) for trajectory in found]
        assert found
        for trajectory in found:
            assert results(trajectory[-1:]["next"]) == [["1", "2", "3", "[stop] done"]]


def count_to_three(chat):
    turns = sum(message.role == "assistant" for message in chat)
    return call("count") + (STOP if turns == 2 else "")


def exchange(backend):
    return {"exchange": "queue"} if backend == "multiprocessing" else {}


def collected(env, **options):
    """Give all that a collector yields, and shut it down."""
    collector = LLMCollector(env, **options)
    try:
        return list(collector)
    finally:
        collector.shutdown()
