"""Read the YAML file of a rollout: conversations or questions, tools, limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pydantic

from torchrl_agentic.config import ConfigError, LoadedTools, Location, ToolsConfig, load_config_tools
from torchrl_agentic.config.document import read_yaml
from torchrl_agentic.config.sections import MultiTurnSection, read_section
from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON, Fields, Message, fields_of
from torchrl_agentic.rollout.evaluate import Sample
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.text import read_json


class ModelConfig(pydantic.BaseModel):
    """The model that answers the questions; see `rollout.evaluate`.

    Attributes:
        path: A Hugging Face folder or name, or "tiny" for the model of this package.
        engine: Inference engine.
        rows: Number of questions in a batch.
        max_turns: Largest number of turns of a trajectory.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Sampling temperature; 0 for greedy sampling.
        mode: Whether the model gets exact token ids, or messages through its chat template.
        tool_choice: "required" forces a tool call; None leaves the choice to the engine's default.
        seed: Seed of the random number generator.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    path: str
    engine: Literal["transformers", "vllm"] = "transformers"
    rows: pydantic.PositiveInt = 16
    max_turns: pydantic.PositiveInt = 8
    max_new_tokens: pydantic.PositiveInt = 512
    temperature: pydantic.NonNegativeFloat = 1.0
    mode: Literal["tokens", "history"] = "tokens"
    tool_choice: Literal["auto", "required"] | None = None
    seed: int = 0


class RolloutConfig(ToolsConfig):
    """The keys of a YAML file for `torchrl-agentic rollout`, beside the tools of `ToolsConfig`.

    A file that names no tools has `python` and `stop`.

    Attributes:
        conversations: Files of conversations to replay, relative to the YAML file.
        questions: Files of questions for the model, relative to the YAML file.
        model: The model.
        system_prompt: System message that is added before each question that is a string.
        parser: Name of the parser.
        per_call_timeout: Time limit of a tool call, in seconds; None for no limit.
        per_turn_timeout: Time limit of all calls of a turn, in seconds; None for no limit.
        out: File of the result, relative to the working directory.
    """

    conversations: list[str] = pydantic.Field(default_factory=list)
    questions: list[str] = pydantic.Field(default_factory=list)
    model: ModelConfig | None = None
    system_prompt: str | None = None
    parser: str = "hermes"
    per_call_timeout: float | None = 30.0
    per_turn_timeout: float | None = None
    out: str = "rollouts/rollout.jsonl"
    _location: Location | None = pydantic.PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _asks_or_replays(self) -> RolloutConfig:
        if bool(self.questions) != (self.model is not None):
            raise ValueError("questions need a model: give both, or conversations to replay")
        if self.conversations and self.questions:
            raise ValueError("give conversations to replay, or questions and a model, not both")
        if not self.model_fields_set & ToolsConfig.model_fields.keys() - {"limits", "tool_selected_list"}:
            self.tools = ["python", "stop"]
        if "parser" not in self.model_fields_set:
            for section in self.inner_sections().values():
                if isinstance(section, MultiTurnSection) and section.format:
                    self.parser = section.format
        return self

    @classmethod
    def read(cls, data: JSON, location: Location) -> RolloutConfig:
        """Validate the values of a file.

        Args:
            data: Plain values.
            location: Position of the values; tools and limiters name it in errors.

        Raises:
            ConfigError: If the data does not fit; the message has one line per mistake.
        """
        config = read_section(cls, data, location)
        config._location = location
        return config

    def location(self, folder: Path) -> Location:
        """Return the position in the file that it was read from.

        Args:
            folder: Directory of a configuration that was not read from a file.
        """
        return self._location or Location(folder)


def load_config(path: Path, model: ModelConfig | None = None) -> RolloutConfig:
    """Read a YAML file, or return the configuration that replays a file of conversations.

    Args:
        path: A YAML file, or a file of conversations, or of questions if a model is given.
        model: Replaces the model of the file.

    Raises:
        ConfigError: If the file is missing, not YAML, or has other keys than `RolloutConfig`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix not in (".yaml", ".yml"):
        name = [path.name]
        return RolloutConfig(questions=name, model=model) if model else RolloutConfig(conversations=name)
    data, location = read_yaml(path)
    fields = fields_of(data)
    if model is not None and fields is not None:
        data = {**fields, "model": model.model_dump(exclude_unset=True)}
    return RolloutConfig.read(data, location)


def load_rollout_tools(config: RolloutConfig, folder: Path) -> LoadedTools:
    """Create the tools and limiters of a configuration.

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.

    Raises:
        ConfigError: If an entry is not a tool, its options do not fit, or a limiter has wrong arguments.
    """
    return load_config_tools(config, config.location(folder))


def make_tools(config: RolloutConfig, folder: Path) -> list[Any]:
    """Create the tools of a configuration; see `load_rollout_tools`.

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.
    """
    return list(load_rollout_tools(config, folder).tools)


def load_conversations(config: RolloutConfig, folder: Path) -> list[Conversation]:
    """Read the conversations: JSON lines, one JSON object, or a list of them, each with "messages".

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.

    Raises:
        ConfigError: If a file is missing or has another form; the message names file and line.
    """
    found: list[Conversation] = []
    for path, place, item in _read(config.conversations, folder):
        conversation = _conversation(place, item, f"{path.stem}-{len(found)}")
        found.append(_renamed(conversation, found))
    if not found:
        raise ConfigError(f"no conversations in {', '.join(config.conversations)}")
    return found


def load_questions(config: RolloutConfig, folder: Path) -> list[Sample]:
    """Read the questions from JSON lines, JSON or Parquet.

    A question has "query" (a string), or "messages" or "prompt" (lists of messages). "name" is optional, as
    is the correct answer in "answer" or, as in verl, `reward_model.ground_truth`.

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.

    Raises:
        MissingExtra: If a file is Parquet, and pyarrow is not installed.
        ConfigError: If a file is missing or has another form; the message names file and line.
    """
    found: list[Sample] = []
    for path, place, item in _read(config.questions, folder):
        question = _question(place, item, f"{path.stem}-{len(found)}", config.system_prompt)
        found.append(_renamed(question, found))
    if not found:
        raise ConfigError(f"no questions in {', '.join(config.questions)}")
    return found


def _question(place: str, item: JSON, name: str, system_prompt: str | None) -> Sample:
    fields = fields_of(item) or {}
    query = fields.get("query")
    asked = next((fields[key] for key in ("messages", "query", "prompt") if fields.get(key)), None)
    messages = _messages(asked)
    truth = (fields_of(fields.get("reward_model")) or {}).get("ground_truth")
    answer = fields.get("answer")
    if answer is None and isinstance(truth, str | int | float):
        answer = truth
    if isinstance(query, str):
        system = [] if system_prompt is None else [Message("system", system_prompt)]
        prompt = (*system, Message("user", query))
    elif messages:
        prompt = tuple(Message(m["role"], m.get("content")) for m in messages)
    else:
        raise ConfigError(
            f'{place}: expected {{"query": "…"}} or {{"messages": [{{"role", "content"}}, …]}}, which may '
            'also be called "prompt"'
        )
    if not isinstance(answer, str | int | float | None):
        raise ConfigError(f"{place}: expected a string or number as the answer; got {answer!r}")
    return Sample(str(fields.get("name", name)), prompt, None if answer is None else str(answer))


def _messages(value: JSON) -> list[Fields] | None:
    """Return a list of messages, or None if the value is something else."""
    if not isinstance(value, list):
        return None
    found = [fields_of(item) for item in cast("list[JSON]", value)]
    messages = [fields for fields in found if fields is not None and isinstance(fields.get("role"), str)]
    return messages if len(messages) == len(found) else None


Named = TypeVar("Named", Conversation, Sample)


def _renamed(item: Named, others: Sequence[Named]) -> Named:
    """Return the item under a name that no other item has."""
    names = {other.name for other in others}
    copies = (f"{item.name} ({n})" for n in itertools.count(2))
    name = item.name
    while name in names:
        name = next(copies)
    return dataclasses.replace(item, name=name)


def _read(names: Sequence[str], folder: Path) -> Iterator[tuple[Path, str, JSON]]:
    """Yield the items of files: the file, the position in it, the item."""
    for name in names:
        path = folder / name
        if path.suffix == ".parquet":
            yield from ((path, f"{path}, row {n}", row) for n, row in enumerate(_parquet(path)))
            continue
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        for place, item in _items(path, text):
            yield path, place, item


def _parquet(path: Path) -> list[dict[str, JSON]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(f"{path}", "pyarrow", "parquet") from None
    try:
        return cast("Any", parquet).read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a Parquet file: {error}") from None


def _items(path: Path, text: str) -> list[tuple[str, JSON]]:
    if path.suffix == ".jsonl":  # one object a line; in JSON, nothing but a newline ends one
        lines = enumerate(text.split("\n"), 1)
        return [(f"{path}, line {n}", _json(f"{path}, line {n}", line)) for n, line in lines if line.strip()]
    whole = _json(str(path), text)
    items = cast("list[JSON]", whole) if isinstance(whole, list) else [whole]
    return [(f"{path}, item {n}", item) for n, item in enumerate(items)]


def _json(place: str, text: str) -> JSON:
    try:
        return read_json(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None


def _conversation(place: str, item: JSON, name: str) -> Conversation:
    fields = fields_of(item) or {}
    messages = _messages(fields.get("messages"))
    if messages is None:
        raise ConfigError(f'{place}: expected {{"messages": [{{"role", "content"}}, …]}}')
    try:
        return Conversation.of(
            str(fields.get("name", name)),
            [
                Message(m["role"], m.get("content"), tuple(m.get("tool_calls") or ()), m.get("tool_call_id"))
                for m in messages
            ],
        )
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
