"""`table_of` and `scalars_of`: the figures of `CollectorStats.snapshot` as text and as curves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torchrl_agentic.messages import JSON
from torchrl_agentic.text import one_line, truncate

_NAME_CHARS = 34
_MOST_CAUSES = 8


def scalars_of(snapshot: Mapping[str, JSON]) -> dict[str, float]:
    """Return the figures of a snapshot that are worth a curve, by name; see `CollectorStats.scalars`."""
    tokens, engine, batches = snapshot["tokens"], snapshot["engine"], snapshot["batches"]
    wait = snapshot["wait"]
    found: dict[str, float] = {
        "in_flight": snapshot["in_flight"],
        "tokens_per_s": tokens["per_s"],
        "tokens_per_s_total": tokens["per_s_total"],
        "tokens": tokens["sampled"],
        "tokens_trained": tokens["trained"],
        "requests": engine["requests"],
        "queued": engine["queued"],
        "mean_requests": engine["mean_requests"],
        "engine_idle": engine["idle"],
        "engine_idle_total": engine["idle_total"],
        "batches": batches["n"],
        "complete_groups": batches["complete_groups"],
        "version": snapshot["version"],
        "wait": wait["last_seconds"],
        "wait_total": wait["seconds"],
        "age_mean": mean_age(snapshot["ages"]["last"]),
        "age_max": max(map(int, snapshot["ages"]["last"]), default=0),
    }
    for name, value in snapshot["capacity"].items():
        if value is not None:
            found[f"capacity/{name}"] = value
    if tokens["per_trajectory"] is not None:
        found["tokens_per_trajectory"] = tokens["per_trajectory"]
    # A cause that held up an earlier batch, but not the last one, is 0: else its curve would not fall.
    waits = {cause: wait["last_causes"].get(cause, 0.0) for cause in wait["causes"]}
    for prefix, values in (
        ("wait", waits),
        ("seconds", snapshot["seconds_by_cause"]),
        ("failures", snapshot["failures"]),
        ("events", snapshot["events"]),
    ):
        for name, value in values.items():
            curve = f"{prefix}/{_safe(name)}"
            found[curve] = found.get(curve, 0.0) + value
    return {f"collector/{name}": float(value) for name, value in found.items()}


def _safe(name: str) -> str:
    """Return a name without special characters: models invent tools, and some loggers make files of names."""
    prefix = "tool/" if name.startswith("tool/") else ""
    return prefix + (re.sub(r"[^\w-]+", "_", name.removeprefix(prefix), flags=re.ASCII)[:60] or "_")


def mean_age(ages: Mapping[str, int]) -> float:
    """Return the mean age of tokens.

    Args:
        ages: Number of tokens by age, in updates.
    """
    total = sum(ages.values())
    return sum(int(age) * count for age, count in ages.items()) / total if total else 0.0


def table_of(snapshot: Mapping[str, JSON]) -> str:
    """Return a snapshot as a short table: why the trainer waited, and what the collector does now."""
    return "\n".join(_lines(snapshot))


def _lines(snapshot: Mapping[str, JSON]) -> Iterator[str]:
    tokens, engine, batches = snapshot["tokens"], snapshot["engine"], snapshot["batches"]
    wait, seconds = snapshot["wait"], snapshot["seconds"]
    yield (
        f"{batches['n']} batch{'es' if batches['n'] != 1 else ''} in {duration(seconds)} · "
        f"{snapshot['in_flight']} trajectories in flight · {tokens['per_s']:,.0f} tokens/s"
    )
    most = engine["max_concurrent"]
    yield (
        f"engine: {engine['requests']}{f' of {most}' if most is not None else ''} requests, "
        f"{engine['queued']} queued, {engine['mean_requests']:.1f} on average, "
        f"idle {engine['idle']:.0%} of the time"
    )
    if capacity := capacity_of(snapshot["capacity"]):
        yield f"capacity: {capacity}"
    share = wait["seconds"] / seconds if seconds > 0 else 0.0
    yield f"why the trainer waited: {duration(wait['seconds'])} in all, {share:.0%} of the time"
    causes = list(wait["causes"].items())
    total = sum(wait["causes"].values()) or 1.0
    for cause, spent in causes[:_MOST_CAUSES]:
        yield f"  {name_of(cause):<{_NAME_CHARS}} {duration(spent):>9} {spent / total:>5.0%}"
    if rest := causes[_MOST_CAUSES:]:
        spent = sum(value for _, value in rest)
        yield f"  {f'{len(rest)} other causes':<{_NAME_CHARS}} {duration(spent):>9} {spent / total:>5.0%}"
    if idle := busy_trainer_of(snapshot):
        yield idle
    if late := snapshot["stragglers"]:
        yield "the next batch waits for"
        for each in late:
            yield (
                f"  {short_name(each['name']):<24} {duration(each['seconds']):>8}  "
                f"turn {each['turn'] + 1}, {one_line(each['doing'], 20)} for {duration(each['doing_s'])}"
            )
    if ages := snapshot["ages"]["last"]:
        yield f"ages of the tokens of the last batch: {ages_of(ages)}"
    for title, counts in (("failures", snapshot["failures"]), ("events", snapshot["events"])):
        if counts:
            yield one_line(f"{title}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}", 80)


def capacity_of(figures: Mapping[str, JSON]) -> str:
    """Return how many trajectories are open, and how full the KV cache is; "" if nothing is known.

    Args:
        figures: The part "capacity" of a snapshot.
    """
    if figures["limit"] is None:
        return ""
    found = f"{figures['open']} of at most {figures['limit']} trajectories open"
    if figures["kv_use"] is None:
        return found
    return (
        f"{found}; KV cache {figures['kv_use']:.0%} full, {figures['preempted']} preemptions, "
        f"{figures['held_back']} requests held back"
    )


def ages_of(ages: Mapping[str, int]) -> str:
    """Return a histogram of ages as text.

    Args:
        ages: Number of tokens by age, in updates.
    """
    total = sum(ages.values()) or 1
    return ", ".join(f"{age}: {count / total:.0%}" for age, count in ages.items())


def busy_trainer_of(snapshot: Mapping[str, JSON]) -> str:
    """Return for how long batches waited for the trainer, or "" if they did not."""
    seconds = snapshot["seconds_by_cause"].get("trainer", 0.0)
    return f"batches were ready {duration(seconds)} before the trainer asked for them" if seconds else ""


def name_of(cause: str) -> str:
    """Return a cause as words that fit a line."""
    return one_line(cause.replace("tool/", "tool ", 1), _NAME_CHARS)


def short_name(name: str) -> str:
    """Return the name of a trajectory that fits a line; its middle is cut, since the ends differ."""
    return truncate(one_line(name, 500), 24, side="middle")


def duration(seconds: float) -> str:
    """Return a duration in the unit that fits it."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
