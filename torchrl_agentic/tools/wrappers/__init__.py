"""Wrappers: each adds one behavior to any tool. Import them from `torchrl_agentic.tools`.

`Budgeted(Truncated(Cached(Retrying(search))), calls=5)` is a tool too. The outermost wrapper sees a call
first and its result last. A wrapper keeps the name, description, schemas, effects, sessions and all other
members of its tool, except those that it exists to change. It can be pickled if its tool can. A wrapper owns
its tool: pass only the outermost one to a dispatcher.

The order matters:

- `Cached(Retrying(t))` caches a result that took three tries, and its metrics show these tries each time.
  With `Retrying(Cached(t))`, each try looks into the cache, and calls that wait for a call that fails have
  their own tries.
- `Budgeted(Cached(t))` counts hits; `Cached(Budgeted(t))` does not, and its cached results repeat the line
  about the budget as it was: pass `tell=False`.
- `Truncated(Cached(t))` caches whole results; `Cached(Truncated(t))` caches truncated ones.
- `Truncated(Budgeted(t))` may cut the line about the budget; `Budgeted(Truncated(t))` adds it after the cut,
  so that the text is longer than `max_chars` by that line.
- `Retrying(Budgeted(t))` pays for each try that times out; `Budgeted(Retrying(t))` pays once.
- `Cached(Hedged(t))` hedges misses only; `Hedged(Cached(t))` is refused, since a second call would wait for
  the first one.
- `Retrying(Hedged(t))` hedges each try. With `Hedged(Retrying(t))`, the pauses between tries count as slow.
- `Budgeted(Hedged(t))`, `Recorded(Hedged(t))` and `Approved(Hedged(t))` see one call; in the other order,
  they see the second call too.
- `Retrying(Faulty(t))` may recover: each try of a call draws its fault again.
- `Recorded` around everything records what the model saw, and `Replayed` in its place runs nothing inside.
  `Recorded` next to the tool records what the tool did, and a replay runs the wrappers around it again.
- `Approved` around `Cached` asks for hits too; around `Recorded`, refused calls are not on the cassette.
- `Renamed` outermost changes only the name that the model uses: cassettes, policies and faults inside know
  the tool by its own name.

State of a trajectory (budgets, caches of the scope "trajectory", the position of a replay) lives in its
session. Trajectories share a `Cached` of the scopes "group" and "global", the latencies of a `Hedged`,
and a `Cassette`; a `Budget` shares its bounds between trajectories, never what was spent.
"""
