"""What an engine samples from, and the warning if a loss would be biased."""

from typing import Any

import pytest
from helpers.collector_worlds import CountedTool, WildEngine, collector_of, looks, tokenizer

from torchrl_agentic.engines import EnginePool, HTTPEngine, TransformersEngine
from torchrl_agentic.engines.sampling import Sampling, sampling_of
from torchrl_agentic.rollout import LockStep, agent_policy, training_policy
from torchrl_agentic.testing import load_tiny

MODEL, TOKENIZER = load_tiny()


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_options_that_change_the_distribution_are_named(name: str):
    assert Sampling.of({"temperature": 0.5, name: 0.7}, is_processed=True).others == f"{name}=0.7"


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 1.0, "top_k": -1}, {"top_k": 0, "min_p": 0.0}, {"top_p": None, "n": 3}]
)
def test_options_that_change_nothing_are_not_named(options: dict[str, Any]):
    assert Sampling.of(options, is_processed=False) == Sampling()


def test_engines_tell_what_they_sample_from():
    sampling = Sampling(0.7, 0.7, "top_p=0.9")
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}
    assert sampling_of(TransformersEngine(MODEL, TOKENIZER, **options)) == sampling
    assert sampling_of(LockStep(agent_policy(MODEL, TOKENIZER, **options), TOKENIZER)) == sampling
    assert sampling_of(WildEngine(looks(0))) is None


@pytest.mark.parametrize(
    ("temperatures", "expected"),
    [([0.7], Sampling(0.7, 0.7)), ([0.7, 0.7], Sampling(0.7, 0.7)), ([0.7, 1.0], None), ([0.7, None], None)],
)
def test_a_pool_tells_what_its_engines_sample_from_if_all_do_alike(
    temperatures: list[float | None], expected: Sampling | None
):
    engines: list[Any] = [
        WildEngine(looks(0)) if one is None else TransformersEngine(MODEL, TOKENIZER, temperature=one)
        for one in temperatures
    ]
    assert sampling_of(EnginePool(engines)) == expected


def test_a_server_tells_whether_its_log_probs_are_those_at_the_temperature():
    def sampling(kind: Any, **options: Any) -> Sampling | None:
        more: dict[str, Any] = {"temperature": 0.5, "sampling": {"min_p": 0.1}, **options}
        return sampling_of(HTTPEngine("http://127.0.0.1:1", kind=kind, tokenizer=TOKENIZER, **more))

    assert sampling("vllm") == Sampling(0.5, 1.0, "min_p=0.1")
    assert sampling("vllm", log_probs_are_processed=True) == Sampling(0.5, 0.5, "min_p=0.1")
    assert sampling("sglang") == Sampling(0.5, 0.5, "min_p=0.1")
    assert sampling("sglang", sampling={"temperature": 2.0}) == Sampling(2.0, 2.0)


def sampled_with(sampling: Any) -> list[Any]:
    """Return the batches of a collector whose engine says that it samples so."""
    engine: Any = WildEngine(looks(1))
    engine.sampling = sampling
    collector = collector_of(engine, tools=[CountedTool()], tasks=3, reward=lambda trajectory: 1.0)
    with collector:
        return list(collector)


@pytest.mark.parametrize(
    ("sampling", "warning"),
    [
        (Sampling(1.0, 1.0, "top_p=0.9"), "sampled with top_p=0.9"),
        (Sampling(0.0), "sampled at temperature 0"),
        (Sampling(0.5, 1.0), "its log-probabilities are those at temperature 1; start vLLM with"),
    ],
)
def test_a_collector_warns_once_of_a_distribution_that_no_policy_has(
    sampling: Sampling, warning: str, caplog: pytest.LogCaptureFixture
):
    assert len(sampled_with(sampling)) == 3
    assert caplog.text.count("a batch for training was sampled") == 1
    assert warning in caplog.text


@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(0.5, 0.5)])
def test_a_collector_names_a_temperature_but_warns_of_no_batch(
    sampling: Any, caplog: pytest.LogCaptureFixture
):
    batches = sampled_with(sampling)
    assert caplog.text.count("temperature: the engine samples at 0.5") == (sampling == Sampling(0.5, 0.5))
    assert "a batch for training" not in caplog.text
    for batch in batches:
        assert (("collector", "temperature") in batch[0].keys(True)) == isinstance(sampling, Sampling)


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
def test_a_policy_for_training_warns_once_of_a_batch_at_another_temperature(
    caplog: pytest.LogCaptureFixture,
):
    batch = sampled_with(Sampling(0.5, 0.5))[0]
    tiny = load_tiny()[0]
    caplog.clear()
    right = training_policy(tiny, tokenizer(), temperature=0.5)
    right(batch.copy())
    assert not caplog.records
    wrong = training_policy(tiny, tokenizer())
    for _ in range(2):
        wrong(batch.copy())
    assert [record.getMessage() for record in caplog.records] == [
        "a batch was sampled at temperature 0.5, but the policy of the loss has temperature 1: "
        "training_policy(..., temperature=0.5) makes them agree"
    ]
