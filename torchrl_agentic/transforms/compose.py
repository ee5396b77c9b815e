"""ToolCompose: the tools of an environment, as one transform."""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false
# The elements of this Compose are tools; and the overload of Compose.__init__ hides that it takes any number.

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, TensorSpec
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.dispatch import Dispatcher, Session, ToolSelection
from torchrl_agentic.dispatch.dispatcher import limits_by_tool
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import JSON, Message, ToolResult
from torchrl_agentic.parsers import ToolCallParser, get_parser
from torchrl_agentic.records import Recorders, as_hook
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.images import require_pillow
from torchrl_agentic.tools.row_data import trajectory_name
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.transforms import dataset_rows, specs
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.pipeline import keep_ended, stepped, tokenizer_of
from torchrl_agentic.transforms.recordings import Recordings
from torchrl_agentic.transforms.row_turn import EOS_STRINGS, RowTurn, as_record, parse, read_turn, render
from torchrl_agentic.transforms.runtime import Runtime, close_sessions
from torchrl_agentic.transforms.tool_list import ToolList, warn_if_undescribed

if TYPE_CHECKING:
    from torchrl_agentic.config import LoadedTools

logger = logging.getLogger(__name__)

_environments = itertools.count()
"""Numbers for the names of trajectories: one for each compose of this process that has any."""

HIDDEN_STATE = frozenset((
    "history", "text", "tokens", "masks", "log_probs", "next", "agentic", "answer", "answers", "ground_truth",
    "ground_truths", "gts", "label", "labels", "reward_model", "solution", "solutions", "target", "targets",
))  # fmt: skip
"""What tools never see of the state: the conversation, and what a data set knows of the right answer."""


class ToolCompose(ToolList):
    """The tools of an environment: runs the calls of each assistant message and appends their results.

    A `Compose` whose elements are tools, for a `TransformedEnv` around a `ChatEnv` in history mode. Each step
    parses the last message of each row once, runs the calls of all rows concurrently where their effects
    allow it, and appends one result per call to ("history", "prompt"). Rows stay ragged.

    Writes, with the shape [*B, 1], on reset too: ("agentic", "any_tool_calls"), "any_error",
    "stop_requested": bool; "n_calls", "n_errors", "n_infra", "turn": int64, of this turn, save "turn", which
    counts; "tool_reward", "tool_seconds": float32, sums over this turn; "trajectory_reward": float32, the
    sum of the final rewards of the tools (`Tool.final_reward`), at the end; "trajectory": int64, a random
    number above 0 that all steps of one trajectory share. A stop sets `done` and `terminated` of its row.

    A row whose trajectory is over takes no part in later steps until it is reset: its message is neither
    parsed nor kept, and it stays `done`.

    Where an environment loads a data set, its rows may hold `tools_kwargs` and `tool_selection`: see
    `RowData`.

    Args:
        tools: tools, look-alikes or typed functions.
        parser: a parser or a registered name.
        rate_limits: tool name → limiter; share the object among environments that use the same service.
        per_call_timeout: seconds that one run of any tool may take, from its start and with its retries;
            waiting for a slot of a limiter does not count. None: no bound.
        per_turn_timeout: seconds that all calls of a step may take, with their queueing; None: no bound.
        pass_state_to_tools: whether tools with `wants_state` get a read-only view of their row's state.
        tool_role: the role of the messages that carry results.
        media: whether the model sees images and videos: results that hold any become messages whose content
            is a list of parts, as processors of transformers take it. Otherwise, and with parsers that write
            such lists of their own, a line of text names each. An image that cannot be opened stays text.
        validate_inputs: whether arguments are checked before a tool runs.
        max_threads: how many blocking tools run at once.
        max_calls_per_turn: calls of one message beyond it are answered SKIPPED; None: no bound but the
            parser's.
        tool_selection: Called with the name of a trajectory, its turn, from 0, and its `RowData` before the
            calls of a turn run; returns the names of the tools that it may use in this turn, or None for what
            the data set says. The prompt goes on showing the tools of the first turn: announce others in a
            message.
        report_calls: whether ("agentic", "calls") holds a list per row, [*B]: of each call of this turn the
            "call_id", "tool", "status", "reward", "metrics", and its "number" in the trajectory, which is
            the source of its tokens in the ledger.
        recorder: what is told of trajectories: a `Recorder`, another `TrajectoryHook`, a function that is
            called with the `Turn` of each row and step, or a list of those; on the thread that steps.
        eos_strings: what is cut off the end of a message before it is parsed.
        tokenizer: The model's. The parser escapes its control tokens in results and learns from its chat
            template whether answers begin inside a thought; parser="auto" needs it. None: the tokenizer of
            the `TurnTokenizer` or `ChatEnv` of the environment, if there is one.
        template_kwargs: Options of the chat template, such as `enable_thinking` or `chat_template`; None:
            those of the `TurnTokenizer`.

    Raises:
        TypeError: an item is no tool, or an option has another type than it should; the message says what to
            write instead.
        ValueError: two tools of one name, an unknown parser, a limit for a tool that is not there.
        MissingExtra: media is true, and Pillow is not installed.
        Exception: what the `setup` of a tool raised.
    """

    # What is known of trajectories, by row; see `_no_trajectories`.
    _known: dict[int, Session]
    _begun: dict[int, int]
    _ids: dict[int, int]
    _environment: int
    _recorded: dict[int, int]
    _mask: torch.Tensor | None
    _own_runtime: bool
    _warned_of_worth: bool = False
    _tokenizer: Any = None

    def __init__(
        self,
        tools: Iterable[Any] = (),
        parser: ToolCallParser | str = "hermes",
        *,
        rate_limits: Mapping[str, Limiter] | None = None,
        per_call_timeout: float | None = 30.0,
        per_turn_timeout: float | None = None,
        pass_state_to_tools: bool = False,
        tool_role: str = "tool",
        media: bool = False,
        validate_inputs: bool = True,
        max_threads: int = 64,
        max_calls_per_turn: int | None = None,
        tool_selection: ToolSelection | None = None,
        report_calls: bool = False,
        recorder: Recorders = None,
        eos_strings: Sequence[str] = EOS_STRINGS,
        tokenizer: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        border.require_list_to_stack()
        if isinstance(tools, Tool | str) or not isinstance(tools, Iterable):
            raise TypeError(
                f"tools is a list of tools; got {type(tools).__name__}: write ToolCompose([tool], ...)"
            )
        if not isinstance(cast("object", tool_role), str):
            raise TypeError(
                f"tool_role is the role of messages with results, such as 'tool'; got {tool_role!r}"
            )
        if isinstance(eos_strings, str):
            raise TypeError(f"eos_strings is a list of strings: eos_strings=[{eos_strings!r}]")
        self.parser = _parser(parser, tokenizer, template_kwargs or {})
        self._knows_tokenizer = tokenizer is not None
        self.tool_role = tool_role
        self.media = media
        if media:
            require_pillow()
        self.report_calls = report_calls
        self.recordings = Recordings(as_hook(recorder))
        self.eos_strings = tuple(eos_strings)
        self._pass_state = pass_state_to_tools
        self._options = {
            "rate_limits": limits_by_tool(rate_limits),
            "per_call_timeout": per_call_timeout,
            "per_turn_timeout": per_turn_timeout,
            "validate_inputs": validate_inputs,
            "max_threads": max_threads,
            "max_calls_per_turn": max_calls_per_turn,
            "tool_selection": tool_selection,
        }
        self._toolsets = []
        self._tools = [ensure_tool(item) for item in tools]
        for tool in self._tools:
            warn_if_undescribed(tool)
        self._runtime = None
        self._dispatcher: Dispatcher | None = None
        live = self._live()
        if not live.ready:
            run(live.setup())

    @classmethod
    def from_config(
        cls,
        config: str | Path | LoadedTools,
        parser: ToolCallParser | str | None = None,
        **options: Any,
    ) -> Self:
        """Create a ToolCompose from the tools of a YAML file, in our form or verl's.

        A file of verl's trainer has settings that other transforms apply. Given a path, one log line names
        those transforms; call `load_tools`, pass its result, and take their arguments from it instead.

        Args:
            config: A YAML file, or the result of `load_tools`.
            parser: A parser or a registered name; None: the file's `multi_turn.format`, or "hermes".
            **options: As for the constructor. Limiters in `rate_limits` replace those of the file.

        Raises:
            ConfigError: If the file has a mistake.
            Exception: Any error of the constructor and `add_toolset`.
        """
        from torchrl_agentic.config import LoadedTools, load_tools  # loads YAML and MCP

        loaded = config if isinstance(config, LoadedTools) else load_tools(config)
        if loaded is not config and (others := loaded.beyond_tools()):
            logger.warning("%s: not applied by ToolCompose; add %s", config, ", ".join(others))
        options["rate_limits"] = {**loaded.limits, **limits_by_tool(options.get("rate_limits"))}
        options.setdefault("max_calls_per_turn", loaded.max_calls_per_turn)
        made = cls(loaded.tools, parser or loaded.parser or "hermes", **options)
        return made.with_toolsets(loaded.toolsets)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._refresh_toolsets()
        before, written = border.prompts(tensordict), border.prompts(tensordict, "full")
        rows = border.prompts(next_tensordict)
        active = stepped(tensordict)
        work: list[RowTurn] = []
        for index, row in enumerate(rows):
            if active[index]:
                lengths = border.length(before[index]), border.length(written[index])
                rows[index], message = read_turn(row, *lengths, self.eos_strings)
                session = self._session(index)
                if session.turn == 0:
                    session.data = dataset_rows.completed(
                        session.data, self._tools, tensordict, index, has_worlds=self._has_worlds
                    )
                work.append(RowTurn(index, session, message, parse(self.parser, message, session)))
            else:
                rows[index] = before[index]
        self._run(tensordict, work)
        for item in work:
            if item.calls:
                item.rendered = render(self.parser, item, self.tool_role, media=self.media)
                new = [border.write_message(message) for message in item.rendered]
                rows[item.row] = border.extended(rows[item.row], new)
            if self.recordings.hook is not None:
                self.recordings.turn(as_record(item, rows[item.row], self._recorded.get(item.row, 0)))
                self._recorded[item.row] = border.length(rows[item.row])
        border.set_prompts(next_tensordict, rows)
        return self._report(tensordict, next_tensordict, work)

    def _run(self, tensordict: TensorDictBase, work: Sequence[RowTurn]) -> None:
        """Answer all calls of all rows; without calls no thread is troubled."""
        busy = [item for item in work if item.parsed.calls]
        for item in work:
            if not item.parsed.calls:
                item.session.turn += 1
        if not busy:
            return
        live = self._live()
        for item in busy:
            item.calls = item.session.unique(item.parsed.calls)
        batch = [(item.session, item.calls, self._state(tensordict, item.row)) for item in busy]

        async def turn() -> list[list[ToolResult]]:
            results = await live.run(batch)
            over = [
                item.session for item, found in zip(busy, results, strict=True) if any(r.stop for r in found)
            ]
            if over:
                await asyncio.gather(*(session.close() for session in over))
            return results

        for item, results in zip(busy, run(turn()), strict=True):
            item.results = results

    def _state(self, tensordict: TensorDictBase, row: int) -> Any:
        if not self._pass_state or not any(tool.wants_state for tool in self._tools):
            return None
        flat: Any = tensordict if tensordict.batch_dims == 1 else tensordict.reshape(-1)
        item = flat[row]
        hidden = [key for key in item.keys(True) if not HIDDEN_STATE.isdisjoint(_steps(key))]
        return item.exclude(*hidden).clone().lock_()

    def _report(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, work: Sequence[RowTurn]
    ) -> TensorDictBase:
        """Write flags and telemetry, and end the rows in which a tool asked for it."""
        answered = {item.row: item.results for item in work}
        rows = ((row, session.turn, answered.get(row, ())) for row, session in self._sessions.items())
        told = specs.report(rows, self._ids, next_tensordict.batch_size, next_tensordict.device)
        if self.report_calls:
            told.set("calls", self._call_lists(work, next_tensordict.batch_size))
        next_tensordict.set(specs.KEY, told)
        self._add_worth(next_tensordict, self._sessions)
        if any(result.stop for item in work for result in item.results):
            for key in ("terminated", "done"):  # collectors look at "done" alone
                next_tensordict.set(key, next_tensordict.get(key) | told["stop_requested"])
        return keep_ended(tensordict, next_tensordict)

    def _call_lists(self, work: Sequence[RowTurn], shape: torch.Size) -> TensorDictBase:
        lists: dict[int, list[dict[str, JSON]]] = {}
        for item in work:
            lists[item.row] = specs.call_records(item.calls, item.results, item.session.n_calls)
            item.session.n_calls += len(item.calls)
        return specs.call_lists(lists, shape)

    def _add_worth(self, tensordict: TensorDictBase, rows: Iterable[int]) -> None:
        specs.add_worth(tensordict, {row: self._sessions[row].take_worth() for row in rows})

    @property
    def _sessions(self) -> dict[int, Session]:
        """The trajectories of this process: after a fork, what was open belongs to the parent."""
        self._live()
        return self._known

    def _session(self, row: int) -> Session:
        session = self._sessions.get(row)
        if session is None:
            name = trajectory_name(row, self._begun.get(row, 0), self._environment)
            session = self._sessions[row] = self._live().session(name, row=row)
            self._ids[row] = 1 + int.from_bytes(os.urandom(7))
        return session

    def trajectory(self, row: int) -> str:
        """Return the name of the trajectory of a row; see `trajectory_name`."""
        return self._session(row).trajectory

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take note of the mask: a `DataLoadingPrimer` makes a new TensorDict for the reset, without it."""
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new trajectories in the rows of the mask; the others go on as they are."""
        self._refresh_toolsets()
        self._meet_tokenizer()
        rows = border.prompts(tensordict_reset)
        mask, self._mask = tensordict.get("_reset", self._mask), None
        chosen = [True] * len(rows) if mask is None else mask.reshape(len(rows), -1).any(-1).tolist()
        self._end([index for index, reset in enumerate(chosen) if reset])
        forwarding = [tool for tool in self._tools if hasattr(tool, "reset_rows")]
        if forwarding:
            flat = TensorDict({"_reset": torch.tensor(chosen).unsqueeze(-1)}, batch_size=[len(rows)])
            for tool in forwarding:
                cast("Any", tool).reset_rows(flat, flat)
        begun = [row for row, reset in enumerate(chosen) if reset]
        for row in begun:
            self._session(row)
        self._begin(tensordict_reset, begun, rows)
        border.set_prompts(tensordict_reset, rows)
        told = specs.report((), self._ids, tensordict_reset.batch_size, tensordict_reset.device)
        if self.report_calls:
            told.set("calls", specs.call_lists({}, tensordict_reset.batch_size))
        tensordict_reset.set(specs.KEY, told)
        return tensordict_reset

    def _meet_tokenizer(self) -> None:
        """Set up the parser for the tokenizer of this environment, if there is one."""
        tokenizer, template_kwargs = (None, {}) if self._knows_tokenizer else tokenizer_of(self.container)
        if tokenizer is not None and tokenizer is not self._tokenizer:
            self.parser, self._tokenizer = self.parser.with_tokenizer(tokenizer, **template_kwargs), tokenizer

    @property
    def _has_worlds(self) -> bool:
        return any(added.toolset.world is not None for added in self._toolsets)

    def _begin(
        self, tensordict_reset: TensorDictBase, chosen: Sequence[int], rows: list[border.Conversation]
    ) -> None:
        """Tell new trajectories what the data set says of them, and let tools speak first."""
        if not self._has_worlds and not dataset_rows.has_something_to_say(self._tools, tensordict_reset):
            return
        for row in chosen:
            self._session(row).data = dataset_rows.row_data(self._tools, tensordict_reset, row)
        sessions = [self._session(row) for row in chosen]
        for item in dataset_rows.open_at_reset(self._tools, sessions):
            said = render(self.parser, item, self.tool_role, media=self.media)
            rows[item.row] = border.extended(rows[item.row], [border.write_message(m) for m in said])

    def _end(self, rows: Iterable[int], reason: str = "reset") -> None:
        """Close the sessions of some rows. Their next trajectories get other names."""
        ended = {row: self._sessions.pop(row) for row in rows if row in self._sessions}
        for row, session in ended.items():
            self._begun[row] = self._begun.get(row, 0) + 1
            self._recorded.pop(row, None)
            session.dispatcher.forget(session)
        self.recordings.begin(ended, reason)
        close_sessions(ended.values())
        if any(session.take_worth() for session in ended.values()) and not self._warned_of_worth:
            self._warned_of_worth = True
            logger.warning(
                "tools have rewards for whole trajectories, but what ended these is not known before they "
                "begin anew: put ToolRewardTransform() behind all that ends trajectories, or EndTrajectory"
            )

    def branch(self, row: int, into: Sequence[int]) -> None:
        """Let trajectories in other rows go on from where one is: interpreters, files, and all that is open.

        What they held themselves is closed. Copy the row of the TensorDict too, with its history; rows count
        through the flattened batch. Branches share nothing: each sees its own calls only.

        Raises:
            TypeError: a tool with state, which was called in this row, defines no `branch`.
            InfrastructureError: what a tool holds cannot be copied.
        """
        targets = [target for target in dict.fromkeys(into) if target != row]
        self._end(targets)
        source = self._session(row)
        run(source.branch([self._session(target) for target in targets]))

    def end(self, rows: Sequence[bool], tensordict: TensorDictBase | None = None) -> None:
        """Close what the trajectories of these rows hold open: they are done, whoever has ended them.

        tensordict: that of the step, to which what the trajectories were worth to tools is added.
        """
        over = [row for row in self._sessions if row < len(rows) and rows[row]]
        close_sessions([self._sessions[row] for row in over])
        if tensordict is not None:
            self._add_worth(tensordict, over)

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """End the rows that transforms behind us have ended."""
        following = tensordict.get("next")
        done = following.get("done").reshape(-1).tolist()
        self.end(done)
        self.finish_recordings([row for row, is_done in enumerate(done) if is_done], following)
        return tensordict, tensordict_

    def finish_recordings(self, rows: Sequence[int], next_tensordict: TensorDictBase) -> None:
        """End the recordings of rows that are done, for a reason that was said, or that the flags say."""
        cut = next_tensordict.get("truncated", None)
        truncated = set() if cut is None else set(cut.reshape(-1).nonzero().flatten().tolist())
        self.recordings.finish([row for row in rows if row in truncated], "truncated")
        self.recordings.finish(rows, "terminated")

    def unrecorded(self, row: int, conversation: border.Conversation) -> list[Message]:
        """Give the messages of a row that came after its last turn was recorded."""
        known = self._recorded.get(row, border.length(conversation))
        self._recorded[row] = border.length(conversation)
        return list(map(border.read_message, border.messages(conversation)[known:]))

    def close(self) -> None:
        """End all trajectories and tear the tools down.

        May be called again; a later step sets them up anew.
        """
        if self._runtime is None or not self._runtime.is_ours:
            return
        self._end(list(self._sessions), "closed")
        if self._own_runtime:
            run(self._live().close())
            if self._runtime.toolsets_open:
                for added in self._toolsets:
                    run(added.toolset.teardown())
            self._runtime.toolsets_open = not self._toolsets

    def clone(self) -> Self:
        """Make a transform with the same tools, limiters and threads, and with trajectories of its own."""
        live, clone = self._live(), self.__class__.__new__(self.__class__)
        Compose.__init__(clone)
        kept = (
            "parser",
            "_knows_tokenizer",
            "tool_role",
            "media",
            "report_calls",
            "eos_strings",
            "_pass_state",
            "_runtime",
        )
        clone.__dict__.update({name: self.__dict__[name] for name in kept}, **_no_trajectories())
        clone.recordings = self.recordings.fresh()
        clone._own_runtime, clone._tools = False, list(self._tools)
        clone._toolsets = list(self._toolsets)
        clone._options = {**self._options, "rate_limits": dict(self._options["rate_limits"])}
        clone._dispatcher = live.fork(weakref.proxy(clone))
        assert self._runtime is not None
        self._runtime.close_sessions_with(clone, clone._dispatcher)
        return clone

    def _live(self) -> Dispatcher:
        """Our dispatcher, made anew after unpickling and after a fork."""
        if self._runtime is None or not self._runtime.is_ours:
            self._dispatcher = Dispatcher(self._tools, compose=weakref.proxy(self), **self._options)
            self._runtime = Runtime(self._dispatcher, toolsets_open=not self._toolsets)
            self._runtime.close_sessions_with(self, self._dispatcher)
            self._own_runtime = True
            self.recordings = self.recordings.fresh()
            self.__dict__.update(_no_trajectories())
        assert self._dispatcher is not None
        return self._dispatcher

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process, so that environments travel to workers."""
        return {
            **super().__getstate__(),
            **_no_trajectories(),
            "_runtime": None,
            "_dispatcher": None,
            "_tokenizer": None,
        }

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Describe what is added; `Compose` would ask its children, which a ToolCompose has not."""
        return cast("Composite", Transform.transform_output_spec(self, output_spec))

    def transform_input_spec(self, input_spec: TensorSpec) -> TensorSpec:
        """Describe what is read."""
        return Transform.transform_input_spec(self, input_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the flags and the telemetry."""
        return specs.observation(observation_spec, calls=self.report_calls)

    def transform_action_spec(self, action_spec: TensorSpec) -> TensorSpec:
        """Leave out the fields of messages that only some messages have."""
        return specs.action(action_spec)

    def set_container(self, container: Any) -> None:
        """Take note of the environment.

        Raises:
            ValueError: it keeps no history, so that there is nothing to read.
        """
        super().set_container(container)
        base = getattr(container, "base_env", None)
        if isinstance(base, ChatEnv) and base.input_mode != "history":
            raise ValueError(specs.NO_HISTORY.format(mode=base.input_mode))

    def __repr__(self) -> str:
        tools = ", ".join(tool.name for tool in self._tools)
        return f"ToolCompose([{tools}], parser={self.parser!r})"


def _parser(parser: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ToolCallParser:
    """Return the parser of this name, set up for the tokenizer if there is one."""
    found = get_parser(parser, tokenizer=tokenizer, **(template_kwargs if parser == "auto" else {}))
    return found if tokenizer is None else found.with_tokenizer(tokenizer, **template_kwargs)


def _steps(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _no_trajectories() -> dict[str, Any]:
    """What is known of trajectories before the first one."""
    return {
        "_known": {},
        "_begun": {},
        "_ids": {},
        "_recorded": {},
        "_mask": None,
        "_environment": next(_environments),
    }
