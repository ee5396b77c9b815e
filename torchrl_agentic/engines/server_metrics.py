"""`read_metrics` and `pressure_of`: how full a server is, by its Prometheus metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from torchrl_agentic.engines.base import EnginePressure

_LABEL = r'\s*\w+\s*=\s*"(?:[^"\\]|\\.)*"\s*'
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)\s*(?:\{{(?:{_LABEL},?)*\s*\}})?\s*(\S+)(?:\s+\S+)?\s*", re.ASCII)
NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "vllm": (
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:num_preemptions_total",
    ),
    "sglang": (
        "sglang:token_usage",
        "sglang:num_queue_reqs",
        "sglang:num_running_reqs",
        "sglang:num_retracted_requests_total",
    ),
}
"""By kind of server, the metrics of the fields of `EnginePressure`, in their order."""


def read_metrics(text: str) -> dict[str, list[float]]:
    """Return the samples of each metric, whatever their labels.

    Args:
        text: Metrics in the text format of Prometheus, version 0.0.4:
            https://prometheus.io/docs/instrumenting/exposition_formats/. Other lines are
            ignored.
    """
    found: dict[str, list[float]] = {}
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        found.setdefault(match[1], []).append(value)
    return found


def pressure_of(metrics: Mapping[str, Sequence[float]], kind: str) -> EnginePressure | None:
    """Return how full a server is: the KV use of its fullest replica, and the sums of the other figures.

    Args:
        metrics: Samples of each metric, as `read_metrics` returns them.
        kind: Kind of the server, a key of `NAMES`.

    Returns:
        The pressure; None if the use of the KV cache is not among the metrics.
    """
    use, waiting, running, preempted = (
        [value for value in metrics.get(name, ()) if math.isfinite(value)] for name in NAMES[kind]
    )
    if not use:
        return None
    counts = (round(sum(each)) for each in (waiting, running, preempted))
    return EnginePressure(min(1.0, max(0.0, *use)), *counts)
