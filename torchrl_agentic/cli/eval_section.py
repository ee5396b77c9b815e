"""`EvalSection`, the section `eval:` of a YAML file: scorers, epochs and limits; and `load_scorers`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import pydantic
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from torchrl_agentic.cli.service_engine import service_engine
from torchrl_agentic.config import Location
from torchrl_agentic.config.sections import Section
from torchrl_agentic.text import did_you_mean, shorten
from torchrl_agentic.tools.loading import load_object
from torchrl_agentic.tools.options import create

if TYPE_CHECKING:
    from torchrl_agentic.engines import OpenAIEngine

SCORERS = {
    "code": "CodeScorer",
    "contains": "contains",
    "exact_match": "exact_match",
    "format": "format_reward",
    "length": "length_penalty",
    "matches_regex": "matches_regex",
    "numeric_match": "numeric_match",
    "tool_use": "tool_use_reward",
}
"""Names of scorers in a YAML file, and their names in `torchrl_agentic.rewards`."""
JUDGE = "judge"
"""Name of `ModelJudge`, whose options name its model: `path`, `base_url`, `api_key_env`, `price`."""
DEFAULT = "answer"
"""Name of the default scorer, which compares the answer as `answer_reward` does."""
Scorers = Annotated[
    list[Any] | dict[str, Any],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class EvalSection(Section):
    """The section `eval:`; see `evaluate` for the meaning of its keys.

    Attributes:
        scorers: A list of scorers, or a mapping from names of your own to scorers. A scorer is a name
            (`numeric_match`), a name with options (`numeric_match: {rel_tol: 0.01}`), or one of these with
            `file.py:function` or `module:attribute` in place of the name.
        name: Name of the evaluation; None: that of the file.
        epochs: Number of samples per question.
        pass_at: The k of pass@k and pass^k.
        limit: Number of questions; None: all.
        out: Folder of the results, relative to the working directory; None: `evals/` and the name.
        concurrency: Number of trajectories that run at once; None: `rows` of the model, or as many as keep
            an engine behind an API busy.
        trajectory_timeout: Seconds that a trajectory and its scores may take.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory.
        retries: Number of times that a failed trajectory is begun again.
        fail_above: Share of failed samples above which no more are taken.
        max_total_tokens: Number of tokens after which no more samples are taken, those of judges included.
        max_cost: Cost after which no more samples are taken, that of judges included.
    """

    scorers: Scorers = Field(default_factory=lambda: [DEFAULT])
    name: str | None = None
    epochs: PositiveInt = 1
    pass_at: Annotated[
        list[PositiveInt], BeforeValidator(lambda value: [value] if isinstance(value, int) else value)
    ] = Field(default_factory=lambda: [1])
    limit: PositiveInt | None = None
    out: str | None = None
    concurrency: PositiveInt | None = None
    trajectory_timeout: PositiveFloat | None = None
    max_trajectory_tokens: PositiveInt | None = None
    retries: NonNegativeInt = 1
    fail_above: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    max_total_tokens: PositiveInt | None = None
    max_cost: PositiveFloat | None = None

    @pydantic.model_validator(mode="after")
    def _has_samples_enough(self) -> EvalSection:
        if not self.scorers:
            raise ValueError("scorers is empty: name one, or leave it out")
        return self


def load_scorers(
    section: EvalSection, location: Location, stack: contextlib.ExitStack
) -> tuple[dict[str, Callable[..., Any]] | None, list[OpenAIEngine]]:
    """Create the scorers of a section.

    Args:
        section: The section.
        location: Its position.
        stack: Closes the engines of judges.

    Returns:
        The scorers, None for the default one alone; and the engines of judges.

    Raises:
        ConfigError: If a scorer is unknown, or its options do not fit; the message names file and line.
    """
    where = location.at("scorers")
    engines: list[OpenAIEngine] = []
    if section.scorers == [DEFAULT]:
        return None, engines
    found: dict[str, Callable[..., Any]] = {}
    if isinstance(section.scorers, Mapping):
        named = [(name, entry, where.at(name)) for name, entry in section.scorers.items()]
    else:
        named = [("", entry, where.at(index)) for index, entry in enumerate(section.scorers)]
    for name, entry, place in named:
        reference, options = _entry(entry, place)
        name = name or reference.rpartition(":")[2]
        if name in found:
            place.fail(f"two scorers are named {name!r}: write scorers as a mapping from names to scorers")
        if reference == JUDGE:
            found[name], engine = _judge(dict(options or {}), place, stack)
            engines.append(engine)
        else:
            found[name] = _scorer(reference, options, place)
    return found, engines


def _entry(entry: Any, place: Location) -> tuple[str, dict[str, Any] | None]:
    """Return the name of a scorer, and its options; None if it has none."""
    if isinstance(entry, str):
        return entry, None
    if isinstance(entry, Mapping) and len(cast("Mapping[Any, Any]", entry)) == 1:
        ((reference, options),) = cast("Mapping[str, Any]", entry).items()
        if isinstance(options, Mapping | None):
            return reference, dict(cast("Mapping[str, Any]", options or {}))
    return place.fail(
        "a scorer is a name, such as numeric_match, or a name with options, such as "
        f"numeric_match: {{rel_tol: 0.01}}; got {shorten(entry)}"
    )


def _scorer(reference: str, options: dict[str, Any] | None, place: Location) -> Callable[..., Any]:
    from torchrl_agentic import rewards
    from torchrl_agentic.evaluation.eval_run import answer_score

    if reference == DEFAULT and not options:
        return answer_score
    if reference in SCORERS:
        made = place.call(create, getattr(rewards, SCORERS[reference]), options or {})
    elif ":" in reference or "." in reference:
        made = place.call(load_object, reference, place.folder, Path.cwd())
        if options is not None or inspect.isclass(made):
            made = place.call(create, made, options or {})
    else:
        known = [DEFAULT, JUDGE, *SCORERS]
        place.fail(
            f"no scorer is named {reference!r}{did_you_mean(reference, known)}; scorers: {', '.join(known)}, "
            "file.py:function, or module:attribute"
        )
    if not callable(made):
        place.fail(f"{reference} is not a scorer, a function of a Trajectory; got {type(made).__name__}")
    return made


def _judge(
    options: dict[str, Any], place: Location, stack: contextlib.ExitStack
) -> tuple[Callable[..., Any], OpenAIEngine]:
    """Return a `ModelJudge` over a service with OpenAI's API, and its engine."""
    from torchrl_agentic.dispatch import event_loop
    from torchrl_agentic.rewards import ModelJudge

    if not isinstance(path := options.pop("path", None), str):
        place.fail("a judge needs the name of its model: judge: {path: gpt-5-mini}")
    of_engine = {
        key: options.pop(key)
        for key in ("base_url", "api_key_env", "price", "temperature", "max_concurrent", "extra_body")
        if key in options
    }
    engine = service_engine(path, place, **of_engine)
    stack.callback(lambda: event_loop.run(engine.close()))
    return place.call(create, ModelJudge, options, engine=engine), engine
