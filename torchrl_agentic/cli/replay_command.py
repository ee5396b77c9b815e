"""`torchrl-agentic rollout --replay`: the turns of a dump, against the tools of today."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from torchrl_agentic.cli.show import progress, verdict
from torchrl_agentic.text import printable
from torchrl_agentic.tools.private_files import PRIVATE

if TYPE_CHECKING:
    from torchrl_agentic.cli.rollout_file import RolloutConfig
    from torchrl_agentic.config import LoadedTools
    from torchrl_agentic.records import Dump, Recorder
    from torchrl_agentic.rollout import Conversation

_TOLD = 5


def replay_dump(
    dump: Path | None,
    config: Path | None,
    out: Path | None,
    parser: str | None,
    ignore: Sequence[str],
    *,
    show: int,
    lines: int,
) -> int:
    """Replay a dump, and say what differs; give the exit code. out: where what happens now is recorded."""
    from torchrl_agentic.cli.rollout_file import load_config, load_rollout_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.records import Dump
    from torchrl_agentic.rollout import replay

    console, read = Console(), _Read()
    try:
        if dump is None:
            raise ValueError("--ignore says what does not count in a replay: --replay DIR")
        if config is None or config.suffix not in (".yaml", ".yml"):
            raise ValueError(
                "a dump does not hold the tools: name them, and the parser, in a configuration: "
                "torchrl-agentic rollout --replay DIR config.yaml"
            )
        ignored = [_pattern(one) for one in ignore]
        settings = load_config(config)
        loaded = load_rollout_tools(settings, config.parent)
        with ExitStack() as stack:
            found = stack.enter_context(Dump(dump))
            files = [file.path for file in found.files]
            recorder = None if out is None else stack.enter_context(recorded_to(out, files))
            bar = stack.enter_context(progress(console))
            task = bar.add_task("turns", total=None)
            differences = replay(
                read.conversations(found),
                loaded.tools,
                ignore=ignored,
                recorder=[recorder, lambda turn: bar.advance(task)],
                **dispatching(settings, loaded, parser or settings.parser),
            )
            if not read.turns:
                raise ValueError(
                    f"{dump} holds nothing to replay: {'. '.join(read.complaints) or 'it is empty'}"
                )
    except (SandboxError, ValueError, TypeError, ImportError, OSError) as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {printable(str(error))}", style="red"))
        return 2
    console.print(verdict(read.turns, differences, show=show, lines=lines, width=console.width - 8))
    for line in read.complaints:
        console.print(Text(line, style="yellow"))
    return 1 if differences else 0


def _pattern(ignore: str) -> re.Pattern[str]:
    try:
        return re.compile(ignore)
    except re.error as error:
        raise ValueError(f"--ignore {ignore!r} is no regular expression: {error}") from None


def dispatching(settings: RolloutConfig, loaded: LoadedTools, parser: str) -> dict[str, Any]:
    """Give what every kind of rollout hands on to `ToolCompose`."""
    return {
        "parser": parser,
        "toolsets": loaded.toolsets,
        "rate_limits": loaded.limits,
        "max_calls_per_turn": loaded.max_calls_per_turn,
        "per_call_timeout": settings.per_call_timeout,
        "per_turn_timeout": settings.per_turn_timeout,
    }


@contextmanager
def recorded_to(path: Path, read: Iterable[Path]) -> Generator[Recorder]:
    """Record to a file, in whose place an earlier one stays until all is done. read: what is read meanwhile.

    Raises:
        ValueError: it is no file for records, or one that is read.
    """
    from torchrl_agentic.records import SUFFIXES, Recorder

    if path.resolve() in {one.resolve() for one in read}:
        raise ValueError(f"{path} is what is read; record the turns somewhere else: --out FILE")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"records go to a file, {' or '.join(SUFFIXES)}; got {path}")
    part = path.with_name(f".part-{path.name}")
    part.unlink(missing_ok=True)
    mode = path.stat().st_mode & 0o777 | PRIVATE if path.exists() else PRIVATE
    with Recorder(part, mode=mode) as recorder:
        yield recorder
    part.replace(path)


class _Read:
    """What was read of a dump, as far as it can be replayed; and why the rest cannot."""

    def __init__(self) -> None:
        self.turns = 0
        self._reasons: dict[str, list[str]] = {}
        self._names: Counter[str] = Counter()

    def conversations(self, dump: Dump) -> Iterator[Conversation]:
        """Read a dump, trajectory by trajectory; of several with one name, the later ones get a number."""
        from torchrl_agentic.records import BadLine
        from torchrl_agentic.rollout import Conversation

        for file in dump.files:
            for record in file.records():
                if isinstance(record, BadLine):
                    self._leave_out(
                        "they cannot be read", f"{file.path.name}, line {record.number}: {record.reason}"
                    )
                    continue
                try:
                    found = Conversation.of_record(record)
                except ValueError as error:
                    self._leave_out(str(error), record.trajectory or record.request_id)
                    continue
                self._names[found.name] += 1
                copies = self._names[found.name]
                self.turns += len(found.turns)
                yield found if copies == 1 else replace(found, name=f"{found.name} ({copies})")
            file.close()

    def _leave_out(self, reason: str, what: str) -> None:
        self._reasons.setdefault(reason, []).append(what)

    @property
    def complaints(self) -> list[str]:
        """Say what was left out, and why."""
        return [
            f"{len(names)} left out, as {reason}: {'; '.join(map(printable, names[:_TOLD]))}"
            + ("; …" if len(names) > _TOLD else "")
            for reason, names in self._reasons.items()
        ]
