"""What statuses and reasons mean, for a reader who has never seen a trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_agentic.messages import Status

STATUS_WORDS: Mapping[Status, tuple[str, str]] = {
    Status.OK: ("answered", "The tool ran and gave a result."),
    Status.ERROR: (
        "the tool reported an error",
        "The tool ran and said what went wrong, such as a program that failed or a value that it cannot use.",
    ),
    Status.MALFORMED: (
        "the call could not be read",
        "The model tried to call a tool, but what it wrote is no valid call, for example broken JSON. "
        "No tool ran.",
    ),
    Status.UNKNOWN_TOOL: (
        "there is no such tool",
        "The model asked for a tool that it had not been given. No tool ran.",
    ),
    Status.INVALID_ARGS: (
        "the arguments do not fit",
        "The tool exists, but an argument was missing, unknown, or of the wrong kind. The tool did not run.",
    ),
    Status.TIMEOUT: (
        "it took too long",
        "The tool was not done within the time that a call or a turn is given, and was stopped.",
    ),
    Status.CANCELLED: (
        "it was stopped from outside",
        "The call was ended before it was done.",
    ),
    Status.SKIPPED: (
        "it was not tried",
        "The call was over a budget, such as the number of calls that are allowed. The tool did not run.",
    ),
    Status.CRASH: (
        "the tool is broken",
        "The tool failed in a way that nobody foresaw: a bug in its program, not a mistake of the model.",
    ),
    Status.INFRA: (
        "a service was not available",
        "A sandbox was lost, or a service was overloaded. That is not a mistake of the model.",
    ),
}
"""Each status in a few words, and in a sentence or two."""

NOT_RUN = frozenset((Status.MALFORMED, Status.UNKNOWN_TOOL, Status.INVALID_ARGS, Status.SKIPPED))
"""Those of calls for which no tool ran."""

REASON_WORDS: Mapping[str, str] = {
    "stop_tool": "the model called the tool that ends the conversation",
    "no_calls": "the model answered without calling a tool, which counts as its final answer",
    "max_turns": "it reached the largest number of turns that is allowed, perhaps before it was finished",
    "user": "the user that was played for it had nothing more to say",
    "terminated": "the environment said that the task is over",
    "truncated": "the environment cut it off, for example because it became too long",
    "reset": "the environment began anew before the trajectory had ended",
    "closed": "the program closed the environment before the trajectory had ended",
}
"""How a trajectory ended: words that follow "because"."""
