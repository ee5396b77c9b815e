"""Fixtures of the tests of old tool transforms."""

import gc
from pathlib import Path

import pytest
import tensordict
from helpers.legacy_envs import LegacyEnv

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """TorchRL leaves its processes, loops and pipes to the garbage collector, which warns."""
    left = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(left)


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Leftovers of this test are collected here, not in another test."""
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _lists_are_stacks():
    """TorchRL's transforms are made before any ToolCompose."""
    tensordict.set_list_to_stack(True).set()


@pytest.fixture
def chat():
    """A factory of conversations, which are closed behind the test."""
    made = []

    def make(*args, **options):
        made.append(LegacyEnv(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.env.close()
        one.compose.close()
