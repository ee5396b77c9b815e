"""Columns of a data set reach the tools, and responses of `create` reach the prompt."""

import pytest
from helpers.model_families import FAMILIES
from helpers.token_rollouts import Rollout, Says
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from torchrl_agentic import (
    EndTrajectory,
    Injected,
    RowData,
    StopTool,
    Tool,
    ToolCompose,
    ToolContext,
    TurnTokenizer,
    function_tool,
)
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools import LifecycleTool
from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from torchrl_agentic.transforms.history import require_list_to_stack

require_list_to_stack()
SCHEMA = OpenAIFunctionToolSchema.model_validate({"function": {"name": "sum", "description": "Add."}})


class Sum(BaseTool):
    """Adds 1 per call to the value of the data set; the final value is its reward."""

    def __init__(self):
        super().__init__({}, SCHEMA)
        self.sums, self.released = {}, 0

    async def create(self, instance_id=None, start=0, **kwargs):
        self.sums[instance_id] = start
        return instance_id, ToolResponse(text=f"starting at {start}")

    async def execute(self, instance_id, parameters, **kwargs):
        self.sums[instance_id] += 1
        return ToolResponse(text=str(self.sums[instance_id])), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.sums[instance_id])

    async def release(self, instance_id, **kwargs):
        self.released += 1
        del self.sums[instance_id]


@function_tool
def check(answer: str, ground_truth: Injected[str]) -> bool:
    """Check an answer.

    Args:
        answer: the answer.
    """
    return answer == ground_truth


def row(number, **more):
    info = {"index": number, "tools_kwargs": {"sum": {"create_kwargs": {"start": 10 * number}}}, **more}
    return {"query": f"q{number}", "ground_truth": str(number), "extra_info": info}


def lists(items):
    return {key: [item[key] for item in items] for key in items[0]}


def env_of(rows, *tools, batch=2, ending=None, **options):
    loader = DataLoader(rows, batch_size=1, collate_fn=lists)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(batch,))
    compose = ToolCompose(tools, **options)
    return TransformedEnv(env, Compose(compose, ending) if ending else compose), compose


def call(tool, **args):
    import json

    return f"<tool_call>{json.dumps({'name': tool, 'arguments': args})}</tool_call>"


def contents(td):
    return [list(row.content) for row in td["history"].prompt]


def test_each_row_is_created_with_its_arguments_and_adds_to_the_prompt():
    target = Sum()
    env, _ = env_of([row(1), row(2)], LifecycleTool(target))
    td = env.reset()
    assert [texts[-1] for texts in contents(td)] == ["starting at 10", "starting at 20"]
    assert td["history"].prompt[0].role[-1] == "tool"
    step = env.step(ScriptedPolicy([[call("sum")], [call("sum")]])(td))
    assert [texts[-1] for texts in contents(step["next"])] == ["11", "21"]
    env.close()
    assert target.released == 2


class TypedSum(Sum):
    async def create(self, instance_id: str, start: int = 0, **kwargs):
        return await super().create(instance_id, start)


def test_a_row_with_an_argument_of_a_wrong_type_is_named_at_the_reset():
    target = TypedSum()
    wrong = {"sum": {"create_kwargs": {"start": "ten"}}}
    env, _ = env_of([row(1), row(2, tools_kwargs=wrong)], LifecycleTool(target))
    message = (
        r"row 1 of the data set: tools_kwargs: sum: create_kwargs: parameter 'start' .* int; got ten \(str\)"
    )
    with pytest.raises(ValueError, match=message):
        env.reset()
    assert target.sums == {}
    env.close()


def test_a_function_gets_the_column_that_it_asks_for():
    env, _ = env_of([row(7, tools_kwargs=None)], check, batch=1)
    step = env.step(ScriptedPolicy([[call("check", answer="7") + call("check", answer="8")]])(env.reset()))
    assert contents(step["next"])[0][-2:] == ["true", "false"]


def test_trajectory_reward_is_reported_once_at_its_end():
    env, _ = env_of([row(1), row(2)], LifecycleTool(Sum()), ending=EndTrajectory(when_no_calls=True))
    policy = ScriptedPolicy([[call("sum"), "done"], ["done", "over"]])
    first = env.step(policy(env.reset()))["next"]
    assert first["agentic", "trajectory_reward"].flatten().tolist() == [0.0, 20.0]
    assert first["agentic", "tool_reward"].flatten().tolist() == [0.5, 0.0]
    env.close()


def test_stop_reports_the_trajectory_reward_too():
    env, _ = env_of([row(3)], LifecycleTool(Sum()), StopTool(), batch=1)
    step = env.step(ScriptedPolicy([[call("sum") + call("stop")]])(env.reset()))["next"]
    assert step["done"].item()
    assert step["agentic", "trajectory_reward"].item() == 31.0
    env.close()


def test_late_trajectory_reward_is_logged_as_a_warning(caplog):
    env, _ = env_of([row(3)] * 4, LifecycleTool(Sum()), batch=1)
    env.reset()
    env.reset()
    env.reset()
    assert caplog.text.count("ToolRewardTransform") == 1
    env.close()


def test_partial_reset_restarts_only_the_masked_rows():
    target = Sum()
    env, _ = env_of([row(number) for number in range(4)], LifecycleTool(target))
    td = env.reset()
    td["_reset"] = (mask := td["done"].clone().fill_(False))
    mask[1] = True
    again = env.reset(td)
    assert target.released == 1
    assert contents(again)[0][-1] == "starting at 0"
    assert contents(again)[1][-1] == contents(again)[1][-1]
    assert len(target.sums) == 2
    env.close()


def test_a_row_may_use_the_tools_that_it_selects():
    rows = [row(1, tool_selection=["check"]), row(2)]
    env, _ = env_of(rows, LifecycleTool(Sum()), check)
    td = env.reset()
    assert [texts[-1] for texts in contents(td)] == ["q1", "starting at 20"]
    step = env.step(ScriptedPolicy([[call("sum")], [call("sum")]])(td))["next"]
    assert [texts[-1] for texts in contents(step)] == ["Error: no tool named 'sum'; available: check", "21"]
    env.close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1, tool_selection=["chek"])], "row 0 of the data set: tool_selection names the tool 'chek'"),
        ([row(1, tool_selection=["chek"])], "did you mean 'check'"),
        ([row(1, tool_selection="check")], "a list of tool names"),
        ([row(1, tools_kwargs={"summ": {}})], "tools_kwargs names the tool 'summ', which does not exist"),
        ([row(1, tools_kwargs={"sum": {"create": {}}})], r"expected create_kwargs, .* got \['create'\]"),
        ([row(1, tools_kwargs={"sum": [1]})], r"expected create_kwargs, .* got \[1\]"),
        ([row(1, tools_kwargs=[1])], "expected tools_kwargs as {tool:"),
        ([row(1, tools_kwargs={"sum": {"create_kwargs": 3}})], "create_kwargs: expected arguments by name"),
        ([row(1, tools_kwargs=None, need_tools_kwargs=True)], "the row has no tools_kwargs"),
        (
            [{**row(1), "data_source": "d", "reward_model": "rule", "agent_name": "single_turn_agent"}],
            "agent_name is 'single_turn_agent', and 'tool_agent' is the only one here",
        ),
        (
            [{"query": "q", "n": 1}],
            "takes its 'ground_truth' from the column 'ground_truth'.*columns: ",
        ),
    ],
)
def test_error_names_the_bad_row_and_the_expected_value(rows, message):
    env, _ = env_of(rows, LifecycleTool(Sum()), check, batch=1)
    with pytest.raises(ValueError, match=message):
        env.reset()
    env.close()


def test_error_says_that_a_plain_environment_drops_columns():
    """TorchRL hands on the query alone."""
    env = TransformedEnv(ChatEnv(batch_size=(1,)), ToolCompose([check]))
    with pytest.raises(ValueError, match=r"columns: query\. Tools see the rows of"):
        env.reset(TensorDict({"query": ["q"], "ground_truth": ["1"]}, batch_size=(1,)))
    env.close()


def test_columns_that_files_filled_up_with_none_are_not_there():
    data = RowData.of({"extra_info": {"tools_kwargs": {"sum": {"create_kwargs": None}, "other": None}}})
    assert data.kwargs("sum", "create_kwargs") == {}
    assert "other" not in data.tools_kwargs


def test_a_row_is_shown_the_tools_that_it_selects():
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    compose = ToolCompose([check, StopTool()])
    tokens = TurnTokenizer(tokenizer, tools=compose.tools, raise_on_drift=True)
    rows = [
        row(1, tools_kwargs=None, tool_selection=["check"]),
        row(2, tools_kwargs=None, tool_selection=[]),
        row(3, tools_kwargs=None),
    ]
    loader = DataLoader(rows, batch_size=1, collate_fn=lists)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(3,))
    env = TransformedEnv(env, Compose(compose, EndTrajectory(max_turns=2), tokens))
    talk = Rollout(env, tokenizer, td=env.reset())

    def shown():
        texts = [tokenizer.decode(row["tokens", "prompt"]) for row in talk.td.unbind(0)]
        return [[name for name in ("check", "stop") if f'"name": "{name}"' in text] for text in texts]

    assert shown() == [["check"], [], ["check", "stop"]]
    for _ in range(2):
        talk.turn(*[Says("well")] * 3)
        assert shown() == [["check"], [], ["check", "stop"]]
    assert talk.drift() == [0, 0, 0]


def test_report_calls_lists_each_call():
    env, _ = env_of([row(1), row(2)], LifecycleTool(Sum()), report_calls=True)
    td = env.reset()
    assert td["agentic", "calls"] == [[], []]
    policy = ScriptedPolicy([[call("sum") * 2, call("sum")], ["no", "no"]])
    td = env.step(policy(td))["next"]
    (first, second), none = td["agentic", "calls"]
    assert none == []
    assert {**first, "call_id": ""} == {
        "call_id": "", "number": 0, "tool": "sum", "status": "ok", "reward": 0.5, "metrics": {},
    }  # fmt: skip
    assert (second["number"], second["call_id"]) == (1, "call_0_1")
    td = env.step(policy(td))["next"]
    assert [entry["number"] for entry in td["agentic", "calls"][0]] == [2]
    env.close()


def test_rollout_with_report_calls_matches_its_specs():
    env, _ = env_of([row(1)] * 8, LifecycleTool(Sum()), report_calls=True)
    found = env.rollout(3, ScriptedPolicy([[call("sum")] * 3, ["no"] * 3]))
    assert found["next", "agentic", "n_calls"].shape == (2, 3, 1)
    env.close()


def test_tools_see_only_the_columns_that_they_request():
    seen = []

    class Curious(Tool):
        name, description = "sum", "Look."

        async def run(self, args, ctx: ToolContext):
            seen.append(ctx.row.columns)

    env, _ = env_of([row(1)], Curious(), batch=1)
    env.step(ScriptedPolicy([[call("sum")]])(env.reset()))
    assert seen == [{}]
    env.close()
