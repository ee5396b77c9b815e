"""Metrics of servers in the text format of Prometheus."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.engines import EnginePressure
from torchrl_agentic.engines.server_metrics import NAMES, pressure_of, read_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 5.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.75
vllm:num_preemptions_total{engine="0",model_name="a"} 3.0
vllm:num_preemptions_created{engine="0",model_name="a"} 1.7e+09
"""
SGLANG = """\
sglang:token_usage{model_name="a b{c}\\"d"} 0.28
sglang:num_queue_reqs{model_name="a",} 11
sglang:num_running_reqs 162 1395066363000
sglang:num_retracted_requests_total{model_name="a"} 6.0
"""


@pytest.mark.parametrize(
    ("kind", "text", "pressure"),
    [
        ("sglang", SGLANG, EnginePressure(0.28, waiting=11, running=162, preempted=6)),
        ("vllm", VLLM, EnginePressure(0.75, waiting=2, running=9, preempted=3)),
    ],
)
def test_the_pressure_is_that_of_the_fullest_replica_with_the_requests_of_all(kind, text, pressure):
    assert pressure_of(read_metrics(text), kind) == pressure


@pytest.mark.parametrize("text", ["", "<html>nothing</html>", "vllm:kv_cache_usage_perc NaN", SGLANG])
def test_without_the_use_of_the_cache_there_is_no_pressure(text):
    assert pressure_of(read_metrics(text), "vllm") is None


LABELS = st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text(), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(NAMES["vllm"]), LABELS, st.floats(0, 1e12)), max_size=8))
def test_each_sample_is_read_whatever_its_labels(samples):
    def escaped(text):
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    def lines():
        for name, labels, value in samples:
            inside = ",".join(f'{key}="{escaped(label)}"' for key, label in labels.items())
            yield f"{name}{{{inside}}} {value!r}"

    expected = {}
    for name, _, value in samples:
        expected.setdefault(name, []).append(value)
    assert read_metrics("\n".join(lines())) == expected
