"""`ToolCompose`: the tools of an environment, as one transform."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false
# The elements of this Compose are tools; and the overload of Compose.__init__ hides that it takes any number.

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs.transforms import Compose

from torchrl_agentic.dispatch import Session, ToolSelection
from torchrl_agentic.dispatch.dispatcher import limits_by_tool
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.tensors import reset_tools
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.trajectory.calls import EOS_STRINGS, CallsStage, parser_for
from torchrl_agentic.trajectory.episode import OpenTurn, check_order
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.episode_rows import EpisodeRows, append_messages, run_stage
from torchrl_agentic.transforms.pipeline import KnowsResetRows, stages_of
from torchrl_agentic.transforms.tool_list import ToolList, warn_of

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter
    from torchrl_agentic.records import Recorders, TrajectoryHook

logger = logging.getLogger(__name__)


class ToolCompose(KnowsResetRows, ToolList):
    """The tools of an environment: runs the calls of each assistant message and appends their results.

    A `Compose` whose elements are tools, for a `TransformedEnv` around a `ChatEnv` in history mode. Each step
    parses the last message of each row once, runs the calls of all rows concurrently, but for calls of
    one trajectory that conflict (`Effects`), and appends one result per call to ("history", "prompt").
    Rows may differ in length.

    Writes under "agentic", on reset too, with shape [*B, 1]: `any_tool_calls`, `any_error`, `stop_requested`,
    bool; `n_calls`, `n_errors`, `n_infra`, int64, of this turn; `turn`, int64, the number of turns so far;
    `tool_reward` and `tool_seconds`, float32, sums over this turn; `trajectory_reward`, float32, the final
    rewards of the tools (`Tool.final_reward`) when the trajectory has ended; `trajectory`, int64, a random
    number above 0 that all steps of a trajectory share; `ended_by`, int64, an index into
    `trajectory.reasons.REASONS`. A tool that asks to stop sets `done` and `terminated` of its row.

    Failures are flags too: `no_verdict` if a final reward failed, so that `trajectory_reward` is NaN;
    `not_begun` if a tool could not open at the reset; `cut` if the message was cut off, so that its calls do
    not run. The last two truncate their row.

    A row whose trajectory has ended takes no part in later steps until it is reset, and stays `done`. If the
    environment loads a data set, its rows may hold `tools_kwargs` and `tool_selection`; see `RowData`.

    Args:
        tools: Tools, objects with the same methods, or typed functions.
        parser: A parser, or the name of a registered one.
        rate_limits: Limiters by the names of tools; share a limiter between environments that use one
            service.
        per_call_timeout: Seconds that one run of any tool may take, from its start and with its retries, or
            None for no limit. Waiting for a slot of a limiter does not count.
        per_turn_timeout: Seconds that all calls of a step may take, queueing included, or None for no limit.
        pass_state_to_tools: Whether tools with `wants_state` get a read-only view of the row's state.
        tool_role: Role of the messages that carry results.
        media: Whether the model sees images and videos: a result that holds any becomes a message whose
            content is a list of parts, as processors of transformers take it. Otherwise a line of text names
            each; so does an image that cannot be opened.
        validate_inputs: Whether arguments are checked before a tool runs.
        max_threads: Number of blocking tools that run at once.
        max_calls_per_turn: Number of calls that a message may contain, or None for the parser's limit;
            further calls get SKIPPED results.
        tool_selection: Called with the name of a trajectory, its turn from 0, and its `RowData` before the
            calls of a turn run; returns the names of the tools that it may use in this turn, or None to
            follow the data set. The prompt still shows the tools of the first turn; announce others in a
            message.
        report_calls: Whether ("agentic", "calls") holds a list per row, [*B]: for each call of this turn
            "call_id", "tool", "status", "reward", "metrics", and "number", its source in the token ledger.
        recorder: A `Recorder`, another `TrajectoryHook`, a function that is called with the `Turn` of each
            row and step, or a list of these; called on the thread that calls `env.step`.
        eos_strings: Strings that are cut off the end of a message before it is parsed.
        tokenizer: Tokenizer of the model. The parser escapes its control tokens in results, and learns from
            its chat template whether answers begin inside the reasoning; parser="auto" needs it. None: the
            tokenizer of the environment's `TurnTokenizer` or `ChatEnv`, if there is one.
        template_kwargs: Options of the chat template, such as `enable_thinking` or `chat_template`, or None
            for those of the `TurnTokenizer`.

    Raises:
        TypeError: If an item is not a tool, or an option has the wrong type.
        ValueError: If two tools have one name, the parser is unknown, or a limit names an unknown tool.
        MissingExtra: If `media` is True and Pillow is not installed.
        Exception: Any error of a tool's `setup`.
    """

    stage: CallsStage
    _rows: EpisodeRows

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
        if isinstance(tools, Tool | str) or not isinstance(cast("object", tools), Iterable):
            raise TypeError(
                f"tools is a list of tools; got {type(tools).__name__}: write ToolCompose([tool])"
            )
        if not isinstance(cast("object", tool_role), str):
            raise TypeError(f"tool_role is a role of messages, such as 'tool'; got {tool_role!r}")
        if isinstance(eos_strings, str):
            raise TypeError(f"eos_strings is a list of strings: eos_strings=[{eos_strings!r}]")
        self.knows_tokenizer = tokenizer is not None
        if media:
            from torchrl_agentic.tools.images import require_pillow

            require_pillow()
        self.stage = CallsStage(
            parser_for(parser, tokenizer, template_kwargs or {}),
            tool_role=tool_role,
            media=media,
            passes_state=pass_state_to_tools,
            reports_calls=report_calls,
            eos_strings=eos_strings,
        )
        self._toolsets = []
        options = {
            "rate_limits": limits_by_tool(rate_limits),
            "per_call_timeout": per_call_timeout,
            "per_turn_timeout": per_turn_timeout,
            "validate_inputs": validate_inputs,
            "max_threads": max_threads,
            "max_calls_per_turn": max_calls_per_turn,
            "tool_selection": tool_selection,
        }
        found = [ensure_tool(item) for item in tools]
        for tool in found:
            warn_of(tool, self.stage.parser)
        if recorder is None:
            hook = None
        else:
            from torchrl_agentic.records import as_hook

            hook = as_hook(recorder)
        self._rows = EpisodeRows(found, options, hook, owner=self)

    @property
    def parser(self) -> ToolCallParser:
        """Reads calls and renders results."""
        return self.stage.parser

    @property
    def rows(self) -> EpisodeRows:
        """The trajectories of the rows."""
        return self._rows

    @property
    def hook(self) -> TrajectoryHook | None:
        """Receives the records of the trajectories, or None."""
        return self._rows.hook

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Read the last messages, run their calls, append the results, and report."""
        if self._toolsets:  # most have none, and each step would look
            self._refresh_toolsets()
        rows, turns = self._open(tensordict, next_tensordict)
        run_stage(self.stage, turns)
        append_messages(rows, turns, self.stage)
        border.set_prompts(next_tensordict, rows)
        specs.write_columns(next_tensordict, self.stage.columns, self._rows.episodes, turns, is_first=True)
        specs.with_truncated(next_tensordict)
        specs.write_ends(next_tensordict, turns, self.stage)
        self._rows.settle(turns, next_tensordict)
        return specs.keep_ended(tensordict, next_tensordict)

    def _open(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> tuple[list[border.Conversation], list[OpenTurn]]:
        """Return the conversations of all rows, and the open turns of those that take part in the step."""
        from torchrl_agentic.transforms.dataset_rows import completed, visible_state

        before, written = border.prompts(tensordict), border.prompts(tensordict, "full")
        rows, turns = border.prompts(next_tensordict), list[OpenTurn]()
        numbers = specs.row_numbers(tensordict, specs.TURN)
        done = next_tensordict.get("done").reshape(-1).tolist()
        for row, is_active in enumerate(specs.stepped(tensordict)):
            if not is_active:
                rows[row] = before[row]
                continue
            lengths = len(before[row]), len(written[row])
            rows[row], message = border.read_turn(rows[row], *lengths, self.stage.eos_strings)
            messages, episode = rows[row].messages, self._rows.episode(row)
            turn = episode.open_turn(message, messages[-1], messages[:-1], root_turn=numbers[row])
            turn.is_over = done[row]
            turn.view = partial(visible_state, tensordict, row)
            if turn.number == 0 and not turn.effects:
                worlds, session = self._has_worlds, episode.session
                session.data = completed(session.data, self._tools, tensordict, row, has_worlds=worlds)
            turns.append(turn)
        if any(turn.is_cut for turn in turns):
            from torchrl_agentic.transforms.token_rows import out_of_room  # only few steps need it

            full = out_of_room(tensordict)
            for turn in turns:
                turn.is_full = full[turn.episode.row]
        return rows, turns

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new trajectories in the rows whose "_reset" is true; the others continue."""
        from torchrl_agentic.transforms.dataset_rows import begin_rows

        self._refresh_toolsets()
        self._meet_tokenizer()
        tensordict_reset = border.dense(tensordict_reset)
        rows = border.prompts(tensordict_reset)
        chosen = self.rows_of_reset(tensordict, len(rows))
        stages = stages_of(getattr(self.container, "transform", self))
        check_order(stages)
        self._rows.has_user = any(stage.hears_user for stage in stages)
        begun = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        self._rows.end_rows(begun)
        reset_tools(self._tools, chosen)
        episodes, has_worlds = list(map(self._rows.episode, begun)), self._has_worlds
        opened = begin_rows(self._tools, self.stage, episodes, tensordict_reset, has_worlds=has_worlds)
        for episode, messages in zip(episodes, opened, strict=True):
            if messages:
                rows[episode.row] = rows[episode.row].extended(messages)
        border.set_prompts(tensordict_reset, rows)
        specs.write_columns(tensordict_reset, self.stage.columns, self._rows.episodes, is_first=True)
        return specs.with_truncated(tensordict_reset)

    def session(self, row: int) -> Session:
        """Return the session of the trajectory of a row.

        Args:
            row: Index in the flattened batch.
        """
        return self._rows.session(row)

    def branch(self, row: int, into: Sequence[int]) -> None:
        """Continue the trajectory of one row in other rows: interpreters, files, and all that is open.

        The trajectories there end. Copy the row of the TensorDict too, with its history. Branches share
        nothing: each sees its own calls only.

        Args:
            row: Index in the flattened batch.
            into: Rows that continue it.

        Raises:
            TypeError: If a tool with state, which was called in this row, defines no `branch`.
            InfrastructureError: If the state of a tool cannot be copied.
        """
        self._rows.branch(row, into)

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Close the rows that transforms behind this one have ended, and finish their records."""
        self._rows.finish_done(tensordict.get("next"))
        return tensordict, tensordict_

    def close(self) -> None:
        """End all trajectories and tear the tools down.

        May be called again; a later step sets them up again.
        """
        if not self._rows.is_open:
            return
        self._rows.end_rows(list(self._rows.episodes), "closed")
        if self._rows.close() and self._rows.are_toolsets_open:
            for added in self._toolsets:
                run(added.toolset.teardown())
            self._rows.are_toolsets_open = False

    def clone(self) -> Self:
        """Return a transform with the same tools, limiters and threads, and without trajectories."""
        clone = self.__class__.__new__(self.__class__)
        Compose.__init__(clone)
        clone.knows_tokenizer = self.knows_tokenizer
        clone.stage, clone._toolsets = copy.copy(self.stage), list(self._toolsets)
        clone._rows = self._rows.clone(clone)
        return clone

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the entries under "agentic"."""
        return specs.observation(observation_spec, self.stage.columns)

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return specs.spec_with_truncated(done_spec)
