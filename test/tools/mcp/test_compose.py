"""MCP servers in an environment: whole rollouts, tools that come and go, sessions of trajectories."""

import re

import pytest
from helpers.chat_envs import begin, call, chat_env, results, step
from helpers.limit import limit

from torchrl_agentic import RateLimiter, ToolCompose, tool
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools import MCPToolset


@pytest.fixture
def compose(demo):
    """Makes transforms with a demo server, and closes them."""
    made = []

    def make(*others, config=None, rate_limits=None, **options):
        transform = ToolCompose(others)
        made.append(transform)
        transform.add_toolset(MCPToolset(config or demo(), **options), rate_limits=rate_limits)
        return transform

    yield make
    for transform in made:
        transform.close()


def test_a_rollout_calls_a_server_in_every_row_and_turn(compose):
    transform = compose(tools=["echo", "facts"])
    env = chat_env((4,), transform)
    script = [[call("echo", text=f"row {row}"), call("facts")] for row in range(4)]
    td = env.rollout(2, ScriptedPolicy(script), auto_reset=False, tensordict=begin(env))
    said = [[part for part in row if part] for row in results(td[:, -1]["next"])]
    assert said == [[f"row {row}", '{"answer": 42}'] for row in range(4)]
    assert not td["next", "agentic", "any_error"].any()


def test_sixteen_trajectories_have_a_server_each_and_a_hundred_calls_in_all(compose, raw):
    """Each counts its own calls alone, although all of them run at once; two tools share its session."""
    transform = compose(config=raw(), sessions="trajectory", tools=["count", "pid"])
    env = chat_env((16,), transform)
    td = step(env, begin(env), *(call("count") * 3 + call("pid") + call("count") * 3 for _ in range(16)))
    rows = results(td["next"])
    assert [row[:3] + row[4:] for row in rows] == [["1", "2", "3", "4", "5", "6"]] * 16
    assert len({row[3] for row in rows}) == 16


def test_a_trajectory_that_ends_takes_its_server_along_and_the_next_has_a_new_one(compose, raw, is_running):
    transform = compose(config=raw(), sessions="trajectory", tools=["count", "pid"])
    env = chat_env((1,), transform)
    first = results(step(env, begin(env), call("count") + call("pid"))["next"])[0]
    second = results(step(env, begin(env), call("count") + call("pid"))["next"])[0]
    assert (first[0], second[0]) == ("1", "1")
    assert not is_running(int(first[1]))
    assert is_running(int(second[1]))
    transform.close()
    assert not is_running(int(second[1]))


def test_one_connection_serves_all_trajectories_by_default(compose, raw):
    env = chat_env((8,), compose(config=raw(), tools=["pid"]))
    rows = results(step(env, begin(env), *(call("pid") for _ in range(8)))["next"])
    assert len({row[0] for row in rows}) == 1


def test_a_server_that_is_killed_in_the_middle_of_a_step_answers_as_infra(compose):
    transform = compose(tools=["die", "echo"])
    env = chat_env((2,), transform)
    td = step(env, begin(env), call("die"), "nothing")
    assert "was lost during the call (exit code 7)" in results(td["next"])[0][0]
    assert td["next", "agentic", "n_infra"].flatten().tolist() == [1, 0]
    td = step(env, begin(env), call("echo", text="back"), "nothing")
    assert results(td["next"])[0] == ["back"]


def test_a_tool_that_a_server_adds_can_be_called_at_the_next_step(compose):
    transform = compose()
    env = chat_env((1,), transform)
    td = step(env, begin(env), call("grow", name="later"))
    assert "later" not in transform
    td = step(env, begin(env), call("later"))
    assert results(td["next"])[0] == ["later"]
    assert "later" in [spec["function"]["name"] for spec in transform.tool_specs]


def test_a_tool_that_a_server_takes_away_is_gone_at_the_next_step(compose):
    transform = compose()
    env = chat_env((1,), transform)
    step(env, begin(env), call("shrink", name="echo"))
    begin(env)
    assert "echo" not in transform
    td = step(env, begin(env), call("echo", text="hi"))
    assert "no tool named 'echo'" in results(td["next"])[0][0]


def test_a_tool_that_a_server_changes_is_checked_by_its_new_schema_and_keeps_its_limiter(compose):
    limiter = RateLimiter(max_concurrent=1)
    transform = compose(rate_limits={"echo": limiter})
    env = chat_env((1,), transform)
    place = [tool.name for tool in transform.tools].index("echo")
    step(env, begin(env), call("retype"))
    td = step(env, begin(env), call("echo", text="hi") + call("echo", number=5))
    refused, accepted = results(td["next"])[0]
    assert "number" in refused
    assert accepted == "5"
    assert limiter.stats().granted == 1
    assert transform.tools[place].name == "echo"


def test_a_clone_learns_of_new_tools_too(compose):
    transform = compose()
    clone = transform.clone()
    env, other = chat_env((1,), transform), chat_env((1,), clone)
    step(env, begin(env), call("grow", name="later"))
    for one in (env, other):
        assert results(step(one, begin(one), call("later"))["next"])[0] == ["later"]


def test_a_new_tool_of_a_name_that_is_taken_is_passed_over(compose, caplog):
    @tool
    async def mine() -> str:
        return "mine"

    transform = compose(mine)
    env = chat_env((1,), transform)
    step(env, begin(env), call("grow", name="mine"))
    td = step(env, begin(env), call("mine") + call("echo", text="hi"))
    assert results(td["next"])[0] == ["mine", "hi"]
    assert "two tools are named 'mine'" in caplog.text


def test_a_tool_that_was_taken_out_by_hand_stays_out(compose):
    transform = compose()
    transform.pop([tool.name for tool in transform.tools].index("echo"))
    env = chat_env((1,), transform)
    step(env, begin(env), call("grow", name="later"))
    begin(env)
    assert "later" in transform
    assert "echo" not in transform


def test_two_servers_with_tools_of_one_name_need_a_prefix_and_the_error_names_both(compose, raw):
    transform = compose(config=raw(), tools=["first"])
    with pytest.raises(ValueError, match=r"named 'first'.*server 'raw'.*server 'other' .*name_prefix="):
        transform.add_toolset(MCPToolset(raw(name="other"), tools=["first"]))
    transform.add_toolset(MCPToolset(raw(name="other"), tools=["first"], name_prefix="other_"))
    env = chat_env((1,), transform)
    td = step(env, begin(env), call("first") + call("other_first"))
    assert results(td["next"])[0] == ["first", "first"]


def test_limit_for_an_unknown_tool_is_rejected_and_the_server_stopped(raw):
    transform, toolset = ToolCompose([]), MCPToolset(raw(), tools=["first"])
    with pytest.raises(
        ValueError, match=r"rate_limits names 'ecko', but the toolset has no such tool; .*: first"
    ):
        transform.add_toolset(toolset, rate_limits={"ecko": RateLimiter(max_concurrent=1)})
    assert len(transform) == 0
    assert toolset.tools == ()


def test_writes_of_a_server_keep_the_order_of_the_calls(compose):
    """`grow` writes and `count` writes: each waits for the one before it."""
    env = chat_env((1,), compose())
    td = step(env, begin(env), call("count") * 5 + call("counted"))
    assert results(td["next"])[0] == ["1", "2", "3", "4", "5", "5"]


def test_closed_environment_restarts_the_server(compose, raw):
    limiter = RateLimiter(max_concurrent=1)
    transform = compose(config=raw(), tools=["count"], rate_limits={"count": limiter})
    env = chat_env((1,), transform)
    step(env, begin(env), call("count"))
    transform.close()
    td = step(env, begin(env), call("count"))
    assert results(td["next"])[0] == ["1"]
    assert limiter.stats().granted == 2


def test_server_of_2026_without_initialize_works_and_announces_changes(compose, raw):
    """It announces changes on a stream that the client must request; each call adds a tool."""
    transform = compose(config=raw("modern"))
    env = chat_env((1,), transform)
    assert results(step(env, begin(env), call("first"))["next"])[0] == ["first"]
    assert results(step(env, begin(env), call("later7"))["next"])[0] == ["later7"]


@pytest.mark.parametrize(
    ("per_call", "of_server"), [(limit(30), 0.2), (4.0, limit(30))], ids=["server", "call"]
)
def test_the_smaller_of_both_timeouts_bounds_a_call(demo, per_call, of_server):
    """The toolset ends it shortly before the environment would, so that the server gets the cancellation.

    It names the seconds that the server had, which are fewer if starting the call took long.
    """
    transform = ToolCompose([], per_call_timeout=per_call)
    transform.add_toolset(MCPToolset(demo(), tools=["hold"], request_timeout=of_server))
    env = chat_env((1,), transform)
    try:
        (held,) = results(step(env, begin(env), call("hold", label="x"))["next"])[0]
    finally:
        transform.close()
    found = re.fullmatch(r"Error: hold timed out: no response within (\d[\d.]*) s", held)
    assert found, held
    assert 0 < float(found[1]) <= of_server
    assert float(found[1]) == of_server or float(found[1]) < per_call < of_server
