"""Tools come from entries, files of functions, other files and toolsets; each name is there once."""

import asyncio
import json
import pickle
import sys
from pathlib import Path

import pytest
from fakes import mcp_raw
from helpers.processes import run_program

from torchrl_agentic import ClusterRateLimiter, RateLimiter, Toolset
from torchrl_agentic.config import (
    ConfigError,
    LoadedTools,
    Location,
    ToolsConfig,
    load_config_tools,
    load_tools,
)
from torchrl_agentic.tools.mcp import MCPToolset

ROOT = Path(__file__).parents[2]

FUNCTIONS = '''\
from torchrl_agentic import function_tool


@function_tool
def double(x: int) -> int:
    """Double it.

    Args:
        x: What.
    """
    return 2 * x


def plain(x: int) -> int:
    """Give it back."""
    return x
'''
TOOLSET = '''\
from torchrl_agentic import Tool, Toolset, tool

LIVE = []


class Several(Toolset):
    """Offers tools of the names it is told."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    async def setup(self):
        LIVE.append(self)

        def make(name):
            @tool(name=name)
            def offered(x: int) -> int:
                """Offer it."""
                return x

            return offered

        return [make(name) for name in self.names]

    async def teardown(self):
        LIVE.remove(self)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "several.py").write_text(TOOLSET)
    return tmp_path


def _load(folder: Path, text: str) -> LoadedTools:
    (folder / "c.yaml").write_text(text)
    return load_tools(folder / "c.yaml")


def _names(loaded: LoadedTools) -> list[str]:
    return [tool.name for tool in loaded.tools]


def test_forms_mix_and_keep_their_order(folder: Path):
    (folder / "more.yaml").write_text("tools: [http]\n")
    loaded = _load(
        folder,
        "tools:\n"
        "- stop\n"
        "- class_name: torchrl_agentic.tools.SearchTool\n"
        "  config: {retrieval_service_url: 'http://localhost:1/retrieve', name: find}\n"
        "- function: functions.py:plain\n"
        "- python: {name: interpreter}\n"
        "function_tool_path: functions.py\n"
        "tool_config_path: more.yaml\n",
    )
    assert _names(loaded) == ["stop", "find", "plain", "interpreter", "double", "http"]
    assert loaded.sources["find"].place == f"{folder / 'c.yaml'}:3"
    assert loaded.sources["plain"].defined == f"{folder / 'functions.py'}:14"
    assert loaded.sources["http"].place == f"{folder / 'more.yaml'}:1"


def test_sandboxed_tools_of_all_files_share_one_workspace(folder: Path):
    (folder / "more.yaml").write_text("tools: [file_read]\n")
    shell, read = _load(folder, "tools: [shell]\ntool_config_path: more.yaml\n").tools
    assert shell.sandbox is read.sandbox


def test_path_is_searched_beside_its_file_then_in_the_working_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "sub").mkdir()
    (folder / "sub" / "near.yaml").write_text("function_tool_path: functions.py\n")
    (folder / "sub" / "functions.py").write_text(FUNCTIONS.replace("double", "triple"))
    monkeypatch.chdir(folder)
    assert _names(_load(folder / "sub", "tool_config_path: near.yaml\n")) == ["triple"]
    (folder / "sub" / "functions.py").unlink()
    assert _names(_load(folder / "sub", "tool_config_path: near.yaml\n")) == ["double"]


def test_files_that_name_each_other_are_read_once(folder: Path):
    (folder / "a.yaml").write_text("tools: [http]\ntool_config_path: c.yaml\n")
    assert _names(_load(folder, "tools: [stop]\ntool_config_path: a.yaml\n")) == ["stop", "http"]


def test_a_file_that_is_named_twice_is_read_once(folder: Path):
    (folder / "a.yaml").write_text("tool_config_path: b.yaml\nfunction_tool_path: functions.py\n")
    (folder / "b.yaml").write_text("tools: [stop]\nfunction_tool_path: functions.py\n")
    assert _names(_load(folder, "tool_config_path: [a.yaml, b.yaml]\n")) == ["double", "stop"]


def test_two_tools_of_one_name_are_one_error_that_names_all_places(folder: Path):
    (folder / "more.yaml").write_text("tools:\n\n- stop\n- function: functions.py:double\n")
    text = "tools:\n- stop\n- stop: {}\nfunction_tool_path: functions.py\ntool_config_path: more.yaml\n"
    with pytest.raises(ConfigError) as caught:
        _load(folder, text)
    said = str(caught.value)
    assert "3 tools are named 'stop'" in said
    assert "2 tools are named 'double'" in said
    places = [f"{folder / name}:{line}" for name, line in (("c.yaml", 2), ("c.yaml", 3), ("c.yaml", 4),
              ("more.yaml", 3), ("more.yaml", 4), ("functions.py", 4))]  # fmt: skip
    for place in places:
        assert place in said


def test_a_selection_leaves_the_others_out_before_names_are_compared(folder: Path):
    (folder / "more.yaml").write_text("tools: [python, http]\ntool_selected_list: [python]\n")
    loaded = _load(
        folder, "tools: [stop, http]\ntool_config_path: more.yaml\ntool_selected_list: [http, python]\n"
    )
    assert _names(loaded) == ["http", "python"]


@pytest.mark.parametrize("above", ["{}", "actor_rollout_ref: {{rollout: {{{}}}}}"])
def test_a_selection_inside_tool_kwargs_holds_for_its_files(folder: Path, above: str):
    (folder / "more.yaml").write_text("tools: [python, http]\n")
    inner = "tool_kwargs: {tool_config_path: more.yaml, tool_selected_list: [http]}"
    assert _names(_load(folder, above.format(inner))) == ["http"]


def test_limits_belong_to_tools_and_are_shared_where_they_have_a_name(folder: Path):
    (folder / "more.yaml").write_text("tools: [http]\nlimits: {http: {name: the web, rate_per_second: 2}}\n")
    loaded = _load(
        folder, "tools: [stop]\nlimits: {stop: {max_concurrent: 2}}\ntool_config_path: more.yaml\n"
    )
    stop, http = loaded.limits["stop"], loaded.limits["http"]
    assert isinstance(stop, RateLimiter)
    assert stop.max_concurrent == 2
    assert isinstance(http, ClusterRateLimiter)
    assert http.name == "the web"


def test_a_limit_that_is_set_twice_names_both_places(folder: Path):
    (folder / "more.yaml").write_text("limits: {stop: {max_concurrent: 1}}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:3: .*already set in .*more\.yaml:1"):
        _load(folder, "tools: [stop]\ntool_config_path: more.yaml\nlimits: {stop: {max_concurrent: 2}}\n")


@pytest.mark.parametrize("name", ["plain", "double"])
def test_a_function_of_a_file_finds_its_way_into_another_process(folder: Path, name: str):
    (made,) = _load(folder, f"tools:\n- function: functions.py:{name}\n").tools
    (folder / "tool.pickle").write_bytes(pickle.dumps(made))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(3))"
    done = run_program(
        [sys.executable, "-c", code, str(folder / "tool.pickle")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == {"plain": "3", "double": "6"}[name], done.stderr


def test_a_program_makes_a_configuration_without_a_file(folder: Path):
    config = ToolsConfig(tools=["stop", {"function": "functions.py:plain"}])
    assert _names(load_config_tools(config, Location(folder))) == ["stop", "plain"]
    with pytest.raises(ConfigError, match=r"^tools\.0: no tool 'stp'"):
        load_config_tools(ToolsConfig(tools=["stp"]), Location(folder))


SEVERAL = "- class_name: several.py:Several\n  config: {{names: [{}]}}\n"


def _offers(loaded: LoadedTools) -> list[list[str]]:
    async def ask() -> list[list[str]]:
        return [[tool.name for tool in await toolset.setup()] for toolset in loaded.toolsets]

    return asyncio.run(ask())


def test_a_class_of_toolsets_gives_its_tools_when_it_is_opened(folder: Path):
    loaded = _load(folder, f"tools:\n- stop\n{SEVERAL.format('a, b')}")
    assert _names(loaded) == ["stop"]
    assert _offers(loaded) == [["a", "b"]]
    assert _offers(loaded) == [["a", "b"]]  # its own names do not stand in its way


def test_a_toolset_with_a_name_that_another_source_has_names_both(folder: Path):
    loaded = _load(folder, f"tools:\n- stop\n{SEVERAL.format('a, stop')}")
    with pytest.raises(ConfigError) as caught:
        _closed(loaded)
    for part in ("2 tools are named 'stop'", "c.yaml:2", "c.yaml:3", "several.py:6"):
        assert part in str(caught.value)
    assert not _live(loaded)


def test_two_toolsets_with_one_name_name_both(folder: Path):
    loaded = _load(folder, f"tools:\n{SEVERAL.format('a')}{SEVERAL.format('a')}")
    with pytest.raises(ConfigError, match="2 tools are named 'a'"):
        _offers(loaded)


def test_a_selection_holds_for_toolsets(folder: Path):
    more = f"{SEVERAL.format('a, b')}{SEVERAL.format('c, d')}"
    assert _offers(_load(folder, f"tools:\n{more}tool_selected_list: [a, d]\n")) == [["a"], ["d"]]


def test_a_selected_tool_that_the_only_toolset_does_not_offer_is_named(folder: Path):
    text = f"tools:\n- stop\n{SEVERAL.format('a, b')}tool_selected_list: [stop, a, e]\n"
    with pytest.raises(ConfigError, match=r"c\.yaml:5: .*no tool 'e' to select.*tools: a, b"):
        _offers(_load(folder, text))


def _live(loaded: LoadedTools) -> list[Toolset]:
    return sys.modules[type(loaded.toolsets[0].toolset).__module__].LIVE


@pytest.fixture
def servers(folder: Path) -> Path:
    """Write a file of two servers: demo, with `echo` and `count`, and books, with `lookup`."""
    listed = {}
    for name, tools in {"demo": "echo count", "books": "lookup"}.items():
        (folder / name).write_text(tools)
        env = {"TOOLS": str(folder / name)}
        listed[name] = {"command": sys.executable, "args": [mcp_raw.__file__, "described"], "env": env}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": listed}))
    return folder


MCP_CLASS = """\
tools:
  - class_name: "verl.tools.mcp_search_tool.MCPSearchTool"
    config:
      rate_limit: 120
      timeout: 60
      type: mcp
    mcp:
      mcp_servers_config_path: servers.json
      tool_selected_list:
        - echo
        - lookup
"""


def _closed(loaded: LoadedTools) -> list[list[str]]:
    async def ask() -> list[list[str]]:
        found: list[list[str]] = []
        try:
            for toolset in loaded.toolsets:
                found.append([tool.name for tool in await toolset.setup()])
        finally:
            for toolset in loaded.toolsets:
                await toolset.teardown()
        return found

    return asyncio.run(ask())


SELECTED = "tool_selected_list: [echo, lookup]\n"


@pytest.mark.parametrize(
    ("text", "offers"),
    [
        (MCP_CLASS, [["echo"], ["lookup"]]),
        (
            "tools:\n- mcp:\n    mcp_servers_config_path: servers.json\n"
            "    tool_selected_list: [lookup]\n    name_prefix: m_\n",
            [[], ["m_lookup"]],
        ),
        (f"mcp:\n  mcp_servers_config_path: servers.json\n  {SELECTED}", [["echo"], ["lookup"]]),
        (f"mcp_servers_config_path: servers.json\n{SELECTED}", [["echo"], ["lookup"]]),
        (f"multi_turn:\n  mcp_servers_config_path: servers.json\n  {SELECTED}", [["echo"], ["lookup"]]),
        (
            "mcp_servers_config_path: servers.json\ntool_selected_list: [stop, count]\ntools: [stop, http]\n",
            [["count"], []],
        ),
    ],
)
def test_tools_of_servers_are_named_in_each_of_these_ways(servers: Path, text: str, offers: list[list[str]]):
    assert _closed(_load(servers, text)) == offers


def test_all_that_a_server_has_is_offered_if_nothing_is_selected(servers: Path):
    (demo, books) = _closed(_load(servers, "tools:\n- mcp: {mcp_servers_config_path: servers.json}\n"))
    assert (demo, books) == (["echo", "count"], ["lookup"])


def test_settings_of_servers_reach_them(servers: Path):
    toolsets = [toolset.toolset for toolset in _load(servers, MCP_CLASS).toolsets]
    for toolset in toolsets:
        assert isinstance(toolset, MCPToolset)
        assert toolset.limiter is toolsets[0].limiter
        assert toolset.limiter.rate_per_second == 120
        assert toolset.request_timeout == 60


def test_server_bounds_and_change_policy_reach_the_toolset(servers: Path):
    text = MCP_CLASS.replace(
        "timeout: 60", "max_result_bytes: 1000\n      on_change: refuse\n      fingerprints: {}"
    )
    for loaded in _load(servers, text).toolsets:
        assert isinstance(loaded.toolset, MCPToolset)
        assert (loaded.toolset.max_result_bytes, loaded.toolset.on_change) == (1000, "refuse")
    with pytest.raises(ConfigError, match="expected on_change 'warn' or 'refuse'; got 'ask'"):
        _load(servers, MCP_CLASS.replace("timeout: 60", "on_change: ask"))


def test_server_toolsets_can_be_pickled(servers: Path):
    loaded = _load(servers, f"tools: [python]\nmcp_servers_config_path: servers.json\n{SELECTED}")
    again = pickle.loads(pickle.dumps(loaded.toolsets))
    assert [toolset.source for toolset in again] == [toolset.source for toolset in loaded.toolsets]
    assert again[0].names is again[1].names


def test_tool_that_the_only_server_lacks_cannot_be_selected(servers: Path):
    listed = json.loads((servers / "servers.json").read_text())["mcpServers"]
    (servers / "servers.json").write_text(json.dumps({"mcpServers": {"books": listed["books"]}}))
    with pytest.raises(
        ConfigError, match=r"c\.yaml:10: .*no tool 'lokup' to select; did you mean 'lookup'\?"
    ):
        _closed(_load(servers, MCP_CLASS.replace("        - echo\n", "").replace("- lookup", "- lokup")))


def test_a_tool_of_a_server_and_another_of_its_name_are_named_with_the_file_of_servers(servers: Path):
    text = f"mcp_servers_config_path: servers.json\ntools:\n- python: {{name: lookup}}\n{SELECTED}"
    with pytest.raises(ConfigError) as caught:
        _closed(_load(servers, text))
    for part in ("2 tools are named 'lookup'", "c.yaml:3", "servers.json, server 'books'"):
        assert part in str(caught.value)


def test_error_in_the_server_file_has_the_line_that_names_it(servers: Path):
    (servers / "servers.json").write_text('{"mcpServers": {"demo": {"comand": "x"}}}')
    with pytest.raises(ConfigError, match=r"c\.yaml:2: .*servers\.json: .*'comand'; did you mean 'command'"):
        _load(servers, "tools: [stop]\nmcp_servers_config_path: servers.json\n")


def test_the_revision_of_a_toolset_is_passed_on(folder: Path):
    (toolset,) = _load(folder, f"tools:\n{SEVERAL.format('a')}").toolsets
    assert toolset.revision == 0  # pyright: ignore[reportAttributeAccessIssue]
    toolset.toolset.revision = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert toolset.revision == 3  # pyright: ignore[reportAttributeAccessIssue]
