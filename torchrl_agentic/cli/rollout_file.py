"""Read the YAML file of a rollout: conversations or questions, tools, limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pydantic

from torchrl_agentic.cli.eval_section import EvalSection
from torchrl_agentic.config import ConfigError, LoadedTools, Location, ToolsConfig, load_config_tools
from torchrl_agentic.config.document import read_yaml
from torchrl_agentic.config.sections import MultiTurnSection, read_section
from torchrl_agentic.messages import JSON, Fields, Message, fields_of
from torchrl_agentic.rollout.dataset_item import DatasetItem, read_file
from torchrl_agentic.rollout.load_tasks import load_tasks
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.trajectory.task import Task


class ModelConfig(pydantic.BaseModel):
    """The model that answers the questions; see `evaluate`.

    Attributes:
        path: A Hugging Face folder or name, or "tiny" for the model of this package. With "openai",
            the name of the model at the service.
        engine: Inference engine: "transformers", "vllm", or "openai" for a service with OpenAI's API.
        rows: Number of questions that are worked on at once.
        max_turns: Largest number of turns of a trajectory.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Sampling temperature; 0 for greedy sampling. With "openai", the service's if it is left
            out.
        mode: Whether the model gets exact token ids, or messages through its chat template.
        tool_choice: "required" forces a tool call; None leaves the choice to the engine's default.
        seed: Seed of the random number generator.
        device: Device of a model of transformers, such as "cuda:1"; None: a GPU if there is one.
        dtype: Data type of the weights; None: that of the checkpoint, but float32 on a CPU.
        base_url: URL of the service, with "openai"; None: OPENAI_BASE_URL, else OpenAI's.
        api_key_env: Environment variable with the key of the service; None: OPENAI_API_KEY.
        price: Price per million tokens: "prompt", "completion" and perhaps "cached".
        extra_body: Additional fields of each request to the service.
        reasoning_field: Field in which reasoning is sent back to the service, as in `OpenAIEngine`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    path: str
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    rows: pydantic.PositiveInt = 16
    max_turns: pydantic.PositiveInt = 8
    max_new_tokens: pydantic.PositiveInt = 512
    temperature: pydantic.NonNegativeFloat = 1.0
    mode: Literal["tokens", "history"] = "tokens"
    tool_choice: Literal["auto", "required"] | None = None
    seed: int = 0
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    price: dict[Literal["prompt", "completion", "cached"], float] | None = None
    extra_body: dict[str, Any] | None = None
    reasoning_field: str | None = "auto"

    @pydantic.model_validator(mode="after")
    def _fits_the_engine(self) -> ModelConfig:
        of_service = {
            "base_url",
            "api_key_env",
            "price",
            "extra_body",
            "reasoning_field",
        } & self.model_fields_set
        if of_service and self.engine != "openai":
            raise ValueError(f"{', '.join(sorted(of_service))}: only with 'engine: openai'")
        if (of_model := {"device", "dtype"} & self.model_fields_set) and self.engine == "openai":
            raise ValueError(f"{', '.join(sorted(of_model))}: the service decides, with 'engine: openai'")
        if self.engine == "openai" and self.tool_choice is not None:
            raise ValueError("tool_choice needs vLLM; write extra_body: {tool_choice: …} for a service")
        if self.price is not None and not {"prompt", "completion"} <= self.price.keys():
            raise ValueError("price needs 'prompt' and 'completion', per million tokens")
        return self


class RolloutConfig(ToolsConfig):
    """The keys of a YAML file for `torchrl-agentic rollout`, in addition to those of `ToolsConfig`.

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
        eval: Options of `torchrl-agentic eval`.
    """

    conversations: list[str] = pydantic.Field(default_factory=list)
    questions: list[str] = pydantic.Field(default_factory=list)
    model: ModelConfig | None = None
    system_prompt: str | None = None
    parser: str = "hermes"
    per_call_timeout: float | None = 30.0
    per_turn_timeout: float | None = None
    out: str = "rollouts/rollout.jsonl"
    eval: EvalSection | None = None
    _location: Location | None = pydantic.PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _asks_or_replays(self) -> RolloutConfig:
        if self.questions and self.model is None:
            raise ValueError("questions need a model: write 'model: {path: …}', or use --model")
        if self.model is not None and not self.questions:
            raise ValueError(
                "a model needs questions: write 'questions: [train.parquet]', or leave out 'model'"
            )
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


def dispatching(settings: RolloutConfig, loaded: LoadedTools, parser: str) -> dict[str, Any]:
    """Return the arguments of `ToolCompose` that all kinds of rollouts share.

    Args:
        settings: The configuration.
        loaded: Its tools.
        parser: Name of the parser.
    """
    return {
        "parser": parser,
        "toolsets": loaded.toolsets,
        "rate_limits": loaded.limits,
        "max_calls_per_turn": loaded.max_calls_per_turn,
        "per_call_timeout": settings.per_call_timeout,
        "per_turn_timeout": settings.per_turn_timeout,
    }


def load_conversations(config: RolloutConfig, folder: Path) -> list[Conversation]:
    """Read the conversations: JSON lines, one JSON object, or a list of them, each with "messages".

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.

    Raises:
        ConfigError: If a file is missing or has another form; the message names file and line.
    """
    found: list[Conversation] = []
    for item in _read(config.conversations, folder):
        conversation = _conversation(item.place, item.value, f"{item.stem}-{len(found)}")
        found.append(_renamed(conversation, found))
    if not found:
        raise ConfigError(f"no conversations in {', '.join(config.conversations)}")
    return found


def load_questions(config: RolloutConfig, folder: Path) -> list[Task]:
    """Read the questions from JSON lines, JSON, Parquet or CSV; see `load_tasks` for their columns.

    Args:
        config: The configuration.
        folder: Directory that its paths are relative to.

    Raises:
        MissingExtra: If a file is Parquet, and pyarrow is not installed.
        ConfigError: If a file is missing or has another form; the message names file and line.
    """
    try:
        return load_tasks([folder / name for name in config.questions], system_prompt=config.system_prompt)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None


def _messages(value: JSON) -> list[Fields] | None:
    """Return a list of messages, or None if the value is something else."""
    if not isinstance(value, list):
        return None
    found = [fields_of(item) for item in cast("list[JSON]", value)]
    messages = [fields for fields in found if fields is not None and isinstance(fields.get("role"), str)]
    return messages if len(messages) == len(found) else None


def _renamed(item: Conversation, others: Sequence[Conversation]) -> Conversation:
    """Return the conversation under a name that no other one has."""
    names = {other.name for other in others}
    copies = (f"{item.name} ({n})" for n in itertools.count(2))
    name = item.name
    while name in names:
        name = next(copies)
    return dataclasses.replace(item, name=name)


def _read(names: Sequence[str], folder: Path) -> Iterator[DatasetItem]:
    """Yield the rows of files."""
    for name in names:
        try:
            yield from read_file(folder / name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                str(error) if isinstance(error, ValueError) else f"{folder / name}: {error}"
            ) from None


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
