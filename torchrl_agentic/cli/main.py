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

from torchrl_agentic.cli.show import answer_summary, conversation_panel, progress_bar, replay_summary

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
    parser: Annotated[str | None, typer.Option(help="Tool-call format of the model, such as hermes.")] = None,
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
    from torchrl_agentic.cli.rollout_file import ConfigError, ModelConfig, load_config
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.records import TrajectoryRecord, read_records
    from torchrl_agentic.records.call_stats import summarize
    from torchrl_agentic.viewer.report.tables import tool_tables
    from torchrl_agentic.viewer.report.tally import tool_reports

    console = Console()
    try:
        _check_engine(engine)
        asked = None if model is None else ModelConfig.model_validate({"path": model, "engine": engine})
        settings = load_config(config, asked)
        path = out or Path(settings.out)
        read = (*settings.conversations, *settings.questions, config.name)
        with recorded_to(path, [config.parent / name for name in read]) as recorder:
            run = _ask if settings.model is not None else _replay
            found = run(console, settings, config.parent, parser, recorder)
        read = [record for record in read_records(path) if isinstance(record, TrajectoryRecord)]
    except (ConfigError, SandboxError, ValueError, TypeError, ImportError, OSError) as error:
        place = "" if str(config) in str(error) else f"{config}: "
        Console(stderr=True).print(Text(f"torchrl-agentic: {place}{error}", style="red"))
        raise typer.Exit(2) from None

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


def _check_engine(name: str) -> None:
    """Raise typer.BadParameter, which lists the engines, if none has this name."""
    from typing import get_args

    from torchrl_agentic.cli.rollout_file import ModelConfig

    engines = get_args(ModelConfig.model_fields["engine"].annotation)
    if name not in engines:
        raise typer.BadParameter(
            f"no engine is named {name!r}; engines: {', '.join(engines)}", param_hint="--engine"
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    names: Sequence[str]  # of the conversations, in order
    summary: Group | Text
    has_failed: bool


def _replay(
    console: Console, settings: RolloutConfig, folder: Path, parser: str | None, recorder: Recorder
) -> _Outcome:
    from torchrl_agentic.cli.replay_command import dispatching
    from torchrl_agentic.cli.rollout_file import load_conversations, load_rollout_tools
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
    from torchrl_agentic.cli.opened_model import open_model
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


@app.command("eval")
def _eval(
    config: Annotated[Path, typer.Argument(help="YAML configuration with questions, a model and 'eval:'.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions, from the first.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of samples per question.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the evaluation in the folder: ask what is missing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default evals/NAME.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the evaluation; by default, the file's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask, in place of the file's.")] = None,
    engine: Annotated[str | None, typer.Option(help="Its engine: transformers, vllm or openai.")] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of the service, with openai.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    parser: Annotated[str | None, typer.Option(help="Tool-call format of the model, such as hermes.")] = None,
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
        int | None, typer.Option(min=1, help="Ask no more samples after this number of tokens in all.")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(help="Ask no more samples after this cost.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as a JSON object.")] = False,
) -> None:
    """Evaluate a model on questions with scorers: means with intervals, pass@k, failures, tokens and cost.

    Exit with 0 if every sample was scored, with 1 if samples failed or are missing.
    """
    from torchrl_agentic.cli.eval_command import EvalFlags, run_eval

    if engine is not None:
        _check_engine(engine)
    flags = EvalFlags(
        model=model,
        engine=engine,
        base_url=base_url,
        parser=parser,
        temperature=temperature,
        seed=seed,
        name=name,
        out=out,
        limit=limit,
        epochs=epochs,
        concurrency=concurrency,
        max_turns=max_turns,
        max_tokens=max_tokens,
        max_trajectory_tokens=max_trajectory_tokens,
        max_total_tokens=max_total_tokens,
        max_cost=max_cost,
    )
    raise typer.Exit(run_eval(config, flags, resume=resume, as_json=as_json))


@app.command("report")
def _report(
    dump: Annotated[Path, typer.Argument(help="Dump: a folder with a file per step, or one file.")],
    other: Annotated[Path | None, typer.Argument(help="Dump of another run, to compare.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw charts into this .png file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as a JSON object.")] = False,
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
    dump: Annotated[Path, typer.Argument(help="Dump: a folder with a file per step, or one file.")],
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
    from torchrl_agentic.cli.export import export

    code = export(
        dump,
        out,
        config=config,
        min_score=min_score,
        best_per_task=best_per_task,
        complete_only=not keep_incomplete,
    )
    raise typer.Exit(code)


@app.command("check")
def _check(
    config: Annotated[
        Path | None, typer.Argument(help="YAML configuration, whose tools and parser are checked.")
    ] = None,
    parser: Annotated[str | None, typer.Option(help="Tool-call format of the model, such as hermes.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of the model, to check its chat template.")
    ] = None,
) -> None:
    """Show which sandboxes work on this machine, and check that calls of each tool parse correctly."""
    from torchrl_agentic.cli.check import show_tiers

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


@app.command("check sandbox")
def _check_sandbox(
    name: Annotated[str, typer.Argument(help="Name of the sandbox, such as bubblewrap, or module:Class.")],
    only: Annotated[str, typer.Option(help="Run only the cases whose name or group contains this.")] = "",
) -> None:
    """Run the conformance cases of a sandbox, which include attacks."""
    from torchrl_agentic.cli.check import try_cases

    raise typer.Exit(try_cases(name, only, Console()))


@app.command("check load")
def _check_load(
    tool: Annotated[
        str, typer.Option(help="Tool as in a YAML file: sandbox_fusion, search, python, or file.py:function.")
    ] = "sandbox_fusion",
    concurrency: Annotated[int, typer.Option(min=1, help="Number of trajectories that call at once.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="Total number of calls.")] = 500,
    options: Annotated[str, typer.Option(help="Options of the tool, as a JSON object.")] = "{}",
    args: Annotated[str | None, typer.Option(help="Arguments of each call, as a JSON object.")] = None,
) -> None:
    """Load-test a tool: measure calls per second, queue times, run times and errors.

    If the options name no URL of a service, the service is started on this machine.
    """
    from torchrl_agentic.cli.check import check_load

    code = check_load(Console(), tool, options, args, calls=calls, concurrency=concurrency)
    raise typer.Exit(code)


@app.command("check tools")
def _check_tools(
    file: Annotated[
        Path, typer.Argument(help="YAML file of tools (this package's form, or verl's) or of a rollout.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the tools as a JSON object.")] = False,
) -> None:
    """Show the tools of a YAML file as the model sees them, or its first mistake.

    The classes and functions of the file are imported, and its MCP servers are asked for their tools.
    """
    from torchrl_agentic.cli.check import check_tools

    raise typer.Exit(check_tools(Console(), file, as_json=as_json))


_Host = Annotated[
    str, typer.Option(help="Address to listen at; other addresses than loopback need --token-file.")
]
_TokenFile = Annotated[Path | None, typer.Option(help="File of the bearer token that clients must send.")]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(help="Host name under which clients or a proxy reach this server. Repeatable."),
]
_Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address other than loopback without a token.")
]
_MaxConnections = Annotated[int, typer.Option(help="Largest number of open connections.")]


@serve.command("sandbox")
def _serve_sandbox(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for a free one.")] = 8080,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Largest number of running programs; one more than the processors by default."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Largest number of waiting programs; further requests get status 429.")
    ] = 256,
    max_run_timeout: Annotated[
        float, typer.Option(help="Largest time limit for compiling or running, in seconds.")
    ] = 300.0,
    memory_mb: Annotated[int, typer.Option(help="Memory limit of a program, in MiB.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(help="Largest size of a request, in MiB.")] = 32,
    max_connections: _MaxConnections = 512,
) -> None:
    """Run programs sent over HTTP, each in its own sandbox, with the protocol of Sandbox Fusion."""
    from torchrl_agentic.cli import servers

    code = servers.serve_sandbox(
        servers.Listening(host, port, token_file, allowed_host or (), insecure, max_connections),
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_run_timeout=max_run_timeout,
        memory_mb=memory_mb,
        max_body_mb=max_body_mb,
    )
    raise typer.Exit(code)


@serve.command("search")
def _serve_search(
    path: Annotated[Path, typer.Argument(help="Folder of text files, or a .jsonl file of documents.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for a free one.")] = 8000,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    topk: Annotated[int, typer.Option(help="Default number of documents per query.")] = 3,
    max_connections: _MaxConnections = 512,
) -> None:
    """Serve a BM25 search in local documents, with the protocol of Search-R1's retrieval service."""
    from torchrl_agentic.cli import servers

    where = servers.Listening(host, port, token_file, allowed_host or (), insecure, max_connections)
    raise typer.Exit(servers.serve_search(path, where, topk=topk))


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
        Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
        raise typer.Exit(1) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
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
