"""The hazards of TorchRL that concern ToolCompose, numbered as in facts/torchrl.md: none happens with it.

Gone since conversations are values: H7 (a partial reset no longer needs a lazy stack), and of H3 what
concerns `append` and `extend` of ragged rows. H13 stays: `ParallelEnv` needs `consolidate=False`.
`ToolCompose` and `TurnTokenizer` avoid the others.
"""

import gc
import multiprocessing
import pickle
import threading

import pytest
import torch
from helpers.chat_envs import (
    STOP,
    Counter,
    add,
    add_env,
    advance,
    begin,
    call,
    chat_env,
    conversations,
    dataset_env,
    flags,
    results,
    step,
)
from helpers.limit import limit
from tensordict import NonTensorData
from torchrl.data import Unbounded
from torchrl.envs import ParallelEnv, StepCounter, Transform, check_env_specs
from torchrl.modules.llm.policies import TransformersWrapper

from torchrl_agentic import EndTrajectory, Message, StopTool, Tool, ToolCompose, tool
from torchrl_agentic.testing import ScriptedPolicy, byte_tokenizer
from torchrl_agentic.transforms import history as border

# TorchRL warns of the histories that it makes itself, from its own specs.
own_histories = pytest.mark.filterwarnings(
    "ignore:(Prompt|Full) history should have one more batch dimension"
)


class ScriptedModel(torch.nn.Module):
    """The k-th `generate` answers script[k][row], then the end of the sequence."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, script):
        super().__init__()
        self.tokenizer, self.script, self.prompts = tokenizer, iter(script), []

    def generate(self, input_ids, attention_mask, **_):
        rows = zip(input_ids, attention_mask, strict=True)
        self.prompts.append([self.tokenizer.decode(ids[mask.bool()]) for ids, mask in rows])
        new = [
            torch.tensor(self.tokenizer(said + self.tokenizer.eos_token)["input_ids"])
            for said in next(self.script)
        ]
        new = torch.nn.utils.rnn.pad_sequence(
            new, batch_first=True, padding_value=self.tokenizer.pad_token_id
        )
        logits = tuple(torch.randn(len(input_ids), len(self.tokenizer)) for _ in new[0])
        return {"sequences": torch.cat([input_ids, new], -1), "logits": logits}


def released_policy(script):
    tokenizer = byte_tokenizer()
    model = ScriptedModel(tokenizer, script)
    return model, TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="history", generate=True, return_log_probs=True
    )


CALL = '<tool name="add">{"a": 1, "b": 1}</tool>'  # the released policy cannot say <tool_call> (H2)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_h1_h3_h8_the_released_policy_answers_in_every_turn_of_a_ragged_batch():
    """H1: no answer becomes "". H3: rows of unequal length pass. H8: the masks of the turn before do no harm.

    Row 0 calls in the first two turns, row 1 never does; padded with "<none>", row 1 would fall silent.
    """
    model, policy = released_policy([[CALL, "A"], [CALL * 2, "B"], ["done", "C"]])
    env = dataset_env(2, ToolCompose([add], "xml"))
    td = env.reset()
    for _ in range(3):
        _, td = env.step_and_maybe_reset(policy(td.to_lazystack(0)))
    said = [[m.content for m in chat if m.role == "assistant"] for chat in conversations(td)]
    assert said == [[CALL, CALL * 2, "done"], ["A", "B", "C"]]
    assert "2</tool_result>" in model.prompts[1][0]
    assert "<none>" not in str(model.prompts)


@own_histories
def test_h5_the_specs_hold_for_a_data_set_environment():
    check_env_specs(dataset_env(1, ToolCompose([add])))
    check_env_specs(dataset_env(3, ToolCompose([add, StopTool()]), StepCounter(), EndTrajectory(max_turns=2)))


@own_histories
def test_h5_a_random_action_has_no_content_and_is_read_as_no_call():
    env = dataset_env(2, ToolCompose([add]))
    td = env.rand_step(env.reset())
    assert flags(td["next"], "n_calls") == [0, 0]


def test_h6_a_batch_of_two_dimensions_keeps_its_results_over_turns():
    env = chat_env((2, 2), ToolCompose([Counter()]))
    td = begin(env)
    for _ in range(2):
        td = advance(env, td, call("count"), call("count") * 2, "x", call("count"))
        assert td.batch_size == (2, 2)
    assert results(td) == [["1", "2"], ["1", "2", "3", "4"], [], ["1", "2"]]
    assert td["history"].prompt.batch_size[:2] == (2, 2)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_h7_a_partial_reset_of_ragged_prompts_works_on_dense_and_lazy_batches(is_lazy):
    env = chat_env((2,), ToolCompose([Counter()]))
    td = advance(env, begin(env), call("count") * 3, call("count"))
    td = td.to_lazystack(0) if is_lazy else td
    td["query"] = NonTensorData("again").expand(2)
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    assert [len(chat) for chat in conversations(td)] == [1, 3]
    td = advance(env, td, call("count"), call("count"))
    assert results(td) == [["1"], ["1", "2"]]


def test_h7_a_partial_reset_of_a_data_set_environment_leaves_the_other_rows_state():
    """`DataLoadingPrimer` makes a new TensorDict for the reset, without the mask."""
    counter = Counter()
    env = dataset_env(2, ToolCompose([counter]))
    td = advance(env, env.reset(), call("count") * 3, call("count")).to_lazystack(0)
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    assert [len(chat) for chat in conversations(td)] == [2, 4]
    assert counter.events("close") == ["0.0"]
    td = advance(env, td, call("count"), call("count"))
    assert results(td) == [["1"], ["1", "2"]]
    assert flags(td, "turn") == [1, 2]


def test_h7_a_row_that_ends_by_itself_leaves_the_other_rows_state():
    """The usual loop: `step_and_maybe_reset` resets row 0, row 1 counts on."""
    env = dataset_env(2, ToolCompose([Counter(), StopTool()]))
    policy = ScriptedPolicy([[call("count") + STOP] * 2, [call("count"), call("count")]])
    _, td = env.step_and_maybe_reset(policy(env.reset()))
    _, td = env.step_and_maybe_reset(policy(td))
    assert results(td)[1] == ["1", "2"]


def test_h7_the_scripted_policy_carries_the_lazy_stack_so_that_rollouts_reset_rows():
    """Row 0 stops in the first turn and is reset alone, while row 1 is longer."""
    env = dataset_env(2, ToolCompose([add, StopTool()]))

    def said(chat):
        return STOP if chat[1].content in ("q0",) else call("add", a=1, b=1)

    rollout = env.rollout(3, policy=ScriptedPolicy(said), break_when_any_done=False)
    assert rollout["next", "done"].squeeze(-1).tolist() == [[True, False, False], [False, False, False]]


def test_h11_an_engine_s_end_of_sequence_token_is_neither_parsed_nor_written_twice():
    env = chat_env((1,), ToolCompose([add], "json"))
    said = '{"message": "m", "tools": [{"tool": "add", "args": {"a": 1, "b": 1}}]}<|im_end|>'
    td = step(env, begin(env), said)["next"]
    assert flags(td, "n_calls") == [1]
    rendered = td["history"].prompt.apply_chat_template(
        tokenizer=byte_tokenizer(), add_generation_prompt=True
    )[0]
    assert "<|im_end|><|im_end|>" not in rendered
    assert rendered.count("<|im_end|>") == rendered.count("<|im_start|>") - 1  # the generation prompt is open


@own_histories
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_h13_a_parallel_environment_works_without_consolidation():
    env = ParallelEnv(2, add_env, consolidate=False, mp_start_method="fork")
    try:
        td = step(env, env.reset(), call("add", a=1, b=2), "x")
        assert results(td["next"]) == [["3"], []]
    finally:
        env.close(raise_if_closed=False)


def test_h14_parent_of_a_later_transform_can_be_read_in_every_step():
    counter = Counter()

    class Nosy(Transform):
        def _step(self, td, next_td):
            assert self.parent.base_env.input_mode == "history"
            gc.collect()
            return next_td

    env = dataset_env(1, ToolCompose([counter]), Nosy())
    td = env.reset()
    for _ in range(3):
        td = advance(env, td, call("count"))
    assert results(td) == [["1", "2", "3"]]
    assert counter.events("open") == ["0.0"]
    assert counter.events("close") == []


def test_h15_a_dropped_environment_tears_its_tools_down():
    torn_down = threading.Event()

    class Own(Tool):
        name = "own"

        async def teardown(self):
            torn_down.set()

        async def setup(self):
            pass

        async def run(self, args, ctx):
            return "ok"

    env = chat_env((1,), ToolCompose([Own()]))
    step(env, begin(env), call("own"))
    del env
    gc.collect()
    assert torn_down.wait(limit(30))


def test_h15_there_is_one_loop_thread_for_all_environments():
    for _ in range(3):
        env = chat_env((1,), ToolCompose([add]))
        step(env, begin(env), call("add", a=1, b=1))
    assert [thread.name for thread in threading.enumerate()].count("torchrl_agentic") == 1


def test_h16_used_environment_is_pickled_without_running_tasks():
    transform = ToolCompose([Counter(), StopTool()])
    env = chat_env((1,), transform)
    step(env, begin(env), call("count"))
    copy = pickle.loads(pickle.dumps(transform))
    assert [t.name for t in copy] == ["count", "stop"]
    fresh = chat_env((1,), pickle.loads(pickle.dumps(ToolCompose([Counter()]))))
    assert results(step(fresh, begin(fresh), call("count"))["next"]) == [["1"]]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_h16_an_environment_works_in_a_fork_of_a_process_that_used_it():
    """After a fork the loop's thread is not there; waiting for it would hang."""
    env = add_env()
    step(env, env.reset(), call("add", a=1, b=1))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work():
        there.send(results(step(env, env.reset(), call("add", a=2, b=2))["next"]))

    process = context.Process(target=work)
    process.start()
    assert here.poll(60)
    assert here.recv() == [["4"]]
    process.join(limit(30))
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_h16_fork_does_not_close_sessions_of_its_parent(caplog):
    """Open sessions belong to the parent's loop; closing them in the child would wait forever."""
    tool = Counter()
    env = chat_env((1,), ToolCompose([tool]))
    step(env, begin(env), call("count"))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work():
        counted = results(step(env, begin(env), call("count"))["next"])
        there.send((counted, tool.events("close"), caplog.text))

    process = context.Process(target=work)
    process.start()
    assert here.poll(60)
    assert here.recv() == ([["1"]], [], "")
    process.join(limit(30))
    assert tool.events("close") == []
    env.close()
    assert tool.events("close") == ["0.0"]


def test_h17_empty_list_of_calls_is_neither_call_nor_error():
    """Under list_to_stack it is an empty tensor, whose truth value raises."""
    from torchrl.data.llm import History

    env = chat_env((1,), ToolCompose([add]))
    td = begin(env).to_lazystack(0)
    assistant = History(role="assistant", content=call("add", a=1, b=1), tool_calls=[])
    row = [*border.prompts(td)[0].messages, border.message_of(assistant)]
    history = td.get("history")
    history.full = border.AgentHistory.of([border.Conversation.of(row)])
    td.set("history", history)
    assert results(env.step(td)["next"]) == [["2"]]


def test_h17_lists_and_missing_keys_of_arguments_do_not_become_tensors():
    seen = []

    async def take(numbers: list[int], maybe: dict | None = None) -> list:
        seen.append((numbers, maybe))
        return numbers

    env = chat_env((2,), ToolCompose([tool(take)]))
    said = [
        Message("assistant", "", tool_calls=[{"name": "take", "arguments": args}])
        for args in ({"numbers": [1, 2]}, {"numbers": [3, 4], "maybe": {"x": []}})
    ]
    td = step(env, begin(env), *said)["next"]
    assert sorted(seen, key=str) == [([1, 2], None), ([3, 4], {"x": []})]
    assert results(td) == [["[1, 2]"], ["[3, 4]"]]


def test_h20_flags_and_tool_rewards_have_the_shape_of_done_in_a_rollout():
    env = dataset_env(2, ToolCompose([add]))
    rollout = env.rollout(3, policy=ScriptedPolicy(lambda chat: call("add", a=1, b=1)))
    assert rollout["next", "agentic", "tool_reward"].shape == rollout["next", "done"].shape == (2, 3, 1)
    assert rollout["next", "agentic", "stop_requested"].shape == (2, 3, 1)


def test_h22_a_data_set_environment_resets_itself_after_a_stop():
    counter = Counter()
    env = dataset_env(1, ToolCompose([counter, StopTool()]))
    policy = ScriptedPolicy([[call("count"), call("count") + STOP]])
    rollout = env.rollout(6, policy=policy, break_when_any_done=False)
    assert rollout["next", "done"].flatten().tolist() == [False, True] * 3
    assert rollout["next", "agentic", "turn"].flatten().tolist() == [1, 2] * 3
    assert counter.events("open") == counter.events("close") == ["0.0", "0.1", "0.2"]


@pytest.mark.parametrize("counter_first", [True, False])
def test_h24_it_commutes_with_a_step_counter(counter_first):
    both = [StepCounter(max_steps=2), ToolCompose([add, StopTool()])]
    env = dataset_env(2, *(both if counter_first else reversed(both)))
    td = env.reset()
    seen = []
    for said in (STOP, "x"), ("x", "x"):
        td = step(env, td, *said)
        seen.append([td["next", key].flatten().tolist() for key in ("done", "terminated", "truncated")])
        td = env.step_mdp(td)
    assert seen[0] == [[True, False], [True, False], [False, False]]
    assert seen[1][0] == [True, True]
    assert seen[1][2] == [True, True]


def test_h24_reward_on_the_full_history_works_at_any_position():
    class Length(Transform):
        def _step(self, td, next_td):
            full = border.conversations(td["history"].full)
            next_td["reward"] = torch.tensor([[float(len(row.messages))] for row in full])
            return next_td

        def transform_reward_spec(self, spec):
            spec["reward"] = Unbounded(shape=(*spec.shape, 1))
            return spec

    for order in (Length(), ToolCompose([add])), (ToolCompose([add]), Length()):
        env = dataset_env(2, *order)
        td = step(env, env.reset(), call("add", a=1, b=1) * 3, "x")["next"]
        assert td["reward"].tolist() == [[3.0], [3.0]]
        assert [len(chat) for chat in conversations(td)] == [6, 3]
