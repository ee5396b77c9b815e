"""Configuration of the benchmarks: they import `rig` from here, and the helpers and fakes of the tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = map(str, (HERE, HERE.parent / "test"))
