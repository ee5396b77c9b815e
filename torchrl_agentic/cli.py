"""The command line: `torchrl-agentic rollout …`, `torchrl-agentic check …`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

if TYPE_CHECKING:
    from torchrl_agentic.messages import Message, Turn
    from torchrl_agentic.rollout import Conversation, Difference, ToolSummary


class _Words(TyperGroup):
    """Commands, of which some have a name of two words: `check sandbox`, beside `check`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # of click, which later typers bring along
        """Find the command that the first one or two arguments name."""
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Words, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_ROLE_STYLE = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


@app.callback()
def main() -> None:
    """Tool use for language-model reinforcement learning in TorchRL."""


@app.command()
def rollout(
    config: Annotated[
        Path, typer.Argument(help="A YAML configuration, or conversations as .json or .jsonl.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the turns are recorded, as JSON lines.")] = None,
    parser: Annotated[str | None, typer.Option(help="The format in which the model calls tools.")] = None,
    show: Annotated[int, typer.Option(help="How many conversations to print; -1 for all.")] = -1,
    lines: Annotated[int, typer.Option(help="How many lines of each message to print.")] = 8,
) -> None:
    """Replay recorded conversations with real tools.

    Say what was called, and what the tools answer otherwise now.
    """
    from torchrl_agentic.config import ConfigError, load_config, load_conversations, make_limits, make_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.records import Recorder
    from torchrl_agentic.rollout import replay, summarize

    console = Console()
    folder = config.parent
    turns: dict[str, list[Turn]] = {}
    try:
        settings = load_config(config)
        conversations = load_conversations(settings, folder)
        tools, limits = make_tools(settings, folder), make_limits(settings)
        path = out or Path(settings.out)
        if path.resolve() in {(folder / name).resolve() for name in (*settings.conversations, config.name)}:
            raise ConfigError(f"{path} is what is replayed; record the turns somewhere else: --out FILE")
        part = path.with_name(path.name + ".part")  # an earlier record stays until there is a new one
        part.unlink(missing_ok=True)
        with _progress(console) as progress, Recorder(part) as recorder:
            task = progress.add_task("turns", total=sum(len(item.turns) for item in conversations))

            def on_turn(name: str, turn: Turn) -> None:
                recorder(turn)
                turns.setdefault(name, []).append(turn)
                progress.advance(task)

            differences = replay(
                conversations,
                tools,
                parser=parser or settings.parser,
                rate_limits=limits,
                per_call_timeout=settings.per_call_timeout,
                per_turn_timeout=settings.per_turn_timeout,
                on_turn=on_turn,
            )
        part.replace(path)
    except (ConfigError, SandboxError, ValueError, TypeError) as error:
        place = "" if str(config) in str(error) else f"{config}: "
        Console(stderr=True).print(Text(f"torchrl-agentic: {place}{error}", style="red"))
        raise typer.Exit(2) from None

    console.print(_table(summarize(turn for found in turns.values() for turn in found)))
    for conversation in conversations if show < 0 else conversations[:show]:
        console.print(_conversation(conversation, turns.get(conversation.name, []), lines, console.width - 8))
    compared = sum(bool(expected) for conversation in conversations for expected in conversation.expected)
    console.print(_verdict(compared, differences))
    console.print(f"{sum(map(len, turns.values()))} turns of {len(conversations)} conversations: {path}")
    if differences:
        raise typer.Exit(1)


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
    from torchrl_agentic.cli_sandbox import show_tiers

    if config is not None or parser is not None or tokenizer is not None:
        _check_parser(config, parser, tokenizer)
    if not show_tiers(Console()):
        raise typer.Exit(1)


@app.command("check sandbox")
def check_sandbox(
    name: Annotated[str, typer.Argument(help="Its name, such as bubblewrap, or module:Class.")],
    only: Annotated[str, typer.Option(help="Try only the cases in whose name, or group, this stands.")] = "",
) -> None:
    """Put a sandbox through all that sandboxes promise, attacks among it."""
    from torchrl_agentic.cli_sandbox import try_cases

    raise typer.Exit(try_cases(name, only, Console()))


def _check_parser(config: Path | None, name: str | None, model: str | None) -> None:
    """See that calls of all tools read back; say how they look, or end with what is wrong."""
    from torchrl_agentic.config import RolloutConfig, load_config, make_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.parsers import PARSERS, Mismatch, check_parser, get_parser
    from torchrl_agentic.tool import ensure_tool

    console = Console()
    try:
        settings = RolloutConfig(conversations=[]) if config is None else load_config(config)
        tokenizer = None if model is None else _tokenizer(model)
        parser = get_parser(name or settings.parser, tokenizer=tokenizer)
        tools = list(map(ensure_tool, make_tools(settings, Path() if config is None else config.parent)))
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
    if unsaid := [tool.name for tool in tools if tool.name not in checked]:
        console.print(Text(f"this format cannot call {', '.join(unsaid)}", style="red"))


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=not console.is_terminal)


def _table(summaries: list[ToolSummary]) -> Table:
    from torchrl_agentic.messages import Status
    from torchrl_agentic.rollout.summary import quantile

    table = Table(title="Calls per tool, times in ms", title_justify="left", box=box.SIMPLE)
    table.add_column("tool", no_wrap=True)
    for name in ("calls", "ok", "p50", "p95", "queue p95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("errors")
    for item in summaries:
        kinds = ", ".join(
            f"{n} {status}" for status, n in item.statuses.most_common() if status is not Status.OK
        )
        times = (quantile(item.run_s, 0.5), quantile(item.run_s, 0.95), quantile(item.queue_s, 0.95))
        counts = (str(item.calls), str(item.calls - item.errors))
        table.add_row(
            Text(_printable(item.tool)), *counts, *(f"{1000 * seconds:.1f}" for seconds in times), kinds
        )
    return table


def _conversation(conversation: Conversation, turns: list[Turn], lines: int, width: int) -> Panel:
    parts: list[Text] = [_message(message, lines, width) for message in conversation.prompt]
    for turn in turns:
        parts.append(_message(turn.message, lines, width))
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
            seconds = result.timing.run_s if result.timing is not None else 0.0
            head = (
                f"{call.tool or '(unreadable)'} · {result.status} · {1000 * seconds:.0f} ms · {call.call_id}"
            )
            head = _printable(head)
            style = "bold red" if result.is_error else "bold yellow"
            parts.append(Text.assemble((f"{head}\n", style), _clip(result.text, lines, width)))
    return Panel(Group(*parts), title=Text(_printable(conversation.name)), title_align="left")


def _message(message: Message, lines: int, width: int) -> Text:
    style = f"bold {_ROLE_STYLE.get(message.role, '')}"
    return Text.assemble((f"{_printable(message.role)}\n", style), _clip(message.text.strip(), lines, width))


def _clip(text: str, lines: int, width: int) -> str:
    """Show the first lines of a text, wrapped."""
    wrapped = [piece for line in text.split("\n") for piece in textwrap.wrap(_printable(line), width) or [""]]
    more = [f"… {len(wrapped) - lines} more lines"] if len(wrapped) > lines + 1 else []
    return "\n".join("  " + line for line in [*(wrapped[:lines] if more else wrapped), *more])


def _printable(text: str) -> str:
    """Keep control characters from the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _verdict(compared: int, differences: list[Difference]) -> Group | Text:
    if not differences:
        return Text(f"Results of {compared} turns equal the recorded ones.", style="green")
    lines = [
        Text(f"Results of {len(differences)} of {compared} turns differ from the recorded ones:", style="red")
    ]
    for item in differences:
        name = _printable(item.conversation)
        lines.append(Text(f"  {name}, turn {item.turn}: {item.recorded!r} was recorded, now {item.now!r}"))
    return Group(*lines)


if __name__ == "__main__":
    app()
