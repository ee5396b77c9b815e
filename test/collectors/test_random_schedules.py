"""Collectors on random schedules: at the end nothing is left, and everything is accounted for.

A schedule draws the sizes of groups and batches, delays and failures of engine, tools and rewards, weight
updates, and the moment at which the collector is closed or its consumer is cancelled.
"""

import logging

import pytest
from helpers.collector_worlds import run_schedules
from hypothesis import settings

from torchrl_agentic.testing import run_skipping

CHUNKS = 5
SCHEDULES = 20 * settings.default.max_examples
"""1,000 by default; --hypothesis-profile=thorough runs 20,000."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_left_of_a_collector_whatever_happens(chunk, caplog):
    caplog.set_level(logging.CRITICAL)
    events = run_skipping(run_schedules(range(chunk, SCHEDULES, CHUNKS)))
    assert events["early"]  # in half of the schedules, calls may start while the model writes
