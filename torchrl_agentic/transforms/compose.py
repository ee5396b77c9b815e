"""`ToolCompose`: the tools of an environment, as one transform."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false
# The elements of this Compose are tools; and the overload of Compose.__init__ hides that it takes any number.

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs.transforms import Compose

from torchrl_agentic.dispatch import Session, SessionRows, ToolSelection
from torchrl_agentic.dispatch.dispatcher import limits_by_tool
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import parse_message
from torchrl_agentic.records import Recorders, as_hook
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.dataset_rows import begin_rows, completed, reset_tools, visible_state
from torchrl_agentic.transforms.early_ends import end_early
from torchrl_agentic.transforms.pipeline import keep_ended, reset_rows, stepped
from torchrl_agentic.transforms.recordings import Recordings
from torchrl_agentic.transforms.row_turn import (
    RowTurn,
    as_record,
    render_turn,
    run_turns,
)
from torchrl_agentic.transforms.tool_list import ToolList, parser_for, warn_if_undescribed

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter

logger = logging.getLogger(__name__)


class ToolCompose(ToolList):
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
    `transforms.specs.REASONS`. A tool that asks to stop sets `done` and `terminated` of its row.

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

    _rows: SessionRows[Recordings]
    _mask: torch.Tensor | None = None
    _warned_of_rewards: bool = False
    has_user: bool = False
    is_user_due: bool = False

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
        eos_strings: Sequence[str] = border.EOS_STRINGS,
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
        self.parser = parser_for(parser, tokenizer, template_kwargs or {})
        self.knows_tokenizer = tokenizer is not None
        self.tool_role = tool_role
        self.media = media
        if media:
            from torchrl_agentic.tools.images import require_pillow

            require_pillow()
        self.report_calls = report_calls
        self.eos_strings = tuple(eos_strings)
        self.passes_state = pass_state_to_tools
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
            warn_if_undescribed(tool)
        self._rows = SessionRows(found, options, Recordings(as_hook(recorder)).fresh, owner=self)

    @property
    def recordings(self) -> Recordings:
        """The records of the rows."""
        return self._rows.state

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Read the last messages, run their calls, append the results, and report."""
        self._refresh_toolsets()
        before, written = border.prompts(tensordict), border.prompts(tensordict, "full")
        rows = border.prompts(next_tensordict)
        turns: list[RowTurn] = []
        for index, is_active in enumerate(stepped(tensordict)):
            if not is_active:
                rows[index] = before[index]
                continue
            lengths = len(before[index]), len(written[index])
            rows[index], message = border.read_turn(rows[index], *lengths, self.eos_strings)
            session = self._rows.session(index)
            if session.turn == 0:
                has_worlds = self._has_worlds
                session.data = completed(session.data, self._tools, tensordict, index, has_worlds=has_worlds)
            parsed = parse_message(
                self.parser,
                message,
                tools=self._rows.dispatcher.schemas,
                turn=session.turn,
                trajectory=session.trajectory,
            )
            turns.append(RowTurn(index, session, message, parsed))
        if calling := [turn for turn in turns if turn.parsed.calls and turn.session.begin_error is None]:
            views = self.passes_state and any(tool.wants_state for tool in self._tools)
            states = [visible_state(tensordict, turn.row) if views else None for turn in calling]
            run_turns(self._rows.dispatcher, calling, states)
        for turn in turns:
            if turn.calls:
                turn.rendered = render_turn(self.parser, turn, self.tool_role, media=self.media)
                rows[turn.row] = rows[turn.row].extended(turn.rendered)
            else:
                turn.session.turn += 1
            if self.recordings.hook is not None:
                record = as_record(turn, rows[turn.row], self.recordings.recorded(turn.row))
                self.recordings.turn(record, len(rows[turn.row]))
        border.set_prompts(next_tensordict, rows)
        specs.write_report(next_tensordict, self._rows, turns, calls=self.report_calls)
        has_ended = end_early(tensordict, next_tensordict, turns)
        self.is_user_due = self.has_user
        self.end(next_tensordict.get("done").reshape(-1).tolist() if has_ended else (), next_tensordict)
        return keep_ended(tensordict, next_tensordict)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Keep the mask of the reset: a `DataLoadingPrimer` creates a new TensorDict without it."""
        self._mask = None if tensordict is None else tensordict.get("_reset", None)
        return tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Begin new trajectories in the rows whose "_reset" is true; the others continue."""
        self._refresh_toolsets()
        self._meet_tokenizer()
        tensordict_reset = border.dense(tensordict_reset)
        rows = border.prompts(tensordict_reset)
        chosen, self._mask = reset_rows(tensordict, self._mask, len(rows)), None
        begun = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        self._end(begun)
        reset_tools(self._tools, chosen)
        sessions = [self._rows.session(row) for row in begun]
        for turn in begin_rows(self._tools, sessions, tensordict_reset, has_worlds=self._has_worlds):
            messages = render_turn(self.parser, turn, self.tool_role, media=self.media)
            rows[turn.row] = rows[turn.row].extended(messages)
        border.set_prompts(tensordict_reset, rows)
        specs.write_report(tensordict_reset, self._rows, (), calls=self.report_calls)
        return specs.with_truncated(tensordict_reset)

    def _end(self, rows: Iterable[int], reason: str = "reset") -> None:
        """End the trajectories of some rows, and close them; the next ones get other names."""
        known = [row for row in rows if row in self._rows.sessions]
        rewards = {row: session.take_reward() for row, session in self._rows.end(known).items()}
        for row, reward in rewards.items():
            if reward and (recording := self.recordings.of(row)) is not None:
                recording.annotate(final_reward=None if math.isnan(reward) else reward)
        self.recordings.begin(known, reason)
        if any(rewards.values()) and not self._warned_of_rewards:
            self._warned_of_rewards = True
            logger.warning(
                "the final rewards of tools are lost, because these trajectories were reset before a step "
                "ended them: add ToolRewardTransform(), or EndTrajectory, as the last one that may end them"
            )

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
        targets = [target for target in dict.fromkeys(into) if target != row]
        self._end(targets)
        self._rows.branch(row, targets)

    def end(self, rows: Sequence[bool], tensordict: TensorDictBase | None = None) -> None:
        """Finish the sessions of rows that are done, whoever has ended them.

        A simulated user is heard and closed first, since it may act on the worlds of the tools.

        Args:
            rows: For each row of the flattened batch whether it is done.
            tensordict: The "next" of the step, [*B], to which the final rewards of tools are added, or None.
        """
        if not self.is_user_due:
            self._rows.finish_rows(row for row, is_done in enumerate(rows) if is_done)
        if tensordict is not None:
            sessions = self._rows.sessions.items()
            self.recordings.read_reasons(tensordict)
            specs.add_final_rewards(tensordict, {row: session.take_reward() for row, session in sessions})

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Close the rows that transforms behind this one have ended, and finish their recordings."""
        following = tensordict.get("next")
        self.is_user_due = False
        self.end(following.get("done").reshape(-1).tolist())
        self.recordings.finish_done(following)
        return tensordict, tensordict_

    def close(self) -> None:
        """End all trajectories and tear the tools down.

        May be called again; a later step sets them up again.
        """
        if not self._rows.is_open:
            return
        self._end(list(self._rows.sessions), "closed")
        if self._rows.close() and self._rows.are_toolsets_open:
            for added in self._toolsets:
                run(added.toolset.teardown())
            self._rows.are_toolsets_open = False

    def clone(self) -> Self:
        """Return a transform with the same tools, limiters and threads, and without trajectories."""
        clone = self.__class__.__new__(self.__class__)
        Compose.__init__(clone)
        kept = (
            "parser",
            "knows_tokenizer",
            "tool_role",
            "media",
            "report_calls",
            "eos_strings",
            "passes_state",
        )
        clone.__dict__.update({name: self.__dict__[name] for name in kept})
        clone._rows, clone._toolsets = self._rows.clone(clone), list(self._toolsets)
        return clone

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the entries under "agentic"."""
        return specs.observation(observation_spec, calls=self.report_calls)

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add `truncated`."""
        return specs.spec_with_truncated(done_spec)
