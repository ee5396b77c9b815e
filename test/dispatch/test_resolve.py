"""What becomes of a call before it runs: a pure decision."""

import pytest

from torchrl_agentic import Status, tool
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.turn import Ready, Refusal, resolve
from torchrl_agentic.messages import CallError, ParsedCall


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


TOOLS = Dispatcher([double]).bound


def test_a_call_that_fits_is_ready():
    resolved = resolve(ParsedCall("double", {"number": 3}, "c", notes=("a",)), 0, TOOLS)
    assert resolved == Ready(TOOLS["double"], {"number": 3}, ("a",))


@pytest.mark.parametrize(
    ("call", "options", "status", "words"),
    [
        (ParsedCall("", {}, "c", error=CallError("no_json", "send JSON")), {}, Status.MALFORMED, "send JSON"),
        (ParsedCall("", {}, "c", error=CallError("over_limit", "too many")), {}, Status.SKIPPED, "too many"),
        (ParsedCall("double", {"number": 1}, "c"), {"max_calls": 1}, Status.SKIPPED, "at most 1 calls"),
        (ParsedCall("triple", {}, "c"), {}, Status.UNKNOWN_TOOL, "available: double"),
        (ParsedCall("double", {"number": 1}, "c"), {"allowed": ()}, Status.UNKNOWN_TOOL, "available: none"),
        (ParsedCall("double", {"number": "x"}, "c"), {}, Status.INVALID_ARGS, "double: "),
    ],
)
def test_refused_call_gets_a_result_with_the_reason(call, options, status, words):
    resolved = resolve(call, 1, TOOLS, **options)
    assert isinstance(resolved, Refusal)
    assert resolved.result.status is status
    assert words in resolved.result.text


def test_arguments_are_not_checked_if_validation_is_off():
    call = ParsedCall("double", {"number": "x"}, "c")
    assert resolve(call, 0, TOOLS, validate=False) == Ready(TOOLS["double"], {"number": "x"}, ())
