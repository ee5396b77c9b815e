"""`torchrl-agentic eval`: evaluate a model on questions, with progress, limits and resume."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from torchrl_agentic.cli.common_options import AsJson, Parser
from torchrl_agentic.cli.show import mistakes_end_it, progress_bar
from torchrl_agentic.text import printable

if TYPE_CHECKING:
    from torchrl_agentic.evaluation import EvalProgress, EvalResult

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell."""
_PASSED_ON = {
    "epochs", "limit", "trajectory_timeout", "max_trajectory_tokens", "retries", "fail_above",
    "max_total_tokens", "max_cost",
}  # fmt: skip
"""Keys of the section that are arguments of `evaluate`."""


def eval_model(
    config: Annotated[Path, typer.Argument(help="YAML configuration with questions, a model and 'eval:'.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions, from the first.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of samples per question.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the evaluation in the folder where it stopped.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default evals/NAME.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the evaluation; by default, the file's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask, in place of the file's.")] = None,
    engine: Annotated[str | None, typer.Option(help="Its engine: transformers, vllm or openai.")] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of the service, with openai.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    parser: Parser = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Number of trajectories that run at once.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Largest number of turns of a trajectory.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Upper bound on the tokens of an answer.")
    ] = None,
    max_trajectory_tokens: Annotated[
        int | None, typer.Option(min=1, help="Upper bound on the tokens of a trajectory.")
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(min=1, help="Take no more samples after this total number of tokens.")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(help="Take no more samples after this cost.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on questions with scorers: means with intervals, pass@k, failures, tokens and cost.

    Exit with 0 if every sample was scored, with 1 if samples failed or are missing.
    """
    from torchrl_agentic.engines.base import EngineUnusable
    from torchrl_agentic.evaluation import EvalInterrupted

    check_engine(engine)
    of_model = {
        "path": model,
        "engine": engine,
        "base_url": base_url,
        "temperature": temperature,
        "seed": seed,
        "max_turns": max_turns,
        "max_new_tokens": max_tokens,
    }
    of_section = {
        "name": name,
        "out": None if out is None else str(out),
        "limit": limit,
        "epochs": epochs,
        "concurrency": concurrency,
        "max_trajectory_tokens": max_trajectory_tokens,
        "max_total_tokens": max_total_tokens,
        "max_cost": max_cost,
    }
    code = None
    try:
        with mistakes_end_it(config, EngineUnusable):
            try:
                result = _evaluated(config, of_model, of_section, parser, resume=resume)
            except EvalInterrupted as interrupt:
                result, code = interrupt.result, INTERRUPTED
    except KeyboardInterrupt:  # before it began
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        _show(result, Console())
    if not result.is_whole and result.out is not None:
        again = f"torchrl-agentic eval {config} --resume --out {result.out}"
        Console(stderr=True).print(
            Text(f"to take the missing and failed samples, with the same options: {again}", style="yellow"),
            soft_wrap=True,
        )
    raise typer.Exit(code if code is not None else int(not result.is_whole))


def check_engine(name: str | None) -> None:
    """Raise typer.BadParameter, with a list of the engines, if none has this name."""
    from torchrl_agentic.cli.rollout_file import ModelConfig

    engines = get_args(ModelConfig.model_fields["engine"].annotation)
    if name is not None and name not in engines:
        raise typer.BadParameter(
            f"no engine is named {name!r}; engines: {', '.join(engines)}", param_hint="--engine"
        )


def _evaluated(
    config: Path,
    of_model: Mapping[str, Any],
    of_section: Mapping[str, Any],
    parser: str | None,
    *,
    resume: bool,
) -> EvalResult:
    """Read the configuration, replace its values by the options that are not None, and run it."""
    from torchrl_agentic.cli.eval_section import EvalSection, load_scorers
    from torchrl_agentic.cli.model_loading import open_model
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
    location = settings.location(config.parent)
    section = (settings.eval or EvalSection()).model_copy(update=_given(of_section))
    if changes := _given({**of_model, "rows": section.concurrency}):
        model = {**settings.model.model_dump(exclude_unset=True), **changes}
        changed = read_section(ModelConfig, model, location.at("model"))
        settings = settings.model_copy(update={"model": changed})
    assert settings.model is not None
    name = section.name or config.stem
    out = Path(section.out or Path("evals") / name)
    if is_eval(out) and not resume:  # before the model is loaded
        raise EvalFolderError(
            f"{out} holds an evaluation already: continue it with --resume, or choose another folder with "
            "--out"
        )
    pass_at = section.pass_at
    if of_section["epochs"] is not None:
        pass_at = [k for k in pass_at if k <= section.epochs]
    questions = load_questions(settings, config.parent)
    described: Mapping[str, Any] = {
        "model": settings.model.model_dump(
            include={"path", "engine", "mode", "tool_choice", "seed", "base_url"}
        ),
        "scorer_options": section.scorers,
    }
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        scorers, engines = load_scorers(section, location.at("eval"), stack)
        opened = stack.enter_context(open_model(settings, config.parent, parser))
        for sentence in opened.ignored:
            console.print(sentence)
        columns = (TextColumn("{task.fields[eta]}"), TextColumn("{task.fields[usage]}", style="dim"))
        bar = stack.enter_context(progress_bar(console, *columns, transient=True))
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
            pass_at=pass_at,
            out=out,
            resume=resume,
            name=name,
            progress=follow,
            settings=described,
            **section.model_dump(include=_PASSED_ON),
            **opened.options,
        )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


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
