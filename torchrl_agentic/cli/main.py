"""The command line: `torchrl-agentic rollout …`, `… view …`, `… check …`, `… serve …`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text
from typer.core import TyperGroup

from torchrl_agentic.cli.show import conversation, progress, score, verdict

if TYPE_CHECKING:
    from torchrl_agentic.cli.rollout_file import RolloutConfig
    from torchrl_agentic.records import Recorder
    from torchrl_agentic.rollout.evaluate import Completion


class _Words(TyperGroup):
    """Commands, of which some have a name of two words: `check sandbox`, beside `check`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # of click, which later typers bring along
        """Find the command that the first one or two arguments name."""
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Words, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


serve = typer.Typer(no_args_is_help=True, help="Start a server for tools, on this machine.")
app.add_typer(serve, name="serve")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"torchrl-agentic {version('torchrl-agentic')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Tool use for language-model reinforcement learning in TorchRL."""
    del version  # its callback has printed it
    # A console script does not look for modules in the working folder, where those of configurations are.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


@app.command()
def rollout(
    config: Annotated[
        Path | None,
        typer.Argument(help="A YAML configuration; or conversations, or questions, as .json or .jsonl."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Replay this dump with the tools, and the parser, of the configuration."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="What this regular expression matches in results is not compared. May be repeated."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the turns are recorded, as JSON lines.")] = None,
    parser: Annotated[str | None, typer.Option(help="The format in which the model calls tools.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Ask this model: a Hugging Face folder or name, or "tiny", ours.')
    ] = None,
    engine: Annotated[str, typer.Option(help="What generates: transformers or vllm.")] = "transformers",
    show: Annotated[
        int, typer.Option(help="How many conversations, or differences from a dump, to print; -1 for all.")
    ] = -1,
    lines: Annotated[int, typer.Option(help="How many lines of each message to print.")] = 8,
) -> None:
    """Ask a model questions, or replay recorded conversations or a dump, with real tools.

    Say what was called; which answers were right; what the tools answer otherwise now.
    """
    from torchrl_agentic.cli.replay_command import recorded_to, replay_dump

    if replay is not None or ignore:
        if model is not None:
            raise typer.BadParameter("a replay asks no model: give --model or --replay, not both")
        code = replay_dump(replay, config, out, parser, ignore or [], show=show, lines=lines)
        raise typer.Exit(code)
    if config is None:
        raise typer.BadParameter("give a configuration, or conversations or questions: see --help")
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
            found = run(console, settings, config.parent, parser or settings.parser, recorder)
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
        console.print(conversation(record, lines, console.width - 8))
    console.print(found.verdict)
    turns = sum(len(record.turns) for record in records)
    console.print(f"{turns} turns of {len(records)} conversations: {path}")
    if found.failed:
        raise typer.Exit(1)


def _check_engine(name: str) -> None:
    """Raise typer.BadParameter, with the names that there are, if no engine has this one."""
    from typing import get_args

    from torchrl_agentic.rollout.evaluate import Engine

    if name not in get_args(Engine):
        raise typer.BadParameter(
            f"no engine is named {name!r}; engines: {', '.join(get_args(Engine))}", param_hint="--engine"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rollout is summed up by. names: of its conversations, in their order."""

    names: Sequence[str]
    verdict: Group | Text
    failed: bool


def _replay(
    console: Console, settings: RolloutConfig, folder: Path, parser: str, recorder: Recorder
) -> _Found:
    from torchrl_agentic.cli.replay_command import dispatching
    from torchrl_agentic.cli.rollout_file import load_conversations, load_rollout_tools
    from torchrl_agentic.rollout import replay

    conversations = load_conversations(settings, folder)
    loaded = load_rollout_tools(settings, folder)
    with progress(console) as bar:
        task = bar.add_task("turns", total=sum(len(item.turns) for item in conversations))

        differences = replay(
            conversations,
            loaded.tools,
            recorder=[recorder, lambda turn: bar.advance(task)],
            **dispatching(settings, loaded, parser),
        )
    compared = sum(
        expected is not None for conversation in conversations for expected in conversation.expected
    )
    names = [conversation.name for conversation in conversations]
    return _Found(names, verdict(compared, differences, width=console.width - 8), bool(differences))


def _ask(console: Console, settings: RolloutConfig, folder: Path, parser: str, recorder: Recorder) -> _Found:
    import time

    import torch

    from torchrl_agentic.cli.replay_command import dispatching
    from torchrl_agentic.cli.rollout_file import load_questions, load_rollout_tools
    from torchrl_agentic.rollout.evaluate import evaluate, load_model

    chosen = settings.model
    assert chosen is not None
    questions = load_questions(settings, folder)
    loaded = load_rollout_tools(settings, folder)
    path = chosen.path
    if path == "tiny":
        from torchrl_agentic.testing.tiny import TINY

        path = str(TINY)
    model, tokenizer = load_model(path, chosen.engine)
    torch.manual_seed(chosen.seed)
    bound = loaded.max_turns or chosen.max_turns
    if loaded.max_user_turns or loaded.interaction_config_path:
        console.print("max_user_turns and interaction_config_path do nothing here: this command has no user")
    if chosen.mode == "history" and loaded.tokenizer_options:
        console.print("bounds on tool results and the sanity check need 'mode: tokens'; they do nothing here")
    completions: list[Completion] = []
    began = time.perf_counter()
    with progress(console) as bar:
        task = bar.add_task("questions", total=len(questions))
        for completion in evaluate(
            questions,
            loaded.tools,
            model,
            tokenizer,
            recorder=recorder,
            tokenizer_options=loaded.tokenizer_options,
            **chosen.model_dump(exclude={"path", "engine", "seed", "max_turns"}),
            max_turns=chosen.max_turns if "max_turns" in chosen.model_fields_set else bound,
            **dispatching(settings, loaded, parser),
        ):
            completions.append(completion)
            bar.advance(task)
    seconds = time.perf_counter() - began
    names = [completion.sample.name for completion in completions]
    return _Found(names, score(completions, seconds), failed=False)


@app.command()
def report(
    dump: Annotated[Path, typer.Argument(help="A folder with a file per step, or one file.")],
    other: Annotated[Path | None, typer.Argument(help="Another run, to compare with the first.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it, too, into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as one JSON object.")] = False,
    by: Annotated[
        int | None, typer.Option(min=1, help="So many steps are a row; otherwise as many as give 24 rows.")
    ] = None,
) -> None:
    """Sum up recorded trajectories: scores, turns, calls, errors, times and tokens, over steps and per tool.

    Of two runs, say what is better or worse in the second one, and by how much.
    """
    from torchrl_agentic.cli.view import show_report

    raise typer.Exit(show_report(dump, other, png, as_json=as_json, by=by))


@app.command()
def check(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML configuration, whose tools and parser are checked.")
    ] = None,
    parser: Annotated[str | None, typer.Option(help="The format in which the model calls tools.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's folder or name, for its chat template.")
    ] = None,
) -> None:
    """Say which sandbox works here, and whether a call of each tool reads back as the model writes it."""
    from torchrl_agentic.cli.check import show_tiers

    if config is not None or parser is not None or tokenizer is not None:
        _check_parser(config, parser, tokenizer)
    if not show_tiers(Console()):
        raise typer.Exit(1)


@app.command()
def view(
    path: Annotated[
        Path, typer.Argument(help="A folder with a file per step, or a .jsonl or .jsonl.zst file.")
    ],
    mask_str: Annotated[
        str, typer.Option(help="A regular expression; what it matches is shown as a star.")
    ] = r"<\|image_pad\|>|<\|imgpad\|>",
    query: Annotated[
        str, typer.Option(help="What is listed, e.g. 'status:timeout tool:python score<0.5 words'.")
    ] = "",
    sort: Annotated[str, typer.Option(help="none, score ascending or score descending.")] = "none",
    html: Annotated[Path | None, typer.Option(help="Write a page of HTML instead.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print all of it as plain text instead.")] = False,
) -> None:
    """Look at recorded trajectories in the terminal, also while they are being written; ? shows the keys."""
    from torchrl_agentic.cli.view import view

    raise typer.Exit(view(path, mask=mask_str, query=query, sort=sort, html=html, as_text=text))


@app.command("check sandbox")
def check_sandbox(
    name: Annotated[str, typer.Argument(help="Its name, such as bubblewrap, or module:Class.")],
    only: Annotated[str, typer.Option(help="Try only the cases in whose name, or group, this stands.")] = "",
) -> None:
    """Put a sandbox through all that sandboxes promise, attacks among it."""
    from torchrl_agentic.cli.check import try_cases

    raise typer.Exit(try_cases(name, only, Console()))


@app.command("check load")
def check_load(
    tool: Annotated[
        str, typer.Option(help="As in a YAML file: sandbox_fusion, search, python, …, or file.py:function.")
    ] = "sandbox_fusion",
    concurrency: Annotated[int, typer.Option(min=1, help="How many trajectories call at once.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="How many calls there are in all.")] = 500,
    options: Annotated[str, typer.Option(help="The tool's options, as JSON.")] = "{}",
    args: Annotated[str | None, typer.Option(help="What it is called with, as JSON.")] = None,
) -> None:
    """Call a tool many times at once: the rate reached, how long calls wait and run, what goes wrong.

    Services that its options name no URL of are started here.
    """
    from torchrl_agentic.cli.check import check_load

    code = check_load(Console(), tool, options, args, calls=calls, concurrency=concurrency)
    raise typer.Exit(code)


@app.command("check tools")
def check_tools(
    file: Annotated[Path, typer.Argument(help="A YAML file of tools, ours or verl's, or of a rollout.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as one JSON object.")] = False,
) -> None:
    """Show the tools that a file names as the model will see them, or say what is wrong with it.

    Classes and functions that it names are imported, and MCP servers asked what they offer.
    """
    from torchrl_agentic.cli.check import check_tools

    raise typer.Exit(check_tools(Console(), file, as_json=as_json))


_Host = Annotated[
    str, typer.Option(help="The address to listen at; another one than loopback needs a token.")
]
_TokenFile = Annotated[
    Path | None, typer.Option(help="Serve those alone that send the token in this file, as a bearer token.")
]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(help="A name by which others, or a proxy, ask this server. May be repeated."),
]
_Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen at an address that others reach, without a token.")
]
_MaxConnections = Annotated[int, typer.Option(help="How many connections are open at once.")]


@serve.command("sandbox")
def serve_sandbox(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: at a free port.")] = 8080,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="How many programs run at once; otherwise one more than there are processors."),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="How many wait; others are told to come back later.")] = 256,
    max_run_timeout: Annotated[
        float, typer.Option(help="How long requests may ask for to compile, or to run, in seconds.")
    ] = 300.0,
    memory_mb: Annotated[int, typer.Option(help="How much memory a program may take, in MiB.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(help="How long a request may be, in MiB.")] = 32,
    max_connections: _MaxConnections = 512,
) -> None:
    """Run code that is sent over HTTP, each program in its own sandbox; the protocol is Sandbox Fusion's."""
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
def serve_search(
    path: Annotated[Path, typer.Argument(help="A folder of text files, or a .jsonl file of documents.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: at a free port.")] = 8000,
    host: _Host = "127.0.0.1",
    token_file: _TokenFile = None,
    allowed_host: _AllowedHosts = None,
    insecure: _Insecure = False,
    topk: Annotated[int, typer.Option(help="How many documents a query gets if it does not say.")] = 3,
    max_connections: _MaxConnections = 512,
) -> None:
    """Search documents of this machine, as a retrieval service for search agents does, by BM25."""
    from torchrl_agentic.cli import servers

    where = servers.Listening(host, port, token_file, allowed_host or (), insecure, max_connections)
    raise typer.Exit(servers.serve_search(path, where, topk=topk))


def _check_parser(config: Path | None, name: str | None, model: str | None) -> None:
    """See that calls of all tools read back; say how they look, or end with what is wrong."""
    from torchrl_agentic.cli.rollout_file import RolloutConfig, load_config, make_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.parsers import PARSERS, Mismatch, check_parser, get_parser
    from torchrl_agentic.tools.tool_adapter import ensure_tool

    console = Console()
    try:
        settings = RolloutConfig(conversations=[]) if config is None else load_config(config)
        tokenizer = None if model is None else _tokenizer(model)
        parser = get_parser(name or settings.parser, tokenizer=tokenizer)
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
        Text(f"parser {parser.name}: calls of {', '.join(checked)} read back {written}", style="green")
    )
    for warning in caught:
        console.print(Text(str(warning.message), style="yellow"))
    if getattr(parser, "reasoning_open", False):
        console.print(Text(_OPENS_THOUGHT.format(name=parser.name), style="yellow"))
    if unsaid := [tool.name for tool in tools if tool.name not in checked]:
        console.print(Text(f"this format cannot call {', '.join(unsaid)}", style="red"))


_OPENS_THOUGHT = (
    "the chat template opens a thought: give ToolCompose the tokenizer, or the parser reasoning_open=True "
    "(get_parser({name!r}, reasoning_open=True)), or calls that the model only considers may run"
)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


if __name__ == "__main__":
    app()
