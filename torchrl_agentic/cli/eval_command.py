"""`torchrl-agentic eval`: evaluate a model on questions, with progress, limits and resume."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from torchrl_agentic.text import printable

if TYPE_CHECKING:
    from torchrl_agentic.evaluation import EvalProgress, EvalResult

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell."""


@dataclass(frozen=True, slots=True)
class EvalFlags:
    """Flags of the command that replace keys of the file; None leaves the file's value.

    Attributes:
        model: Path or name of the model.
        engine: Name of its engine.
        base_url: URL of the service, with the engine "openai".
        parser: Name of the parser.
        temperature: Sampling temperature.
        seed: Seed of the sampling.
        name: Name of the evaluation.
        out: Folder of the results.
        limit: Number of questions.
        epochs: Number of samples per question.
        concurrency: Number of trajectories that run at once.
        max_turns: Largest number of turns of a trajectory.
        max_tokens: Upper bound on the tokens of an answer.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory.
        max_total_tokens: Number of tokens after which no more samples are asked.
        max_cost: Cost after which no more samples are asked.
    """

    model: str | None = None
    engine: str | None = None
    base_url: str | None = None
    parser: str | None = None
    temperature: float | None = None
    seed: int | None = None
    name: str | None = None
    out: Path | None = None
    limit: int | None = None
    epochs: int | None = None
    concurrency: int | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    max_trajectory_tokens: int | None = None
    max_total_tokens: int | None = None
    max_cost: float | None = None


def run_eval(config: Path, flags: EvalFlags, *, resume: bool, as_json: bool) -> int:
    """Evaluate the model of a configuration, and print the results.

    Args:
        config: The YAML file.
        flags: Values that replace those of the file.
        resume: Whether an evaluation in the folder is continued.
        as_json: Whether to print the results as JSON.

    Returns:
        The exit code: 0 if every sample was scored, 1 if samples failed or are missing, 2 for a mistake of
        the user, 130 after Ctrl-C.
    """
    from torchrl_agentic.engines.base import EngineUnusable
    from torchrl_agentic.errors import InfrastructureError
    from torchrl_agentic.evaluation import EvalInterrupted

    errors = Console(stderr=True)
    code = None
    try:
        try:
            result = _evaluated(config, flags, resume=resume, console=errors)
        except EvalInterrupted as interrupt:
            result, code = interrupt.result, INTERRUPTED
    except (EngineUnusable, InfrastructureError, ValueError, TypeError, ImportError, OSError) as error:
        place = "" if str(config) in str(error) else f"{config}: "
        errors.print(Text(f"torchrl-agentic: {place}{printable(str(error))}", style="red"), soft_wrap=True)
        return 2
    except KeyboardInterrupt:  # before it began
        return INTERRUPTED
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        _show(result, Console())
    if not result.is_whole and result.out is not None:
        again = f"torchrl-agentic eval {config} --resume --out {result.out}"
        errors.print(
            Text(f"to ask what is missing or failed, with the same options: {again}", style="yellow"),
            soft_wrap=True,
        )
    return code if code is not None else int(not result.is_whole)


def _evaluated(config: Path, flags: EvalFlags, *, resume: bool, console: Console) -> EvalResult:
    """Read the configuration, and run it."""
    from torchrl_agentic.cli.eval_section import EvalSection, load_scorers
    from torchrl_agentic.cli.opened_model import open_model
    from torchrl_agentic.cli.rollout_file import ModelConfig, load_config, load_questions
    from torchrl_agentic.config import ConfigError
    from torchrl_agentic.config.sections import read_section
    from torchrl_agentic.evaluation import EvalFolderError, evaluate
    from torchrl_agentic.evaluation.eval_folder import is_eval

    if config.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{config}: expected a YAML file with questions, a model and perhaps 'eval:'")
    settings = load_config(config)
    if settings.model is None:
        raise ConfigError(f"{config}: an evaluation needs 'questions' and a 'model'")
    changes = {
        "path": flags.model,
        "engine": flags.engine,
        "base_url": flags.base_url,
        "temperature": flags.temperature,
        "seed": flags.seed,
        "max_turns": flags.max_turns,
        "max_new_tokens": flags.max_tokens,
        "rows": flags.concurrency or (settings.eval and settings.eval.concurrency),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if given:
        model = {**settings.model.model_dump(exclude_unset=True), **given}
        changed = read_section(ModelConfig, model, settings.location(config.parent).at("model"))
        settings = settings.model_copy(update={"model": changed})
    assert settings.model is not None
    section = settings.eval or EvalSection()
    name = flags.name or section.name or config.stem
    out = flags.out or Path(section.out or Path("evals") / name)
    if is_eval(out) and not resume:  # before the model is loaded
        raise EvalFolderError(
            f"{out} holds an evaluation already: continue it with --resume, or choose another folder with "
            "--out"
        )
    epochs = flags.epochs or section.epochs
    questions = load_questions(settings, config.parent)
    described: Mapping[str, Any] = {
        "model": settings.model.model_dump(
            include={"path", "engine", "mode", "tool_choice", "seed", "base_url"}
        ),
        "scorer_options": section.scorers,
    }
    with contextlib.ExitStack() as stack:
        scorers, engines = load_scorers(section, settings.location(config.parent).at("eval"), stack)
        opened = stack.enter_context(open_model(settings, config.parent, flags.parser))
        for sentence in opened.ignored:
            console.print(sentence)
        bar = stack.enter_context(_progress_bar(console))
        task = bar.add_task("samples", total=None, eta="", usage="")

        def follow(state: EvalProgress) -> None:
            bar.update(
                task,
                completed=state.done,
                total=state.total,
                eta="" if state.eta_s is None else f"{_duration(state.eta_s)} left",
                usage=_usage(state),
            )

        return evaluate(
            questions,
            opened.tools,
            opened.engine,
            opened.tokenizer,
            scorers=scorers,
            scorer_engines=engines,
            epochs=epochs,
            pass_at=[k for k in section.pass_at if k <= epochs] if flags.epochs else section.pass_at,
            out=out,
            resume=resume,
            limit=flags.limit or section.limit,
            name=name,
            trajectory_timeout=section.trajectory_timeout,
            max_trajectory_tokens=flags.max_trajectory_tokens or section.max_trajectory_tokens,
            retries=section.retries,
            fail_above=section.fail_above,
            max_total_tokens=flags.max_total_tokens or section.max_total_tokens,
            max_cost=flags.max_cost or section.max_cost,
            progress=follow,
            settings=described,
            **opened.options,
        )


def _progress_bar(console: Console) -> Progress:
    """Return a progress bar with the remaining time; on a console that is no terminal, it leaves no trace."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
        TextColumn("{task.fields[usage]}", style="dim"),
    )
    return Progress(*columns, console=console, transient=True)


def _usage(state: EvalProgress) -> str:
    parts = [f"{state.failed} failed"] if state.failed else []
    if state.usage.tokens:
        parts.append(f"{state.usage.tokens} tokens")
    if state.usage.cost:
        parts.append(f"cost {state.usage.cost:.4g}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _show(result: EvalResult, console: Console) -> None:
    """Print the table, and the lines below it."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    console.print(result.table())
    for line in result.notes:
        console.print(Text(printable(line)), soft_wrap=True)
    if result.out is not None:
        console.print(Text(f"results: {result.out}"), soft_wrap=True)
