"""Reports: what dumps of trajectories add up to, over steps and per tool, and how two runs compare.

`read_report` streams over a dump and gives a `Report`; `compare` sets two side by side. `tables` shows them
in a terminal, `chart` draws them.
"""

from torchrl_agentic.viewer.report.compare import Change, Comparison, compare
from torchrl_agentic.viewer.report.statistics import Average, Report, StepReport, Times, ToolReport
from torchrl_agentic.viewer.report.tally import Tally, read_report, read_tally

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
