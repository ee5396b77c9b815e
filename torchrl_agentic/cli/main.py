"""The commands of `torchrl-agentic`: rollout, eval, view, report, export, check and serve."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console, Group
from rich.text import Text
from typer.core import TyperGroup

from torchrl_agentic.cli.check import check_load, check_sandbox, check_tools, show_tiers
from torchrl_agentic.cli.common_options import AsJson, Dump, Parser
from torchrl_agentic.cli.eval_command import check_engine, eval_model
from torchrl_agentic.cli.servers import serve_sandbox, serve_search
from torchrl_agentic.cli.show import (
    answer_summary,
    complain,
    conversation_panel,
    mistakes_end_it,
    progress_bar,
    replay_summary,
)

if TYPE_CHECKING:
    from torchrl_agentic.cli.rollout_file import RolloutConfig
    from torchrl_agentic.records import Recorder


class _TwoWordCommands(TyperGroup):
    """A command group in which some commands have two words: `check sandbox`, beside `check`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # types of click, which typer may vendor
        """Return the command that the first one or two arguments name."""
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_TwoWordCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


serve = typer.Typer(no_args_is_help=True, help="Start a local server for tools.")
app.add_typer(serve, name="serve")
serve.command("sandbox")(serve_sandbox)
serve.command("search")(serve_search)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"torchrl-agentic {version('torchrl-agentic')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Tool use for language-model reinforcement learning in TorchRL."""
    del version  # its callback has printed it
    # Configurations name modules of the working directory, which a console script does not search.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


@app.command("rollout")
def _rollout(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML configuration, or a .json or .jsonl file of conversations or questions."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Replay this dump with the tools and the parser of the configuration."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="With --replay: regular expression; matching parts of results are not compared. Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Record the turns in this .jsonl file.")] = None,
    parser: Parser = None,
    model: Annotated[
        str | None, typer.Option(help='Model to ask: a Hugging Face folder or name, or "tiny" (included).')
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Inference engine: transformers, vllm, or openai for a service.")
    ] = "transformers",
    show: Annotated[
        int, typer.Option(help="Number of conversations, or of differences, to print; -1 for all.")
    ] = -1,
    lines: Annotated[int, typer.Option(help="Number of lines to print of each message.")] = 8,
) -> None:
    """Ask a model questions, or replay recorded conversations or a dump, with real tools.

    Print the tool calls, and which answers are correct or which results differ from the recorded ones.
    """
    from torchrl_agentic.cli.replay_command import recorded_to, replay_dump

    if replay is not None or ignore:
        if model is not None:
            raise typer.BadParameter("a replay does not ask a model: use either --model or --replay")
        code = replay_dump(replay, config, out, parser, ignore or [], show=show, lines=lines)
        raise typer.Exit(code)
    if config is None:
        raise typer.BadParameter("a configuration, or a file of conversations or questions, is missing")
    from torchrl_agentic.cli.rollout_file import ModelConfig, load_config
    from torchrl_agentic.records import TrajectoryRecord, read_records
    from torchrl_agentic.records.call_stats import summarize
    from torchrl_agentic.viewer.report.tables import tool_tables
    from torchrl_agentic.viewer.report.tally import tool_reports

    check_engine(engine)
    console = Console()
    with mistakes_end_it(config):
        asked = None if model is None else ModelConfig.model_validate({"path": model, "engine": engine})
        settings = load_config(config, asked)
        path = out or Path(settings.out)
        read = (*settings.conversations, *settings.questions, config.name)
        with recorded_to(path, [config.parent / name for name in read]) as recorder:
            run = _ask if settings.model is not None else _replay
            found = run(console, settings, config.parent, parser, recorder)
        read = [record for record in read_records(path) if isinstance(record, TrajectoryRecord)]

    order = {name: place for place, name in enumerate(found.names)}
    records = sorted(read, key=lambda record: order[record.trajectory])
    summaries = summarize(turn for record in records for turn in record.turns)
    console.print(tool_tables(tool_reports(summaries)))
    for record in records[: len(records) if show < 0 else show]:
        console.print(conversation_panel(record, lines, console.width - 8))
    console.print(found.summary)
    turns = sum(len(record.turns) for record in records)
    console.print(f"{turns} turns of {len(records)} conversations: {path}")
    if found.has_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Outcome:
    names: Sequence[str]  # of the conversations, in order
    summary: Group | Text
    has_failed: bool


def _replay(
    console: Console, settings: RolloutConfig, folder: Path, parser: str | None, recorder: Recorder
) -> _Outcome:
    from torchrl_agentic.cli.rollout_file import dispatching, load_conversations, load_rollout_tools
    from torchrl_agentic.rollout import replay

    conversations = load_conversations(settings, folder)
    loaded = load_rollout_tools(settings, folder)
    with progress_bar(console) as bar:
        task = bar.add_task("turns", total=sum(len(item.turns) for item in conversations))

        differences = replay(
            conversations,
            loaded.tools,
            recorder=[recorder, lambda turn: bar.advance(task)],
            **dispatching(settings, loaded, parser or settings.parser),
        )
    compared = sum(
        expected is not None for conversation in conversations for expected in conversation.expected
    )
    names = [conversation.name for conversation in conversations]
    return _Outcome(names, replay_summary(compared, differences, width=console.width - 8), bool(differences))


def _ask(
    console: Console, settings: RolloutConfig, folder: Path, parser: str | None, recorder: Recorder
) -> _Outcome:
    from torchrl_agentic.cli.model_loading import open_model
    from torchrl_agentic.cli.rollout_file import load_questions
    from torchrl_agentic.evaluation import evaluate
    from torchrl_agentic.evaluation.eval_sample import record_of

    questions = load_questions(settings, folder)
    with open_model(settings, folder, parser) as opened, progress_bar(console) as bar:
        for sentence in opened.ignored:
            console.print(sentence)
        task = bar.add_task("questions", total=len(questions))
        result = evaluate(
            questions,
            opened.tools,
            opened.engine,
            opened.tokenizer,
            fail_above=1.0,
            progress=lambda state: bar.update(task, completed=state.done),
            **opened.options,
        )
        decode = None if opened.tokenizer is None else opened.tokenizer.decode
    for sample in result.samples:
        recorder.write(record_of(sample, decode=decode))
    names = [sample.task for sample in result.samples]
    return _Outcome(names, answer_summary(result), has_failed=bool(result.failed))


app.command("eval")(eval_model)


@app.command("report")
def _report(
    dump: Dump,
    other: Annotated[Path | None, typer.Argument(help="Dump of another run, to compare.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw charts into this .png file.")] = None,
    as_json: AsJson = False,
    by: Annotated[
        int | None, typer.Option(min=1, help="Number of steps per row; by default, about 24 rows are shown.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Id of the only run to report, or its beginning; by default, all.")
    ] = None,
) -> None:
    """Summarize recorded trajectories: scores, turns, calls, errors, times and tokens, by step and by tool.

    With two runs, print what is better or worse in the second one, and by how much.
    """
    from torchrl_agentic.cli.view import show_report

    raise typer.Exit(show_report(dump, other, png, as_json=as_json, by=by, run=run))


@app.command("export")
def _export(
    dump: Dump,
    out: Annotated[Path, typer.Option(help="File for the rows, as JSON lines.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML configuration, whose tools become the column tools.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Lowest score of a conversation that is kept.")
    ] = None,
    best_per_task: Annotated[
        int | None, typer.Option(min=1, help="Number of conversations of each task that are kept.")
    ] = None,
    keep_incomplete: Annotated[
        bool, typer.Option("--keep-incomplete", help="Also keep conversations that a bound or failure ended.")
    ] = False,
) -> None:
    """Write recorded conversations as rows of messages and tools, for supervised fine-tuning."""
    from torchrl_agentic.cli.rollout_file import load_config, make_tools
    from torchrl_agentic.rollout.to_sft import to_sft

    with mistakes_end_it():
        data = to_sft(
            dump,
            tools=() if config is None else make_tools(load_config(config), config.parent),
            min_score=min_score,
            best_per_task=best_per_task,
            complete_only=not keep_incomplete,
        )
        data.save(out)
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(data.left_out.items()))
    print(f"{len(data)} conversations: {out}{f'; left out: {left_out}' if left_out else ''}")


@app.command("check")
def _check(
    config: Annotated[
        Path | None, typer.Argument(help="YAML configuration, whose tools and parser are checked.")
    ] = None,
    parser: Parser = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of the model, to check its chat template.")
    ] = None,
) -> None:
    """Show which sandboxes work on this machine, and check that calls of each tool parse correctly."""
    if config is not None or parser is not None or tokenizer is not None:
        _check_parser(config, parser, tokenizer)
    if not show_tiers(Console()):
        raise typer.Exit(1)


@app.command("view")
def _view(
    path: Annotated[
        Path,
        typer.Argument(
            help="Dump: a folder with a file per step, a .jsonl or .jsonl.zst file, or the folder of a run."
        ),
    ],
    mask_str: Annotated[
        str, typer.Option(help="Regular expression; matching text is shown as a star.")
    ] = r"<\|image_pad\|>|<\|imgpad\|>",
    query: Annotated[
        str, typer.Option(help="Filter of the list, such as 'status:timeout tool:python score<0.5 words'.")
    ] = "",
    sort: Annotated[
        str, typer.Option(help='Order of the list: "none", "score ascending" or "score descending".')
    ] = "none",
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file instead.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the dump as plain text instead.")] = False,
) -> None:
    """Show recorded trajectories in the terminal, also while they are being written; ? shows the keys."""
    from torchrl_agentic.cli.view import view

    raise typer.Exit(view(path, mask=mask_str, query=query, sort=sort, html=html, as_text=text))


app.command("check sandbox")(check_sandbox)
app.command("check load")(check_load)
app.command("check tools")(check_tools)


def _check_parser(config: Path | None, name: str | None, model: str | None) -> None:
    """Check that calls of all tools parse as written; exit with an error if one does not."""
    from torchrl_agentic.cli.rollout_file import RolloutConfig, load_config, make_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.parsers import PARSERS, Mismatch, check_parser, get_parser
    from torchrl_agentic.tools.tool_adapter import ensure_tool

    console = Console()
    try:
        settings = RolloutConfig(conversations=[]) if config is None else load_config(config)
        tokenizer = None if model is None else _tokenizer(model)
        parser = get_parser(name or settings.parser, tokenizer=tokenizer)
        if model is not None:
            _show_problems(console, model, tokenizer, parser)
        tools = list(map(ensure_tool, make_tools(settings, Path() if config is None else config.parent)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checked = check_parser(parser, tools, tokenizer, parsers=PARSERS)
    except (Mismatch, SandboxError) as error:
        complain(error)
        raise typer.Exit(1) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        complain(error)
        raise typer.Exit(2) from None
    written = "as the chat template writes them" if tokenizer is not None else "as the parser writes them"
    console.print(
        Text(f"parser {parser.name}: calls of {', '.join(checked)} parse correctly {written}", style="green")
    )
    for warning in caught:
        console.print(Text(str(warning.message), style="yellow"))
    if getattr(parser, "reasoning_open", False):
        console.print(Text(_REASONING_OPEN.format(name=parser.name), style="yellow"))
    if unwritable := [tool.name for tool in tools if tool.name not in checked]:
        console.print(Text(f"this format cannot call {', '.join(unwritable)}", style="red"))


def _show_problems(console: Console, model: str, tokenizer: Any, parser: Any) -> None:
    """Print what is likely wrong with a model's end tokens and chat template, a line each."""
    from torchrl_agentic.engines.vllm_engine import saved_generation_config
    from torchrl_agentic.tokens.model_problems import model_problems

    generation_config = saved_generation_config(model)
    for line in model_problems(tokenizer, parser=parser, generation_config=generation_config):
        console.print(Text(line, style="yellow"), soft_wrap=True)


_REASONING_OPEN = (
    "the chat template opens a reasoning block: pass the tokenizer to ToolCompose, or reasoning_open=True to "
    "the parser (get_parser({name!r}, reasoning_open=True)); otherwise calls that the model only considers "
    "may run"
)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return cast("Any", AutoTokenizer).from_pretrained(name)


if __name__ == "__main__":
    app()
