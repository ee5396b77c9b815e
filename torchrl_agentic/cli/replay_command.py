"""`torchrl-agentic rollout --replay`: repeat the tool calls of a dump, and compare the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from torchrl_agentic.cli.show import complain, progress_bar, replay_summary
from torchrl_agentic.text import printable
from torchrl_agentic.tools.private_files import PRIVATE

if TYPE_CHECKING:
    from torchrl_agentic.records import Dump, Recorder
    from torchrl_agentic.rollout import Conversation

_SHOWN = 5


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
    """Replay a dump, and print the differences.

    Args:
        dump: The dump.
        config: YAML file of the tools and the parser.
        out: File to record the new turns in, or None.
        parser: Name of the parser, in place of the configured one.
        ignore: Regular expressions; matching parts of results are not compared.
        show: Number of differences to print; -1 for all.
        lines: Number of lines to print of each result.

    Returns:
        The exit code: 0, 1 if a result differs, or 2 for a mistake of the user.
    """
    from torchrl_agentic.cli.rollout_file import dispatching, load_config, load_rollout_tools
    from torchrl_agentic.errors import SandboxError
    from torchrl_agentic.records import Dump
    from torchrl_agentic.rollout import replay

    console, read = Console(), _Read()
    try:
        if dump is None:
            raise ValueError("--ignore needs a replay: add --replay DIR")
        if config is None or config.suffix not in (".yaml", ".yml"):
            raise ValueError(
                "a dump does not contain the tools and the parser: name them in a configuration: "
                "torchrl-agentic rollout --replay DIR config.yaml"
            )
        ignored = [_pattern(one) for one in ignore]
        settings = load_config(config)
        loaded = load_rollout_tools(settings, config.parent)
        with ExitStack() as stack:
            found = stack.enter_context(Dump(dump))
            files = [file.path for file in found.files]
            recorder = None if out is None else stack.enter_context(recorded_to(out, files))
            bar = stack.enter_context(progress_bar(console))
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
                    f"{dump} has nothing to replay: {'. '.join(read.complaints) or 'it is empty'}"
                )
    except (SandboxError, ValueError, TypeError, ImportError, OSError) as error:
        complain(error)
        return 2
    console.print(replay_summary(read.turns, differences, show=show, lines=lines, width=console.width - 8))
    for line in read.complaints:
        console.print(Text(line, style="yellow"))
    return 1 if differences else 0


def _pattern(ignore: str) -> re.Pattern[str]:
    try:
        return re.compile(ignore)
    except re.error as error:
        raise ValueError(f"--ignore {ignore!r} is not a regular expression: {error}") from None


@contextmanager
def recorded_to(path: Path, read: Iterable[Path]) -> Generator[Recorder]:
    """Record to a temporary file, which replaces `path` when everything has succeeded.

    Args:
        path: File for the records.
        read: Input files; `path` must not be one of them.

    Raises:
        ValueError: If `path` is one of them, or has another suffix.
    """
    from torchrl_agentic.records import SUFFIXES, Recorder

    if path.resolve() in {one.resolve() for one in read}:
        raise ValueError(f"{path} is also an input: record the turns somewhere else, with --out FILE")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"--out must name a {' or '.join(SUFFIXES)} file; got {path}")
    part = path.with_name(f".part-{path.name}")
    part.unlink(missing_ok=True)
    mode = path.stat().st_mode & 0o777 | PRIVATE if path.exists() else PRIVATE
    with Recorder(part, mode=mode) as recorder:
        yield recorder
    part.replace(path)


class _Read:
    """Reads the trajectories of a dump that can be replayed, and collects why others cannot."""

    def __init__(self) -> None:
        self.turns = 0
        self._reasons: dict[str, list[str]] = {}
        self._names: Counter[str] = Counter()

    def conversations(self, dump: Dump) -> Iterator[Conversation]:
        """Yield the conversations of a dump. Repeated names get a number."""
        from torchrl_agentic.records import BadLine
        from torchrl_agentic.rollout import Conversation

        for file in dump.files:
            for record in file.records():
                if isinstance(record, BadLine):
                    self._leave_out("unreadable", f"{file.path.name}, line {record.number}: {record.reason}")
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
        """One sentence per reason why trajectories were left out."""
        return [
            f"{len(names)} left out: {reason}: {'; '.join(map(printable, names[:_SHOWN]))}"
            + ("; …" if len(names) > _SHOWN else "")
            for reason, names in self._reasons.items()
        ]
