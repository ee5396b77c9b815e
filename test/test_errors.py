"""Wrong types and values of public arguments are refused in our words, when the object is made."""

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import MCPServerConfig, MCPToolset, PythonTool, RateLimiter, ToolCompose
from torchrl_agentic.errors import check_above_zero, check_count, check_seconds
from torchrl_agentic.limits import ClusterRateLimiter
from torchrl_agentic.repl import SubprocessRepl
from torchrl_agentic.sandbox import UnsafeSubprocessSandbox
from torchrl_agentic.transforms import EndTrajectory, TurnTokenizer

NO_NUMBERS = st.text() | st.booleans() | st.lists(st.integers()) | st.just(1j)


def mcp(**options: Any) -> Any:
    return MCPToolset(MCPServerConfig("true"), **options)


def python(**options: Any) -> Any:
    return PythonTool(SubprocessRepl(UnsafeSubprocessSandbox()), **options)


def cluster(**options: Any) -> Any:
    return ClusterRateLimiter("search", **options)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((RateLimiter, name) for name in ("max_concurrent", "rate_per_second", "burst", "break_after")),
        (RateLimiter, "break_seconds"),
        (cluster, "max_concurrent"),
        *((ToolCompose, name) for name in ("per_call_timeout", "per_turn_timeout", "max_threads")),
        (ToolCompose, "max_calls_per_turn"),
        (EndTrajectory, "max_turns"),
        (mcp, "request_timeout"),
        (python, "timeout"),
    ],
)
@pytest.mark.parametrize("value", ["3", [1], True, object()])
def test_value_that_is_not_a_number_is_rejected_with_the_expected_type(make: Any, name: str, value: object):
    with pytest.raises(TypeError, match=rf"^{name} is a .*; got .*\({type(value).__name__}\)$"):
        make(**{name: value})


@given(NO_NUMBERS)
def test_every_check_rejects_values_that_are_not_numbers(value: object):
    for check in (check_seconds, check_above_zero, check_count):
        with pytest.raises(TypeError, match=r"^x is a "):
            check("x", value)


@given(st.integers() | st.floats())
def test_numbers_are_accepted_if_they_are_above_zero(value: float):
    def accepts(check: Any) -> bool:
        try:
            check("x", value)
        except ValueError as error:
            assert str(error).startswith("x must be")
            return False
        return True

    assert accepts(check_seconds) == accepts(check_above_zero) == (value > 0)
    assert accepts(check_count) == (1 <= value < math.inf and value == int(value))
    assert accepts(partial(check_count, least=0)) == (0 <= value < math.inf and value == int(value))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate_limits": [1]}, r"rate_limits maps names of tools to limiters: .*; got \[1\] \(list\)"),
        ({"rate_limits": "search"}, "rate_limits maps names of tools"),
        ({"tool_role": 5}, "tool_role is a role of messages, such as 'tool'; got 5"),
        ({"eos_strings": "</s>"}, r"eos_strings=\['</s>'\]"),
        ({"tools": None}, "tools is a list of tools; got NoneType"),
        ({"parser": None}, "a parser must be an object or a registered name; got None"),
        ({"recorder": 5}, "recorder must be a Recorder.*; got int"),
    ],
)
def test_wrong_option_of_tool_compose_is_a_type_error_with_the_expected_type(options: Any, words: str):
    with pytest.raises(TypeError, match=words):
        ToolCompose(**options)


def test_a_limiter_without_limits_lets_everything_pass():
    limiter = RateLimiter()
    assert all(limiter.try_acquire() for _ in range(1000))


@pytest.mark.parametrize("tokenizer", [None, "Qwen/Qwen3-0.6B", object()])
def test_object_that_is_not_a_tokenizer_is_rejected_with_the_missing_methods(tokenizer: object):
    with pytest.raises(TypeError, match=r"AutoTokenizer.*got \w+, which has no apply_chat_template, "):
        TurnTokenizer(tokenizer)
