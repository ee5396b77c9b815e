"""Reports: what dumps of trajectories add up to, over steps and per tool, and how two runs compare.

`read_report` streams over a dump and gives a `Report`; `compare` sets two side by side. `tables` shows them
in a terminal, `chart` draws them.
"""

from torchrl_agentic.report.compare import Change, Comparison, compare
from torchrl_agentic.report.read import read_report, read_tally
from torchrl_agentic.report.tally import Tally
from torchrl_agentic.report.values import Average, Report, StepReport, Times, ToolReport

__all__ = [
    "Average",
    "Change",
    "Comparison",
    "Report",
    "StepReport",
    "Tally",
    "Times",
    "ToolReport",
    "compare",
    "read_report",
    "read_tally",
]
