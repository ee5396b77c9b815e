"""What every sandbox promises, as cases that any sandbox can be put through, attacks among them.

`torchrl-agentic check sandbox NAME` does that on a machine, `testing.SandboxContract` in a test, both with
the cases of `repl.conformance`, and `await check(make)` anywhere.
"""

from torchrl_agentic.sandbox.conformance.base import Case, Make
from torchrl_agentic.sandbox.conformance.checking import CASES, CaseOutcome, check

__all__ = ["CASES", "Case", "CaseOutcome", "Make", "check"]
