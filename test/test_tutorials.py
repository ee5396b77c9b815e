"""The tutorials run from top to bottom."""

import runpy
import sys
from pathlib import Path

import pytest

from torchrl_agentic.parsers import PARSERS

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.py"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch):
    """Remove the registrations of a tutorial after it, and its Ray if it did not come to the end."""
    before = dict(PARSERS)
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    PARSERS.clear()
    PARSERS.update(before)


# TorchRL computes log-probs with an argument that PyTorch deprecates; Ray leaves pipes open, and announces
# what will change.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("own_environ", "own_ray")
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")


def test_there_is_one_on_parsers():
    assert "04_a_parser_of_your_own" in [path.stem for path in TUTORIALS]
