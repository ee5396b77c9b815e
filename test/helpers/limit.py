"""Seconds after which a test counts as hung, by the slowness of this machine as measured once per run."""

import math
import os
import time

SLOWNESS = "TORCHRL_AGENTIC_TEST_SLOWNESS"
"""Environment variable that hands the slowness to the processes of a run."""
SLACK = 3.0
"""Load that comes after the measurement; a limit ends a hang and does not judge speed."""
MOST = 8.0
"""Largest slowness, so that a hang ends some day on the busiest machine, too."""
WORK = 100_000
"""Steps of the work that is measured."""
WORK_S = 0.005
"""Seconds that the work takes on a core of its own of an ordinary server."""


def slowness(processes: int, *, work_s: float, load: float, cores: int) -> float:
    """Return how many times longer than on an idle machine a test may take; at least 1.

    Args:
        processes: Number of processes that run tests.
        work_s: Seconds that the work took here.
        load: Number of other processes that want to run.
        cores: Number of cores.
    """
    per_core = max(1.0, (processes + load) / cores)
    return min(MOST, max(1.0, work_s / WORK_S) * per_core)


def measure_slowness(processes: int) -> float:
    """Measure the slowness of this machine now, in a tenth of a second.

    Args:
        processes: Number of processes that run tests.
    """
    took = math.inf
    for _ in range(9):  # the fastest counts, since the load is known
        began = time.perf_counter()
        sum(number * number % 7 for number in range(WORK))
        took = min(took, time.perf_counter() - began)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return slowness(processes, work_s=took, load=os.getloadavg()[0], cores=cores)


def limit(seconds: float) -> float:
    """Return the seconds after which something counts as hung.

    Args:
        seconds: Generous seconds for an idle machine.
    """
    return seconds * SLACK * float(os.environ.get(SLOWNESS, "1"))
