"""Requirements of every sandbox, as cases that any sandbox can be tested with, attacks included.

`torchrl-agentic check sandbox NAME` runs them on a machine, and `testing.SandboxContract` in a test, both
with the cases of `repl.repl_cases`. `await check(make)` runs them anywhere.
"""

from torchrl_agentic.sandbox.conformance.base import Case, Make
from torchrl_agentic.sandbox.conformance.checking import CASES, CaseOutcome, check

__all__ = ["CASES", "Case", "CaseOutcome", "Make", "check"]
