"""Collectors in processes that are killed at random turns, and continued from their last saved states."""

import os
import random
import signal
from collections import Counter

import pytest
from helpers.forked import PROCESSES
from helpers.limit import limit
from helpers.resumed_runs import N_TASKS, notes_of, train, train_and_tell

SEEDS = range(2)


def lived(folder, seed, options, *, answers=None):
    """Run a process, and kill it after so many answers; return its curve, None if it was killed."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=train_and_tell, args=(folder, seed, theirs, options))
    process.start()
    theirs.close()
    curve = None
    try:
        while curve is None and answers != 0:
            assert ours.poll(60)
            said = ours.recv()
            if isinstance(said, tuple):
                answers = None if answers is None else answers - 1
            else:
                curve = said
        if answers == 0:
            os.kill(process.pid, signal.SIGKILL)
        process.join(limit(60))
        assert process.exitcode == (0 if curve is not None else -signal.SIGKILL)
    finally:
        process.kill()
        process.join()
        ours.close()
    return curve


def killed_and_resumed(folder, seed, options):
    """Kill a run some times, and let it end; return its curve."""
    odds = random.Random(seed)
    folder.mkdir()
    for _ in range(odds.randint(1, 2)):
        assert lived(folder, odds.random(), options, answers=odds.randint(10, 30)) is None
    return lived(folder, odds.random(), options)


def whole(folder, options):
    """Return the curve of a run in this process that is not interrupted."""
    folder.mkdir()
    said = []
    train(folder, 0, said.append, options)
    return said[-1]


def check_run(folder, curve):
    """Check that no effect happened twice in one trajectory, and that each task is in one batch."""
    assert max(Counter(notes_of(folder)).values()) == 1
    tasks = Counter(name for figures, *_ in curve for name, _ in figures)
    assert tasks == {f"t{number}": 2 for number in range(N_TASKS)}


@pytest.mark.parametrize("is_stream", [False, True], ids=["list", "stream"])
def test_killed_runs_have_the_curve_of_an_uninterrupted_one(tmp_path, is_stream: bool):
    options = {"is_stream": is_stream}
    expected = whole(tmp_path / "whole", options)
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        curve = killed_and_resumed(folder, seed, options)
        check_run(folder, curve)
        assert curve == expected
    assert [version for *_, version in expected] == list(range(N_TASKS // 2))
