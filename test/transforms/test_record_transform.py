"""What an environment records of its trajectories: all of them, once, with why they ended and what for."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_envs import STOP, add, advance, answer, begin, call, chat_env, collate, dataset_env, step
from helpers.model_families import FAMILIES
from helpers.token_rollouts import Rollout, Says
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    Recorder,
    RecordTransform,
    StopTool,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    TurnTokenizer,
    collate_rows,
    read_records,
)
from torchrl_agentic.interactions import ScriptedUser
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.transforms import UserSimulator

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector


def found(path: Path) -> list[TrajectoryRecord]:
    records = list(read_records(path))
    assert all(isinstance(record, TrajectoryRecord) for record in records)
    return sorted(records, key=lambda record: record.trajectory)  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


def reasons(path: Path) -> dict[str, str]:
    return {local_name(record.trajectory): record.termination_reason for record in found(path)}


def tools(recorder: Recorder) -> ToolCompose:
    return ToolCompose([add, StopTool()], recorder=recorder)


@pytest.fixture
def recorder(tmp_path: Path):
    with Recorder(tmp_path / "dump") as made:
        yield made


@pytest.fixture
def dump(recorder: Recorder):
    """Reads the current records."""

    def read() -> list[TrajectoryRecord]:
        recorder.flush()
        return found(recorder.path) if recorder.path.exists() else []

    return read


def test_a_row_is_recorded_as_soon_as_it_is_done(recorder: Recorder, dump: Any):
    """The other continues."""
    env = chat_env((2,), tools(recorder), EndTrajectory(when_no_calls=True), RecordTransform())
    td = step(env, begin(env), "the answer", call("add", a=1, b=2))
    (first,) = dump()
    assert (local_name(first.trajectory), first.termination_reason) == ("0.0", "no_calls")
    assert [message.text for message in first.messages] == ["q0", "the answer"]
    td = step(env, env.step_mdp(td), "", "done")
    assert [(local_name(record.trajectory), len(record.turns)) for record in dump()] == [
        ("0.0", 1),
        ("1.0", 2),
    ]


def test_without_the_transform_a_row_is_recorded_at_the_next_step(recorder: Recorder, dump: Any):
    env = dataset_env(2, tools(recorder), EndTrajectory(when_no_calls=True))
    env.step_and_maybe_reset(answer(env.reset(), "the answer", call("add", a=1, b=2)))
    assert [(local_name(record.trajectory), record.termination_reason) for record in dump()] == [
        ("0.0", "no_calls")
    ]


def test_a_row_that_is_stepped_after_its_end_is_not_recorded_again(recorder: Recorder, dump: Any):
    env = chat_env((2,), tools(recorder), EndTrajectory(when_no_calls=True), RecordTransform())
    td = begin(env)
    for _ in range(3):
        td = advance(env, td, "", call("add", a=1, b=2))
    assert [(local_name(record.trajectory), len(record.turns)) for record in dump()] == [("0.0", 1)]
    env.close()
    assert [(local_name(record.trajectory), len(record.turns)) for record in dump()] == [
        ("0.0", 1),
        ("1.0", 3),
    ]


def test_each_end_has_its_reason(recorder: Recorder):
    end = EndTrajectory(max_turns=2, when_no_calls=True)
    env = chat_env((3,), tools(recorder), end, RecordTransform())
    td = advance(env, begin(env), STOP, "done", call("add", a=1, b=2))
    advance(env, td, "", "", call("add", a=1, b=2))
    env.close()
    recorder.flush()
    assert reasons(recorder.path) == {"0.0": "stop_tool", "1.0": "no_calls", "2.0": "max_turns"}


def test_unfinished_trajectories_are_recorded_as_unfinished(recorder: Recorder):
    env = dataset_env(2, tools(recorder))
    td = advance(env, env.reset(), "a", "b")
    td["_reset"] = torch.tensor([[True], [False]])
    td = env.reset(td)
    advance(env, td, "c", "d")
    env.close()
    recorder.flush()
    assert reasons(recorder.path) == {"0.0": "reset", "0.1": "closed", "1.0": "closed"}


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_end_by_another_transform_is_named_by_its_flag(recorder: Recorder, flag: str):
    from torchrl.envs.transforms import Transform

    class Ending(Transform):
        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            done = next_tensordict.get("done") | True
            return next_tensordict.set(flag, done).set("done", done)

    env = chat_env((1,), tools(recorder), Ending(), RecordTransform())
    step(env, begin(env), "x")
    recorder.flush()
    assert reasons(recorder.path) == {"0.0": flag}


def test_user_who_leaves_is_the_recorded_reason_with_the_last_message(recorder: Recorder, dump: Any):
    """The last message came after the last turn was recorded."""
    user = UserSimulator(ScriptedUser(["and?", "bye"]))
    env = chat_env((1,), tools(recorder), user, RecordTransform())
    td = begin(env)
    while not dump():
        td = advance(env, td, "hello")
    (record,) = dump()
    assert record.termination_reason == "user"
    texts = [message.text for message in record.messages]
    assert texts[:4] == ["q0", "hello", "and?", "hello"]
    assert texts.count("and?") == 1


def test_rewards_of_the_environment_are_recorded_per_turn(recorder: Recorder, dump: Any):
    def scored(n: float) -> ToolResult:
        """Give a number."""
        return ToolResult.from_value("ok", reward=n)

    env = chat_env(
        (1,), ToolCompose([scored], recorder=recorder), EndTrajectory(when_no_calls=True),
        ToolRewardTransform(), RecordTransform(),
    )  # fmt: skip
    td = advance(env, begin(env), call("scored", n=0.5))
    step(env, td, "done")
    (record,) = dump()
    assert (record.rewards, record.score) == ((0.5, 0.0), 0.5)
    assert next(iter(record.calls))[2].reward == 0.5


def answered(rows: list[dict[str, Any]], *transforms: Any) -> TransformedEnv:
    loader = DataLoader(rows, collate_fn=collate_rows)  # pyright: ignore[reportArgumentType]
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(len(rows),))
    return env.append_transform(Compose(*transforms))


ROWS = [{"query": "2+2", "answer": "4", "level": 3}, {"query": "1+1", "answer": "2", "level": 1}]


def test_expected_answer_and_other_columns_come_from_the_data_set(recorder: Recorder, dump: Any):
    transforms = (
        tools(recorder), EndTrajectory(when_no_calls=True), AnswerRewardTransform(),
        RecordTransform(extras={"difficulty": "level", "errors": ("agentic", "n_errors")}),
    )  # fmt: skip
    env = answered(ROWS, *transforms)
    step(env, env.reset(), "It is 4", "It is 3")
    assert [(record.gts, record.score, dict(record.extras)) for record in dump()] == [
        ("4", 1.0, {"difficulty": 3, "errors": 0}), ("2", 0.0, {"difficulty": 1, "errors": 0}),
    ]  # fmt: skip


def test_the_column_of_the_right_answer_can_be_named(recorder: Recorder, dump: Any):
    env = answered(ROWS, tools(recorder), EndTrajectory(when_no_calls=True), RecordTransform(gts="level"))
    step(env, env.reset(), "a", "b")
    assert [record.gts for record in dump()] == [3, 1]


def test_tokens_are_recorded_with_their_sources(recorder: Recorder, dump: Any):
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    compose = tools(recorder)
    turns = TurnTokenizer(tokenizer, tools=compose.tools)
    env = chat_env((2,), compose, EndTrajectory(when_no_calls=True), turns, RecordTransform(tokens=True))
    talk = Rollout(env, tokenizer)
    talk.turn(Says(call("add", a=20, b=22)), Says("no"))
    talk.turn(Says("It is 42"), Says(""))
    for record in dump():
        assert record.tokens is not None
        ledger, texts = record.tokens.ledger, record.tokens.texts
        assert "".join(texts) == tokenizer.decode(ledger.ids)
        by_source = {span.name: text for span, text in zip(ledger.spans(), texts, strict=True)}
        is_first = local_name(record.trajectory) == "0.0"
        assert by_source.get("call 0") == ("42" if is_first else None)
        assert by_source["sampled"].startswith("It is 42" if is_first else "no")


def test_tokens_need_a_tokenizer(recorder: Recorder):
    env = chat_env((1,), tools(recorder), EndTrajectory(when_no_calls=True), RecordTransform(tokens=True))
    with pytest.raises(RuntimeError, match="needs a TurnTokenizer"):
        step(env, begin(env), "x")


@pytest.mark.parametrize("before", [(), (ToolCompose([add]),)])
def test_without_a_recorder_the_error_names_its_place(before: tuple[Any, ...]):
    env = chat_env((1,), *before, RecordTransform())
    with pytest.raises(RuntimeError, match=r"ToolCompose\(\.\.\., recorder=Recorder"):
        step(env, begin(env), "x")


def test_clones_and_other_environments_share_a_recorder(recorder: Recorder, dump: Any):
    """All of them name their first trajectory 0.0."""
    env = chat_env((1,), tools(recorder))
    other = TransformedEnv(ChatEnv(batch_size=(1,)), env.transform.clone())
    step(env, begin(env), "one")
    step(other, begin(other), "other")
    for each in (env, other):
        each.close()
    assert sorted(record.turns[0].message.text for record in dump()) == ["one", "other"]


def test_pickled_environment_keeps_its_recorder_and_drops_trajectories(recorder: Recorder, dump: Any):
    env = chat_env((1,), tools(recorder))
    step(env, begin(env), "here")
    copy = pickle.loads(pickle.dumps(env))
    step(copy, begin(copy), "there")
    copy.close()
    copy.transform.hook.hook.close()
    assert [record.turns[0].message.text for record in dump()] == ["there"]
    env.close()
    assert sorted(record.turns[0].message.text for record in dump()) == ["here", "there"]


def test_fork_does_not_record_trajectories_of_its_parent(recorder: Recorder, dump: Any):
    env = chat_env((1,), tools(recorder))
    td = advance(env, begin(env), "parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            step(env, begin(env), "child")
            env.close()
            recorder.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    step(env, td, "parent again")
    env.close()
    texts = sorted([turn.message.text for turn in record.turns] for record in dump())
    assert texts == [["child"], ["parent", "parent again"]]


def test_batches_of_more_dimensions_are_recorded_row_by_row(recorder: Recorder, dump: Any):
    env = chat_env((2, 2), tools(recorder), EndTrajectory(when_no_calls=True), RecordTransform())
    step(env, begin(env), "a", "b", "c", "d")
    assert [(record.row, record.turns[0].message.text) for record in dump()] == list(enumerate("abcd"))


@pytest.mark.filterwarnings(
    "ignore:The env passed to LLMCollector is missing:FutureWarning",
    "ignore:(Prompt|Full) history should have one more batch dimension",
)
def test_a_rollout_of_a_collector_is_recorded(recorder: Recorder, dump: Any):
    """Whose environment resets rows by itself."""
    transforms = tools(recorder), EndTrajectory(max_turns=2), RecordTransform()
    loader = DataLoader([{"query": f"q{i}"} for i in range(8)], collate_fn=collate)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(2,))
    env.append_transform(Compose(*transforms))
    policy = ScriptedPolicy([[call("add", a=1, b=1)] * 50] * 2)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=8)
    try:
        list(collector)
    finally:
        collector.shutdown()
    records = [record for record in dump() if record.termination_reason != "reset"]
    assert len(records) == 4
    assert {record.termination_reason for record in records} == {"max_turns"}
    assert all(len(record.turns) == 2 for record in records)


def test_messages_and_results_are_recorded_completely(recorder: Recorder, dump: Any):
    env = chat_env((1,), tools(recorder))
    td = env.reset(TensorDict({"query": ["sum?"]}, batch_size=(1,)))
    step(env, td, "Let me see. " + call("add", "mine", a=20, b=22))
    env.close()
    (record,) = dump()
    ((turn, sent, result),) = record.calls
    assert (turn.index, sent.call_id, sent.args, result.text) == (0, "mine", {"a": 20, "b": 22}, "42")
    assert result.timing is not None
    assert result.timing.run_s >= 0
    assert turn.outcome.cleaned_text == "Let me see. "
    assert [(message.role, message.tool_call_id) for message in record.messages][-1] == ("tool", "mine")
