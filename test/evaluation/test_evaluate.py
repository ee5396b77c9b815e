"""`evaluate`: every task is asked in every epoch and scored; failures are counted, and lose nothing else."""

import asyncio
import json
import threading

import pytest
from helpers.collector_worlds import tokenizer
from helpers.limit import limit

from torchrl_agentic import Message, PythonTool, Task, ToolCompose, evaluate
from torchrl_agentic.collectors import Score
from torchrl_agentic.engines import ChatEngine, EngineUnusable, RecordedEngine, ScriptedEngine, Usage
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.evaluation import EvalInterrupted, EvalResult, aevaluate
from torchrl_agentic.records import TrajectoryRecord, read_records
from torchrl_agentic.testing import load_tiny, tiny_questions

SYSTEM = "You solve problems with a Python tool."


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def task(name, answer="yes", **more):
    return Task(name, [{"role": "user", "content": f"question {name}"}], answer, **more)


class Replies(ChatEngine):
    """Answers each task by a function of its name and epoch, and counts the requests."""

    def __init__(self, reply=lambda name, epoch: "yes", max_concurrent=4):
        self.reply, self.max_concurrent, self.version = reply, max_concurrent, 0
        self.asked = []

    async def chat(self, messages, *, tools, max_tokens, key):
        name = key.rpartition("/")[0]
        self.asked.append(name)
        found = self.reply(name, self.asked.count(name))
        found = await found if asyncio.iscoroutine(found) else found
        if isinstance(found, BaseException):
            raise found
        return Message("assistant", found)

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def run(tasks, engine, **options):
    return evaluate(tasks, [], engine, **{"engine_retries": 0, "retries": 0, **options})


@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_a_model_is_evaluated_in_the_order_of_the_tasks(tiny, mode):
    rows = [
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": one["query"]}],
         "answer": one["answer"], "name": f"q{number}"}
        for number, one in enumerate(tiny_questions(5, seed=3))
    ]  # fmt: skip
    options = {"use_inference_chat_template": True} if mode == "history" else {}
    turns = []
    result = evaluate(
        rows,
        ToolCompose([PythonTool()], recorder=turns.append),
        *tiny,
        max_in_flight=2,
        temperature=0.0,
        max_new_tokens=64,
        tokenizer_options=options,
    )
    assert [sample.task for sample in result.samples] == [row["name"] for row in rows]
    assert [sample.expected for sample in result.samples] == [row["answer"] for row in rows]
    assert sum(sample.score for sample in result.samples) >= 4
    assert result.is_whole
    assert len(turns) == sum(sample.n_turns for sample in result.samples)
    assert all((sample.trajectory.ledger is not None) == (mode == "tokens") for sample in result.samples)
    assert result.usage.completion > 5 * 20
    assert result.usage.prompt > 5 * 100


def test_samples_that_a_bound_cut_short_are_counted_below_the_table(tiny):
    rows = [task(f"q{number}", one["answer"]) for number, one in enumerate(tiny_questions(3, seed=3))]
    result = evaluate(rows, ToolCompose([PythonTool()]), *tiny, max_turns=3, max_new_tokens=3)
    assert "3 of 3 samples were cut short: 3 by max_new_tokens" in str(result)
    assert "cut short" not in str(run([task("a")], Replies()))


def test_each_task_is_asked_once_per_epoch_and_results_have_the_order_of_the_tasks():
    first, last = asyncio.Event(), []

    async def reply(name, epoch):
        if name == "a" and epoch == 1:
            await first.wait()
        last.append(name)
        if len(last) == 5:
            first.set()
        return "yes" if name == "a" or epoch == 2 else "no"

    engine = Replies(reply, max_concurrent=2)
    result = run([task("a"), task("b"), task("c")], engine, epochs=2, pass_at=[1, 2], max_in_flight=2)
    assert sorted(engine.asked) == ["a", "a", "b", "b", "c", "c"]
    assert [(sample.task, sample.epoch) for sample in result.samples] == [
        (name, epoch) for name in "abc" for epoch in (1, 2)
    ]
    assert last[-1] == "a"
    metric = result.metrics["answer"]
    assert metric.mean.value == pytest.approx(2 / 3)
    assert {k: one.value for k, one in metric.pass_at.items()} == {1: pytest.approx(2 / 3), 2: 1.0}
    assert metric.pass_hat[2].value == pytest.approx(1 / 3)


def test_the_table_shows_each_estimate_with_its_interval():
    tasks = [task(name) for name in "abc"]
    result = run(tasks, Replies(), epochs=2, pass_at=[1, 2])
    lines = [line.split() for line in str(result).splitlines()]
    assert ["score", "estimate", "value", "95%", "interval", "tasks", "samples"] in lines
    assert ["answer", "mean", "1.000", "0.439", "to", "1.000", "3", "6"] in lines
    for name in ("pass@1", "pass@2", "pass^2"):
        assert [name, "1.000", "0.439", "to", "1.000", "3", "6"] in lines
    assert "pass@1" not in str(run(tasks, Replies()))


def test_several_scorers_sync_and_async_run_at_the_same_time_and_keep_their_reasons():
    began = threading.Event()

    def slow(trajectory):
        assert began.wait(limit(20)), "the other scorer waits for this one"
        return trajectory.answer == "yes"

    async def quick(trajectory):
        began.set()
        return Score(0.5, "found", "half of it", {"form": 1.0})

    result = run([task("a")], Replies(), scorers={"slow": slow, "quick": quick})
    (sample,) = result.samples
    assert sample.scores["slow"] == Score(1.0)
    assert sample.scores["quick"] == Score(0.5, "found", "half of it", {"form": 1.0})
    assert sample.score == 1.0
    assert list(result.metrics) == ["slow", "quick"]


def test_scorers_see_the_task_as_it_was_given_and_other_trajectories_go_on_meanwhile():
    seen, others = [], threading.Event()

    def scorer(trajectory):
        seen.append(trajectory.task)
        if trajectory.task.name == "a":
            assert others.wait(limit(20)), "the other trajectories wait for this scorer"
        else:
            others.set()
        return 1

    tasks = [task("a", data={"column": 1}), task("b")]
    run(tasks, Replies(max_concurrent=1), scorers=scorer, max_in_flight=2)
    assert sorted(seen, key=lambda one: one.name) == tasks


def test_a_scorer_that_raises_fails_its_sample_and_no_other():
    def scorer(trajectory):
        if trajectory.task.name == "b":
            raise (LookupError("no such key") if trajectory.task.answer else SystemExit("bye"))
        return 1

    result = run(
        [task("a"), task("b"), task("c")], Replies(), scorers={"mine": scorer, "other": lambda one: 0}
    )
    assert [sample.score_errors for sample in result.samples] == [
        {},
        {"mine": "LookupError: no such key"},
        {},
    ]
    assert [dict(sample.scores) for sample in result.samples][1] == {"other": Score(0.0)}
    assert result.failures == {"scorer": 1}
    assert not result.is_whole
    assert result.metrics["mine"].mean.n_samples == 2
    assert (result.metrics["mine"].n_errors, result.metrics["other"].n_errors) == (1, 0)


def test_a_task_without_an_answer_has_no_default_score():
    result = run([task("a"), task("b", None)], Replies())
    assert [sample.score for sample in result.samples] == [1.0, None]
    assert result.is_whole
    assert result.score == 1.0


def test_samples_that_fail_are_counted_with_their_errors_and_the_others_are_scored():
    def reply(name, epoch):
        return {"b": InfrastructureError("lost"), "c": ValueError("refused"), "d": KeyError("bug")}.get(
            name, "yes"
        )

    result = run([task(name) for name in "abcde"], Replies(reply), fail_above=1.0)
    assert [(sample.task, sample.failure) for sample in result.failed] == [
        ("b", "engine"),
        ("c", "crash"),
        ("d", "engine"),
    ]
    assert [sample.error for sample in result.failed][:2] == ["lost", "refused"]
    assert result.failures == {"engine": 2, "crash": 1}
    assert result.metrics["answer"].mean.n_samples == 2
    assert not result.is_whole
    assert "3 samples failed: 2 engine, 1 crash" in str(result)


def test_a_failed_sample_is_begun_again_as_often_as_retries_say():
    def reply(name, epoch):
        return InfrastructureError("lost") if name == "b" and epoch <= 2 else "yes"

    engine = Replies(reply)
    assert run([task("a"), task("b")], engine, retries=2).is_whole
    assert engine.asked.count("b") == 3
    engine = Replies(reply)
    assert len(run([task("a"), task("b")], engine, retries=1).failed) == 1
    assert engine.asked.count("b") == 2


def test_a_trajectory_that_takes_too_long_is_a_failed_sample():
    async def reply(name, epoch):
        if name == "a":
            await asyncio.sleep(3600)
        return "yes"

    result = run([task("a"), task("b")], Replies(reply), trajectory_timeout=0.2)
    assert [sample.failure for sample in result.samples] == ["timeout", ""]


def test_no_more_samples_are_asked_once_too_many_have_failed():
    engine = Replies(lambda name, epoch: InfrastructureError("down"), max_concurrent=1)
    result = run([task(str(number)) for number in range(20)], engine, fail_above=0.2, max_in_flight=1)
    assert result.stopped == "failures"
    assert 5 <= len(engine.asked) <= 7
    assert result.n_missing == 20 - len(engine.asked)
    assert "too many samples failed" in str(result)


def test_a_service_that_is_down_from_the_start_ends_the_evaluation_early():
    engine = Replies(lambda name, epoch: InfrastructureError("down"), max_concurrent=1)
    result = run([task(str(number)) for number in range(500)], engine, max_in_flight=1)
    assert result.stopped == "failures"
    assert 32 <= len(engine.asked) <= 35


def test_all_samples_are_asked_with_fail_above_one():
    engine = Replies(lambda name, epoch: InfrastructureError("down"))
    result = run([task(str(number)) for number in range(130)], engine, fail_above=1.0)
    assert (len(engine.asked), len(result.failed), result.stopped) == (130, 130, "")


class Metered(Replies):
    """An engine that says what its requests have used."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.usage, self.by_key = Usage(), {}

    def usage_of(self, key):
        return self.by_key.get(key, Usage())

    async def chat(self, messages, *, tools, max_tokens, key):
        used = Usage(1, prompt=80, completion=20, cost=0.25)
        self.usage, self.by_key[key] = self.usage + used, self.usage_of(key) + used
        return await super().chat(messages, tools=tools, max_tokens=max_tokens, key=key)


@pytest.mark.parametrize(
    ("limit", "stopped"), [({"max_cost": 1.0}, "cost"), ({"max_total_tokens": 400}, "tokens")]
)
def test_limits_on_tokens_and_cost_stop_new_samples_and_keep_the_results(limit, stopped):
    engine = Metered(max_concurrent=1)
    result = run([task(str(number)) for number in range(20)], engine, max_in_flight=1, **limit)
    assert result.stopped == stopped
    assert 4 <= len(result.samples) <= 6
    assert result.usage.tokens == 100 * len(engine.asked)
    assert result.usage.cost == 0.25 * len(engine.asked)
    assert not result.is_whole
    assert result.score == 1.0


class Uncounted(Metered):
    """A metered engine whose responses report neither tokens nor cost."""

    def __init__(self, *arguments, counted=(), **options):
        super().__init__(*arguments, **options)
        self.counted = counted

    async def chat(self, messages, *, tools, max_tokens, key):
        if key.rpartition("/")[0] in self.counted:
            return await super().chat(messages, tools=tools, max_tokens=max_tokens, key=key)
        used = Usage.of_response(None, None)
        self.usage, self.by_key[key] = self.usage + used, self.usage_of(key) + used
        return await Replies.chat(self, messages, tools=tools, max_tokens=max_tokens, key=key)


class Unpriced(Metered):
    """A metered engine that will never know its cost."""

    may_know_cost = False


@pytest.mark.parametrize(
    ("engine", "limit", "problem"),
    [
        (Replies, {"max_cost": 1.0}, "max_cost needs"),
        (Unpriced, {"max_cost": 1.0}, "max_cost needs"),
        (Replies, {"max_total_tokens": 100}, "max_total_tokens needs"),
        (Metered, {"max_trajectory_tokens": 100}, "max_trajectory_tokens needs"),
    ],
)
def test_a_limit_that_an_engine_can_never_reach_is_an_error_before_the_first_request(
    engine, limit, problem, tmp_path
):
    made = engine()
    with pytest.raises(ValueError, match=problem):
        run([task("a")], made, out=tmp_path / "out", **limit)
    assert made.asked == []
    assert not (tmp_path / "out").exists()


def test_a_model_on_this_machine_has_no_cost_to_limit(tiny):
    with pytest.raises(ValueError, match="max_cost needs"):
        evaluate([task("a")], [], *tiny, max_cost=1.0)


def test_no_more_samples_are_asked_if_responses_turn_out_to_have_no_cost():
    engine = Uncounted(max_concurrent=1)
    result = run([task(str(number)) for number in range(50)], engine, max_in_flight=1, max_cost=1.0)
    assert result.stopped == "unpriced"
    assert 1 <= len(engine.asked) < 5
    assert "give the engine a price" in str(result)


def test_a_cost_that_some_responses_report_is_limited_with_one_warning(caplog):
    engine = Uncounted(max_concurrent=1, counted={str(number) for number in range(1, 50)})
    engine.usage = Usage(1, cost=3.0)  # of an earlier evaluation
    tasks = [task("1"), task("0"), *(task(str(number)) for number in range(2, 20))]
    result = run(tasks, engine, max_in_flight=1, max_cost=1.0)
    assert result.stopped == "cost"
    assert sum("report no usage" in record.message for record in caplog.records) == 1


def test_a_judge_without_a_price_is_said_below_the_table_and_once_in_the_log(caplog):
    judge = Metered()

    async def judged(trajectory):
        judge.usage += Usage.of_response({"prompt_tokens": 5, "completion_tokens": 5}, None)
        return 1

    tasks = [task(str(number)) for number in range(5)]
    result = run(tasks, Metered(), scorers=judged, scorer_engines=[judge], max_cost=9.0)
    assert result.is_whole
    assert "5 of 10 responses have no known cost" in str(result)
    assert sum("report no cost" in record.message for record in caplog.records) == 1


def test_absent_usage_is_said_below_the_table_and_once_in_the_log(caplog, tmp_path):
    tasks = [task(str(number)) for number in range(5)]
    result = run(tasks, Uncounted(), max_total_tokens=10, out=tmp_path / "out")
    assert (result.stopped, len(result.samples)) == ("", 5)
    assert "5 of 5 responses reported no usage" in str(result)
    (warning,) = [record.message for record in caplog.records if "report no usage" in record.message]
    assert "max_total_tokens" in warning
    assert "5 of 5 responses reported no usage" in str(EvalResult.read(tmp_path / "out"))
    caplog.clear()
    run(tasks, Uncounted())
    assert "report no usage" not in caplog.text


def test_tokens_and_cost_of_the_engines_of_scorers_count_for_the_limits():
    judge = Metered()

    async def judged(trajectory):
        await judge.chat([], tools=(), max_tokens=1, key="judge")
        return 1

    def asked(engine, **options):
        judge.usage = Usage(3, prompt=300, cost=0.75)  # of an earlier evaluation
        tasks = [task(str(number)) for number in range(20)]
        return run(tasks, engine, scorers=judged, max_in_flight=1, scorer_engines=[judge], **options)

    result = asked(Metered(max_concurrent=1))
    assert (result.usage.requests, result.usage.tokens, result.usage.cost) == (40, 4000, 10.0)
    assert all(sample.usage.requests == 1 for sample in result.samples)
    assert asked(judge).usage.requests == 40, "an engine that also judges counts once"
    result = asked(Replies(max_concurrent=1), max_cost=1.0)
    assert result.stopped == "cost"
    assert 4 <= len(result.samples) <= 6
    with pytest.raises(TypeError, match="scorer_engines"):
        run([task("a")], Replies(), scorer_engines=[Replies()])


def test_a_limit_that_the_last_sample_reaches_does_not_stop_anything():
    result = run([task("a"), task("b")], Metered(), max_total_tokens=200)
    assert (result.stopped, result.is_whole) == ("", True)


def test_usage_is_known_by_sample_and_that_of_replaced_trajectories_counts():
    def reply(name, epoch):
        return InfrastructureError("lost") if name == "b" and epoch == 1 else "yes"

    engine = Metered(reply)
    engine.usage = Usage(7, prompt=700)  # of an earlier evaluation
    result = run([task("a"), task("b")], engine, retries=1)
    assert [sample.usage.requests for sample in result.samples] == [1, 1]
    assert (result.usage.requests, result.usage.prompt, result.usage.cost) == (3, 240, 0.75)


def test_an_engine_that_refuses_every_request_ends_the_evaluation_with_its_error():
    engine = Replies(lambda name, epoch: EngineUnusable("check api_key"))
    with pytest.raises(EngineUnusable, match="check api_key"):
        run([task("a"), task("b")], engine)

    def later(name, epoch):
        return "yes" if name == "a" else EngineUnusable("no credit is left")

    result = run([task("a"), task("b"), task("c")], Replies(later, 1), max_in_flight=1)
    assert (result.stopped, [sample.task for sample in result.samples]) == ("engine", ["a"])
    assert "no credit is left" in str(result)


def test_progress_counts_up_to_the_end_with_an_estimate():
    states = []
    reply = {"b": InfrastructureError("lost")}
    run(
        [task(name) for name in "abc"],
        Metered(lambda name, _: reply.get(name, "yes")),
        progress=states.append,
    )
    assert [state.done for state in states] == [0, 1, 2, 3]
    assert {state.total for state in states} == {3}
    assert (states[0].sample, states[0].eta_s) == (None, None)
    assert states[-1].eta_s == 0.0
    assert (states[-1].failed, states[-1].usage.tokens) == (1, 300)
    assert sorted(state.sample.task for state in states[1:]) == ["a", "b", "c"]


def test_an_interrupt_leaves_the_results_so_far(tmp_path):
    def progress(state):
        if state.done == 2:
            raise KeyboardInterrupt

    engine = Replies(max_concurrent=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        run([task(name) for name in "abcd"], engine, max_in_flight=1, progress=progress, out=tmp_path / "out")
    assert isinstance(caught.value, EvalInterrupted)
    result = caught.value.result
    assert (result.stopped, len(result.samples)) == ("interrupted", 2)
    assert EvalResult.read(tmp_path / "out").samples == result.samples


def test_an_exception_of_the_progress_function_is_raised():
    def progress(state):
        if state.done:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run([task("a")], Replies(), progress=progress)
    with pytest.raises(ZeroDivisionError, match="mine"):
        run([task("a")], Replies(lambda name, epoch: InfrastructureError("lost")), progress=progress)


async def test_an_evaluation_is_awaited_while_the_event_loop_goes_on():
    went_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def scorer(trajectory):
        loop.call_soon_threadsafe(went_on.set)
        while not went_on.is_set():
            await asyncio.sleep(0)
        return 1

    result = await aevaluate([task("a")], [], Replies(), scorers=scorer)
    assert result.score == 1.0


async def test_an_evaluation_that_is_cancelled_asks_no_more():
    asked, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def scorer(trajectory):
        loop.call_soon_threadsafe(asked.set)
        assert goes_on.wait(limit(20))
        return 1

    engine = Replies(max_concurrent=1)
    names = [str(number) for number in range(50)]
    running = asyncio.ensure_future(
        aevaluate([task(name) for name in names], [], engine, scorers=scorer, max_in_flight=1)
    )
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = threading.active_count()
    goes_on.set()
    while threading.active_count() > before:
        await asyncio.sleep(0.01)
    assert len(engine.asked) < 5


def test_evaluate_works_inside_a_running_event_loop():
    async def main():
        return run([task("a")], Replies())

    assert asyncio.run(main()).score == 1.0


def test_a_file_of_questions_is_read_and_limited(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"question": str(n), "answer": "yes"}) + "\n" for n in range(5)))
    result = run(str(file), Replies(), limit=3)
    assert [sample.task for sample in result.samples] == ["test-0", "test-1", "test-2"]
    assert result.is_whole


def test_recorded_answers_are_evaluated_without_tokens():
    engine = RecordedEngine({"a": [Message("assistant", "It is 49.")], "b": [Message("assistant", "no")]})
    result = run([task("a", "49"), task("b", "50")], engine)
    assert [sample.score for sample in result.samples] == [1.0, 0.0]
    assert [sample.trajectory.ledger for sample in result.samples] == [None, None]
    assert [sample.answer for sample in result.samples] == ["It is 49.", "no"]


def test_results_are_a_dump_that_the_viewer_reads(tmp_path, tiny):
    _, tokenizer = tiny
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "6 * 7"}}\n</tool_call>'
    engine = ScriptedEngine({"a": [call, "yes"], "b": ["no"]}, tokenizer)
    result = evaluate(
        [task("a"), task("b")], [PythonTool()], engine, tokenizer, epochs=2, out=tmp_path / "out"
    )
    records = list(read_records(tmp_path / "out"))
    assert all(isinstance(record, TrajectoryRecord) for record in records)
    by_name = {record.trajectory: record for record in records}
    assert set(by_name) == {"a", "a #2", "b", "b #2"}
    assert [message.role for message in by_name["a"].messages] == ["user", "assistant", "tool", "assistant"]
    assert (by_name["a"].score, by_name["b"].score, by_name["a"].gts) == (1.0, 0.0, "yes")
    assert by_name["a"].extras["epoch"] == 1
    assert "no<|im_end|>" in by_name["b"].tokens.texts
    assert len({record.run for record in records}) == 1
    again = EvalResult.read(tmp_path / "out")
    assert again.samples == result.samples
    assert again.metrics == result.metrics
    assert all(sample.trajectory is None for sample in result.samples)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"epochs": 0}, ValueError, "epochs"),
        ({"epochs": 2, "pass_at": 3}, ValueError, "pass@3 needs at least 3 samples"),
        ({"fail_above": 2}, ValueError, "fail_above"),
        ({"limit": 0}, ValueError, "limit"),
        ({"max_cost": -1}, ValueError, "max_cost"),
        ({"max_total_tokens": 0}, ValueError, "max_total_tokens"),
        ({"parser": "hermes", "tools": ToolCompose([])}, ValueError, "has a parser already"),
        ({"progress": 3}, TypeError, "progress"),
        ({"resume": True}, ValueError, "pass out="),
        ({"retries": -1}, ValueError, "retries"),
        ({"scorers": "exact_match"}, TypeError, "a function of a Trajectory"),
        ({"scorers": [len, len]}, ValueError, "two scorers are named 'len'"),
        ({"scorers": {"a": 3}}, TypeError, "scorer 'a' is a function of a Trajectory; got int"),
        ({"scorers": {}}, ValueError, "no scorers"),
        ({"tasks": []}, ValueError, "empty"),
        ({"tasks": [{"query": None}]}, ValueError, "row"),
        ({"temperature": 0.5}, ValueError, "an engine has a temperature of its own"),
        ({"tool_choice": "auto"}, ValueError, "structural tags need vLLM"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(options, error, problem):
    tasks, tools = options.pop("tasks", [task("a")]), options.pop("tools", [])
    with pytest.raises(error, match=problem):
        evaluate(tasks, tools, Replies(), **options)


def test_models_that_cannot_be_evaluated_are_rejected(tiny):
    with pytest.raises(TypeError, match="a transformers model, a vLLM engine or an Engine"):
        evaluate([task("a")], [], "model", tiny[1])
    with pytest.raises(ValueError, match="structural tags need vLLM"):
        evaluate([task("a")], [], *tiny, tool_choice="auto")


def test_a_template_that_shows_no_tools_gets_them_in_the_system_message(tiny):
    seen = []

    def script(key, turn, ids):
        seen.append(tokenizer().decode(ids))
        return "yes"

    given = task("a")
    result = evaluate([given], [PythonTool()], ScriptedEngine(script, tokenizer()), tokenizer())
    assert "# Tools" in seen[0]
    assert '"python"' in seen[0].replace(" ", "")
    assert result.samples[0].trajectory.task == given
