"""`compare`: two evaluations differ by task, with a p-value; tasks that cannot be compared are counted."""

import importlib
import json
import pkgutil

import pytest

from torchrl_agentic import evaluation
from torchrl_agentic.collectors import Score
from torchrl_agentic.evaluation import EvalResult, EvalSample, compare


def result(values, name="a", expected=None, scorer="answer"):
    """Return an evaluation with these values of each task."""
    samples = [
        EvalSample(
            task, epoch, scores={scorer: Score(float(value))}, expected=(expected or {}).get(task, "yes")
        )
        for task, given in values.items()
        for epoch, value in enumerate(given, 1)
    ]
    epochs = max(map(len, values.values()), default=1)
    return EvalResult(name, samples, list(values), [scorer], epochs)


def test_tasks_that_flip_are_listed_and_tested():
    first = result({str(n): [n < 10] for n in range(20)}, "old")
    second = result({str(n): [n < 18 and n != 3] for n in range(20)}, "new")
    found = compare(first, second)
    change = found.changes["answer"]
    assert (change.first, change.second) == (0.5, 0.85)
    assert change.difference.value == pytest.approx(0.35)
    assert change.difference.p_value == pytest.approx(2 * (1 + 9) / 2**9)
    assert (change.better, change.worse) == ([str(n) for n in range(10, 18)], ["3"])
    assert "new compared with old, task by task" in str(found)
    assert "answer, worse: 3" in str(found)
    assert json.loads(json.dumps(found.to_json()))["changes"]["answer"]["test"] == "exact McNemar"


def test_epochs_are_averaged_and_need_not_be_as_many():
    first = result({"a": [1, 0], "b": [0, 0], "c": [1, 1]})
    second = result({"a": [1], "b": [0], "c": [1]})
    change = compare(first, second).changes["answer"]
    assert (change.better, change.worse, change.difference.test) == (["a"], [], "paired t")
    assert change.difference.value == pytest.approx(0.5 / 3)


def test_only_tasks_of_both_with_the_same_right_answer_are_compared():
    first = result({"a": [1], "b": [1], "c": [1]})
    second = result({"b": [0], "c": [1], "d": [1]}, expected={"c": "no"})
    found = compare(first, second)
    assert found.changes["answer"].difference.n_tasks == 1
    assert found.n_unmatched == 3
    assert "3 tasks are in one of the two only, or differ" in str(found)


def test_runs_that_share_nothing_say_so():
    found = compare(result({"a": [1]}), result({"a": [1]}, scorer="other"))
    assert found.changes == {}
    assert "share no task with a score of the same name" in str(found)


def test_public_names_are_no_modules_whichever_is_imported_first():
    for module in pkgutil.iter_modules(evaluation.__path__):
        importlib.import_module(f"torchrl_agentic.evaluation.{module.name}")
    assert {name for name in evaluation.__all__ if not callable(getattr(evaluation, name))} == set()
