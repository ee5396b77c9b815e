"""Statistics of dumps by step and by tool, and comparisons of two runs.

`read_report` reads a dump and returns a `Report`; `compare` compares two. `tables` shows them in a terminal,
`chart` draws them.
"""

from torchrl_agentic.viewer.report.compare import Change, Comparison, compare
from torchrl_agentic.viewer.report.statistics import (
    Average,
    Report,
    ScoredTrajectory,
    StepReport,
    Times,
    ToolReport,
)
from torchrl_agentic.viewer.report.tally import Tally, read_report, read_tally

__all__ = [
    "Average",
    "Change",
    "Comparison",
    "Report",
    "ScoredTrajectory",
    "StepReport",
    "Tally",
    "Times",
    "ToolReport",
    "compare",
    "read_report",
    "read_tally",
]
