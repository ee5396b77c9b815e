"""Contract of TorchRL with our histories and tokens: environments, collectors, buffers, wrappers."""

import contextlib
import warnings

import pytest
import torch
from helpers.chat_envs import begin, chat_env, conversations, dataset_env
from helpers.forked import PROCESSES, starts_by_fork
from helpers.limit import limit
from helpers.ragged_batches import (
    CALL,
    history,
    noop,
    prompts,
    ragged,
    read_in_another_process,
    relies_on,
    sampled,
    token_env,
    token_lengths,
    token_policy,
    token_step,
    token_transforms,
    uneven,
    uneven_dataset_env,
    uneven_env,
)
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Unbounded,
)
from torchrl.data.llm import History
from torchrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv, Transform, check_env_specs
from torchrl.envs.llm.transforms import AddThinkingPrompt, KLRewardTransform, RetrieveLogProb
from torchrl.envs.utils import step_mdp
from torchrl.modules.llm.policies import ChatHistory, TransformersWrapper
from torchrl.objectives.llm import MCAdvantage

from torchrl_agentic import AgentHistory, EndTrajectory, ToolCompose
from torchrl_agentic.rollout import training_policy
from torchrl_agentic.testing import ScriptedPolicy, load_tiny
from torchrl_agentic.transforms import history as border

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

# TorchRL warns of the histories that it makes itself, and computes log-probs with a deprecated argument.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(Prompt|Full|Response) history should have one more batch dimension"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:frames_per_batch .* is not exactly divisible"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
LONG, SHORT = ["q0", CALL, "ok", CALL, "ok"], ["q1", "hm", "hm"]


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def uneven_steps(rows=2, turns=2):
    """Return steps with tokens, their rewards and done flags, a list of [rows] batches."""
    env = token_env(rows, EndTrajectory(max_turns=turns))
    td, found = begin(env), []
    for _ in range(turns):
        found.append(env.step(token_policy(td)))
        td = env.step_mdp(found[-1])
    return found


class TestSpecs:
    @relies_on("Conversation._apply_nest", "ValueStack._new_lazy_unsafe")
    @pytest.mark.parametrize("rows", [1, 2])
    def test_check_env_specs(self, rows):
        check_env_specs(uneven_dataset_env(rows))

    @relies_on("ValueStack.device")
    def test_fake_tensordict_and_is_in(self):
        env = uneven_env()
        assert isinstance(env.fake_tensordict()["history"], ChatHistory)
        assert env.observation_spec["history"].is_in(ragged()["history"])


class TestStepping:
    @relies_on("ValueStack._clone", "AgentHistory._clone")
    @pytest.mark.parametrize("lazy", [True, False])
    def test_step_mdp_of_the_environment_keeps_ragged_rows(self, lazy):
        env, td = uneven_env(), begin(uneven_env())
        for _ in range(2):
            step = env.step(ScriptedPolicy(uneven)(td.to_lazystack(0) if lazy else td))
            td = env.step_mdp(step)
        assert prompts(td) == prompts(step["next"]) == [LONG, SHORT]
        assert type(td["history"].prompt) is AgentHistory

    @relies_on("Conversation._set_str")
    def test_public_step_mdp_of_ragged_rows_is_refused_with_the_remedy(self):
        env = uneven_env()
        step = env.step(ScriptedPolicy(uneven)(ragged(1)))
        with pytest.raises(RuntimeError, match=r"env\.step_mdp"):
            step_mdp(step)

    @relies_on("Conversation.where", "AgentHistory.where", "TokenRows.where")
    @pytest.mark.parametrize("lazy", [True, False])
    @pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "history"])
    def test_a_partial_reset_of_ragged_rows(self, lazy, tokens):
        env = token_env() if tokens else uneven_env()
        policy = token_policy if tokens else ScriptedPolicy(uneven)
        td = env.step_mdp(env.step(policy(begin(env))))
        td = td.to_lazystack(0) if lazy else td
        td["_reset"], td["query"] = torch.tensor([[True], [False]]), NonTensorData("q4").expand(2)
        before, found = td.clone(), env.reset(td)
        assert prompts(found) == [["q4"], SHORT[:2]]
        if tokens:
            assert token_lengths(found)[1] == token_lengths(before)[1]
            assert token_lengths(found)[0] < token_lengths(before)[0]
        again = env.step(policy(found))
        assert prompts(again["next"])[1] == SHORT

    @relies_on("Conversation.where")
    def test_step_and_maybe_reset_resets_the_rows_that_ended(self):
        env = dataset_env(2, ToolCompose([noop]), EndTrajectory(when_no_calls=True))
        _, td = env.step_and_maybe_reset(ScriptedPolicy(uneven)(env.reset()))
        assert [len(chat) for chat in conversations(td)] == [4, 2]
        assert conversations(td)[1][-1].content == "q2"

    @relies_on("ValueStack.__new__")
    def test_a_batch_of_two_dimensions_is_stepped(self):
        td = ragged(shape=(2, 2))
        assert td.batch_size == (2, 2)
        assert [len(chat) for chat in prompts(td)] == [5, 3, 5, 3]


class TestRollouts:
    @relies_on("Conversation.where", "ValueStack.__new__")
    @pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "history"])
    @pytest.mark.parametrize(
        ("options", "steps", "lengths"),
        [
            ({"break_when_any_done": True}, 1, [3, 2]),
            ({"break_when_any_done": False, "break_when_all_done": True}, 3, [7, 2]),
        ],
        ids=["any", "all"],
    )
    def test_a_rollout_of_ragged_rows(self, tokens, options, steps, lengths):
        ends = EndTrajectory(max_turns=3, when_no_calls=True)
        env = token_env(2, ends) if tokens else uneven_env((2,), ends)
        policy = token_policy if tokens else ScriptedPolicy(uneven)
        found = env.rollout(5, policy, auto_reset=False, tensordict=begin(env), **options)
        assert found.batch_size == (2, steps)
        assert [len(chat) for chat in prompts(found[:, -1]["next"])] == lengths
        assert type(found["next", "history"].prompt) is AgentHistory
        if steps == 1:
            with pytest.raises(
                AssertionError, match="invalid shape"
            ):  # tensordict, with ragged rows of a single step
                found.reshape(-1)
            return
        assert [len(chat) for chat in prompts(found.reshape(-1))] == [
            len(chat) for row in found.unbind(0) for chat in prompts(row)
        ]
        if tokens:
            assert all(len(one["tokens", "full"]) for one in found.reshape(-1).unbind(0))

    @relies_on("ValueStack._clone")
    def test_a_rollout_that_resets_its_rows(self):
        found = uneven_dataset_env(2, turns=2).rollout(5, ScriptedPolicy(uneven), break_when_any_done=False)
        assert [[len(chat) for chat in prompts(row["next"])] for row in found.unbind(0)] == [
            [4, 6, 4, 6, 4],
            [3, 4, 3, 4, 3],
        ]
        assert found.shape == (2, 5)


class TestBatchedEnvironments:
    def check(self, env):
        td, policy = env.reset(), ScriptedPolicy(uneven)
        for _ in range(2):
            step = env.step(policy(td))
            td = env.step_mdp(step)
        assert [len(chat) for chat in prompts(step["next"])] == [6, 6]  # both workers begin with q0
        assert prompts(step["next"])[0][2:] == LONG[1:]
        assert isinstance(step["next", "history"].prompt, History)

    @relies_on("ValueStack._clone", "ValueStack.__new__")
    def test_serial(self):
        env = SerialEnv(2, uneven_dataset_env)
        self.check(env)
        env.close()

    @relies_on("ValueStack.__getstate__", "ValueStack.share_memory_")
    def test_parallel_without_consolidation(self):
        env = ParallelEnv(2, uneven_dataset_env, consolidate=False, mp_start_method="fork")
        try:
            self.check(env)
        finally:
            env.close(raise_if_closed=False)

    def test_parallel_with_torchrl_s_consolidation_fails(self):
        """TensorDict.consolidate cannot write ragged rows into shared memory; `consolidate=False` works."""
        env = ParallelEnv(2, uneven_dataset_env, mp_start_method="fork")
        try:
            with pytest.raises((EOFError, RuntimeError)):
                self.check(env)
        finally:
            with contextlib.suppress(RuntimeError):
                env.close(raise_if_closed=False)

    @relies_on("ValueStack.__getstate__")
    @pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
    def test_an_asynchronous_pool_under_a_collector(self, backend):
        options = {"exchange": "queue"} if backend == "multiprocessing" else {}
        with starts_by_fork():
            env = AsyncEnvPool([uneven_dataset_env] * 2, backend=backend, stack="lazy", **options)
        try:
            found = collected(
                env, total_dialog_turns=8, dialog_turns_per_batch=1, yield_completed_trajectories=True
            )
        finally:
            env._maybe_shutdown()
        assert found
        for batch in found:
            assert [len(chat) for chat in prompts(batch["next"].reshape(-1))] in ([4, 6], [3, 4])


def collected(env, **options):
    collector = LLMCollector(env, policy=ScriptedPolicy(uneven), **options)
    try:
        return list(collector)
    finally:
        collector.shutdown()


class TestCollector:
    @relies_on("ValueStack._clone", "Conversation.where")
    @pytest.mark.parametrize("whole", [True, False], ids=["trajectories", "steps"])
    def test_it_yields_ragged_rows(self, whole):
        env = uneven_dataset_env(2, turns=2)
        found = collected(
            env, dialog_turns_per_batch=4, total_dialog_turns=8, yield_completed_trajectories=whole
        )
        steps = [step for batch in found for step in batch.reshape(-1).unbind(0)]
        assert len(steps) == 8
        for step in steps:
            before, after = (border.prompts(one.unsqueeze(0))[0].messages for one in (step, step["next"]))
            said = after[len(before)].read().content
            assert len(after) - len(before) == (2 if said == CALL else 1)
            assert bool(step["next", "done"].all()) is (sum(m["role"] == "assistant" for m in after) == 2)

    @relies_on("TokenRows._get_str", "ValueStack._clone")
    @pytest.mark.parametrize("whole", [True, False], ids=["trajectories", "steps"])
    def test_it_yields_tokens(self, whole):
        collector = LLMCollector(
            dataset_env(2, *token_transforms(EndTrajectory(max_turns=2))),
            policy=token_policy,
            dialog_turns_per_batch=4,
            total_dialog_turns=8,
            yield_completed_trajectories=whole,
        )
        try:
            steps = [step for batch in collector for step in batch.reshape(-1).unbind(0)]
        finally:
            collector.shutdown()
        assert len(steps) == 8
        for step in steps:
            full, after = step["tokens", "full"], step["next", "tokens", "prompt"]
            assert bool(step["next", "done"].all()) or torch.equal(after[: len(full)], full)


class TestBuffers:
    @relies_on("ValueStack._clone", "ValueStack.__new__")
    @pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
    @pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "history"])
    def test_rows_are_stored_as_they_are(self, storage, tokens):
        td = token_step() if tokens else ragged()
        buffer = ReplayBuffer(storage=storage(10), batch_size=2)
        buffer.extend(td)
        buffer.extend(td)
        assert prompts(buffer[:]) == prompts(td) * 2
        sample = buffer.sample()
        assert type(sample["history"].prompt) is AgentHistory
        assert all(chat in prompts(td) for chat in prompts(sample))
        if tokens:
            assert token_lengths(buffer[:2]) == token_lengths(td)

    def test_a_tensor_storage_refuses_ragged_rows(self):
        """It lays all rows out like the first; `LazyStackStorage` takes them."""
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        with pytest.raises((RuntimeError, ValueError), match=r"batch size|Cannot expand"):
            buffer.extend(ragged())

    def test_a_memory_mapped_storage_repeats_the_first_history(self):
        """A defect of TorchRL, with its own `History` too: text is not stored by row."""
        plain = lazy_stack([lazy_stack([History(role="user", content=text)]) for text in "ab"])
        for rows in (plain, history(["a"], ["b"])):
            td = TensorDict({"history": rows}, batch_size=(2,))
            buffer = ReplayBuffer(storage=LazyMemmapStorage(4), batch_size=2)
            buffer.extend(td)
            assert buffer[:]["history"].content == [["a"], ["a"]]

    @relies_on("ValueStack._clone", "TokenRows._get_str")
    def test_mc_advantage_groups_histories(self):
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2, transform=MCAdvantage(2))
        (first, last) = uneven_steps(2, 2)
        first["next", "reward"], last["next", "reward"] = (
            torch.zeros(2, 1, 1),
            torch.tensor([[[1.0]], [[2.0]]]),
        )
        for row in range(2):
            steps = lazy_stack([first[row], last[row]])
            buffer.extend(steps.set("query", NonTensorData("q").expand(2)))
        assert len(buffer) == 4
        assert prompts(buffer[:]["next"]) == [LONG[:3], LONG, SHORT[:2], SHORT]
        assert buffer[:]["advantage"].flatten()[-1] > 0


@relies_on("ValueStack.__getstate__", "ValueStack.__setstate__")
def test_a_queue_to_another_process_takes_histories_and_tokens():
    there, back = PROCESSES.Queue(), PROCESSES.Queue()
    td = token_step()["next"]
    process = PROCESSES.Process(target=read_in_another_process, args=(there, back))
    process.start()
    there.put(td)
    found = back.get(timeout=limit(60))
    process.join(limit(60))
    assert found == [prompts(td), "AgentHistory", token_lengths(td)]


def log_prob_reader(tiny):
    """Return TorchRL's wrapper that computes the log-probs of a history."""
    model, tokenizer = tiny
    options = {"input_mode": "history", "generate": False, "return_log_probs": True, "pad_output": False}
    return TransformersWrapper(model, tokenizer=tokenizer, **options)


class TestWrappers:
    @relies_on("AgentHistory.append", "Conversation._get_str")
    def test_transformers_in_history_mode(self, tiny):
        model, tokenizer = tiny
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="history", generate_kwargs={"max_new_tokens": 64}
        )
        env = uneven_env()
        td = begin(env)
        for _ in range(2):
            stepped = env.step(policy(td))
            td = env.step_mdp(stepped)
        before, after = ([len(chat) for chat in prompts(one)] for one in (stepped, td))
        assert after == [length + 1 for length in before]
        assert type(td["history"].prompt) is AgentHistory

    @relies_on("TokenRows._get_str")
    def test_transformers_in_tokens_mode(self, tiny):
        model, tokenizer = tiny
        policy = TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode="tokens",
            pad_output=False,
            generate_kwargs={"max_new_tokens": 4},
        )
        root = token_step().get("next").select("tokens", "masks", "history")
        lengths = token_lengths(root)
        found = policy(root)
        assert [len(row["tokens", "full"]) >= n for row, n in zip(found.unbind(0), lengths, strict=True)]
        assert token_lengths(found) == lengths

    @relies_on("Conversation._get_str")
    def test_log_probs_of_ragged_histories(self, tiny):
        policy = log_prob_reader(tiny)
        td = ScriptedPolicy(uneven)(ragged(1))
        found = policy(td).get(("log_probs", "full"), as_list=True)
        assert len(found[0]) > len(found[1])

    @relies_on("AgentHistory.append", "AgentHistory._extended")
    def test_what_the_vllm_wrapper_does_in_history_mode(self):
        """It appends out of place, row by row, and stacks the rows lazily (`_from_vllm_generate_history`)."""
        env = uneven_env()
        td = begin(env)
        for _ in range(2):
            chat = ChatHistory._from_tensordict(td.empty())
            chat.prompt = td["history"].prompt
            responses = [History(role="assistant", content=text) for text in (CALL, "hm")]
            chat.response = lazy_stack(responses)
            rows = zip(chat.prompt.unbind(0), responses, strict=True)
            chat.full = lazy_stack([row.append(said, inplace=False, dim=-1) for row, said in rows])
            assert type(chat.full) is AgentHistory
            td = env.step_mdp(env.step(td.set("history", chat)))
        assert prompts(td) == [LONG, SHORT]
        assert conversations(td)[0][-1].tool_call_id is not None


class TestTransforms:
    @relies_on("Conversation._get_str", "Conversation.__getitem__")
    def test_retrieve_log_prob(self, tiny):
        reference = log_prob_reader(tiny)
        transform = RetrieveLogProb(reference, assistant_only=True, tokenizer=tiny[1])
        step = uneven_env().step(ScriptedPolicy(uneven)(ragged(1)))
        found = transform(TensorDict({"history": step["history"]}, batch_size=(2,)))
        assert len(found[0]["log_probs", "full"]) > len(found[1]["log_probs", "full"])

    @relies_on("TokenRows._get_str")
    @pytest.mark.parametrize("is_ragged", [True, False])
    def test_kl_reward_takes_rows_of_equal_length_alone(self, tiny, is_ragged):
        """TorchRL reads the mask as one tensor; without `assistant_only` an unbound name raises."""
        model, tokenizer = tiny
        reference = training_policy(model, tokenizer)

        class Reward(Transform):
            def _step(self, td, next_td):
                return next_td.set("reward", torch.zeros(*next_td.batch_size, 1, 1))

            def transform_reward_spec(self, spec):
                spec["reward"] = Unbounded(shape=(*spec.shape, 1, 1))
                return spec

        env = chat_env((2,), *token_transforms(Reward())).append_transform(KLRewardTransform(reference))
        td = sampled(begin(env), [CALL, "hm" if is_ragged else CALL], masks=True)
        if is_ragged:
            with pytest.raises(RuntimeError, match="return lists"):
                env.step(td)
        else:
            assert "kl_penalty" in set(env.step(td)["next"].keys())

    @relies_on("AgentHistory.append", "ValueStack.update")
    @pytest.mark.parametrize("egocentric", [True, False])
    def test_add_thinking_prompt_adds_a_message(self, egocentric):
        thinking = AddThinkingPrompt(
            cond=lambda td: True,
            prompt="think",
            edit_last_turn=False,
            role="assistant" if egocentric else "user",
        )
        env = uneven_env((2,), thinking)
        step = env.step(ScriptedPolicy(uneven)(begin(env)))
        assert prompts(step["next"]) == [["q0", CALL, "ok", "think"], ["q1", "hm", "think"]]

    @relies_on("Conversation.__getitem__", "AgentHistory.append")
    def test_add_thinking_prompt_edits_the_last_message(self):
        thinking = AddThinkingPrompt(cond=lambda td: True, prompt="think")
        env = uneven_env((2,), thinking)
        step = env.step(ScriptedPolicy(uneven)(begin(env)))
        assert [chat[-1] for chat in prompts(step["next"])] == ["ok\n\nthink", "hm\n\nthink"]
        assert [len(chat) for chat in prompts(step["next"])] == [3, 2]
