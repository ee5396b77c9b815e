"""Wrappers: what one may want of any tool, each in a class of its own, to be put around it.

`Budgeted(Truncated(Cached(Retrying(search))), calls=5)` is a tool like any other. The outermost wrapper sees
a call first and its result last. All keep name, description, schemas, effects and sessions of what they wrap,
unless changing these is what they are for, and what `Tool` may have besides. They pickle if the tool does.
A tool belongs to the wrapper around it: give a dispatcher the outermost one only.

What follows from the order:

- `Cached(Retrying(t))`: a result that took three tries is kept, and the tries show in its metrics for ever.
  `Retrying(Cached(t))` is the same to the model; each try looks into the cache, and those that wait for one
  that failed have tries of their own.
- `Budgeted(Cached(t))` counts hits; `Cached(Budgeted(t))` does not, and what it kept repeats the line about
  the budget as it was then: pass `tell=False`.
- `Truncated(Cached(t))` keeps results whole; `Cached(Truncated(t))` keeps what was left of them.
- `Truncated(Budgeted(t))` may cut the line about the budget; `Budgeted(Truncated(t))` adds it behind the cut,
  so that the text is longer than `max_chars` by that line.
- `Retrying(Budgeted(t))` pays for each try that timed out; `Budgeted(Retrying(t))` pays once.
- `Retrying(Faulty(t))` gets better: each try of a call draws anew.
- `Recorded` around everything records what the model saw, and `Replayed` in its place runs nothing of what is
  inside; `Recorded` next to the tool records what it did, and a replay runs the wrappers around it again.
- `Approved` around `Cached` asks for hits too; around `Recorded`, what was refused is not on the cassette.
- `Renamed` outermost changes only what the model says: cassettes, policies and faults inside know the tool by
  the name that it has there.

What is kept per trajectory (budgets, caches of the scope "trajectory", what was replayed) lives in its
session. What all trajectories share is said to be shared: a `Cached` of the scopes "group" and "global", a
`Cassette`; a `Budget` shares its bounds, never what was spent.
"""

from torchrl_agentic.tools.wrappers.approved import Approved
from torchrl_agentic.tools.wrappers.base import Wrapped
from torchrl_agentic.tools.wrappers.budget import Budget
from torchrl_agentic.tools.wrappers.budgeted import Budgeted
from torchrl_agentic.tools.wrappers.cached import Cached
from torchrl_agentic.tools.wrappers.cassette import Cassette
from torchrl_agentic.tools.wrappers.faulty import Faulty
from torchrl_agentic.tools.wrappers.recorded import Recorded
from torchrl_agentic.tools.wrappers.renamed import Renamed
from torchrl_agentic.tools.wrappers.replayed import CassetteMiss, Replayed
from torchrl_agentic.tools.wrappers.retrying import Retrying
from torchrl_agentic.tools.wrappers.truncated import Truncated

__all__ = [
    "Approved",
    "Budget",
    "Budgeted",
    "Cached",
    "Cassette",
    "CassetteMiss",
    "Faulty",
    "Recorded",
    "Renamed",
    "Replayed",
    "Retrying",
    "Truncated",
    "Wrapped",
]
