"""A configuration is read as written, and a mistake in it names file and expectation."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from torchrl_agentic import ClusterRateLimiter, RateLimiter
from torchrl_agentic.cli.rollout_file import (
    ConfigError,
    ModelConfig,
    RolloutConfig,
    load_config,
    load_conversations,
    load_questions,
    load_rollout_tools,
    make_tools,
)

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_configuration_is_read(tmp_path: Path):
    text = "conversations: [a.jsonl]\ntools: [stop, {http: {}}]\nlimits: {stop: {max_concurrent: 2}}\n"
    config = load_config(_write(tmp_path / "c.yaml", text))
    assert config.conversations == ["a.jsonl"]
    assert [tool.name for tool in make_tools(config, tmp_path)] == ["stop", "http"]
    limiter = load_rollout_tools(config, tmp_path).limits["stop"]
    assert isinstance(limiter, RateLimiter)
    assert limiter.max_concurrent == 2
    assert load_config(_write(tmp_path / "x.jsonl", "")).conversations == ["x.jsonl"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("conversation: [a]", ["conversation", "conversations"]),
        ("conversations: a.jsonl", ["conversations", "list"]),
        ("conversations: [a]\nper_call_timeout: soon", ["c.yaml:2", "per_call_timeout", "number"]),
        ("conversations: [a]\nmodel: {path: tiny, row: 3}", ["c.yaml:2", "'row'", "did you mean 'rows'?"]),
        ("conversations: [a]\nmodel: {path: tiny}", ["a model needs questions"]),
        ("conversations: [a]\nlimits: {x: 3}", ["limits", "dict"]),
        ("", ["the file", "expected"]),
        ("[1", ["YAML"]),
    ],
)
def test_a_mistake_names_file_and_expectation(tmp_path: Path, text: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path / "c.yaml", text))
    for word in ["c.yaml", *words]:
        assert word in str(caught.value)


def test_a_function_is_loaded_from_a_file(tmp_path: Path):
    _write(tmp_path / "mine.py", "def f(x: int) -> int:\n    return x\n")
    config = RolloutConfig(conversations=[], tools=[{"function": "mine.py:f"}])
    assert make_tools(config, tmp_path)[0](3) == 3


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("mine.py:g", "mine.py has no attribute 'g'"),
        ("none.py:f", "no file 'none.py'"),
        ("no.such:f", "cannot import no.such"),
        ("mine.py", "'mine.py': expected"),
        ("broken.py:f", "broken.py: .*SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(tmp_path: Path, reference: str, words: str):
    _write(tmp_path / "mine.py", "def f(x: int) -> int:\n    return x\n")
    _write(tmp_path / "broken.py", "def f(:\n")
    with pytest.raises(ConfigError, match=words):
        make_tools(RolloutConfig(conversations=[], tools=[{"function": reference}]), tmp_path)


def test_a_bad_json_line_is_named_by_its_number(tmp_path: Path):
    _write(tmp_path / "a.jsonl", json.dumps(CHAT) + "\n\n{oops\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3"):
        load_conversations(RolloutConfig(conversations=["a.jsonl"]), tmp_path)


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_newlines_end_a_line(tmp_path: Path, separator: str):
    """JSON may hold these raw, and `ensure_ascii=False` writes them so."""
    chat = {"messages": [{"role": "user", "content": f"a{separator}b"}, *CHAT["messages"][1:]]}
    text = json.dumps(chat, ensure_ascii=False) + "\n"
    _write(tmp_path / "a.jsonl", text)
    (conversation,) = load_conversations(RolloutConfig(conversations=["a.jsonl"]), tmp_path)
    assert conversation.prompt[0].content == f"a{separator}b"


@pytest.mark.parametrize(
    "item", [{"messages": CHAT["messages"][:1]}, {"messages": []}, {}, [1], {"messages": [{"content": "x"}]}]
)
def test_invalid_conversation_is_named(tmp_path: Path, item: object):
    _write(tmp_path / "a.jsonl", json.dumps(item) + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1"):
        load_conversations(RolloutConfig(conversations=["a.jsonl"]), tmp_path)


ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{n + 1}"},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(3)
]
"""As data sets for verl have them."""


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_rows_of_verls_data_sets_are_questions(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_text(json.dumps(ROWS) if suffix == "json" else "\n".join(map(json.dumps, ROWS)))
    config = load_config(path, ModelConfig(path="tiny"))
    questions = load_questions(config, tmp_path)
    assert [question.answer for question in questions] == ["1", "2", "3"]
    assert [(message["role"], message["content"]) for message in questions[2].messages] == [
        ("system", "Be brief."),
        ("user", "2 + 1?"),
    ]


def test_file_that_is_not_parquet_is_named(tmp_path: Path):
    (tmp_path / "rows.parquet").write_text("PAR")
    config = load_config(tmp_path / "rows.parquet", ModelConfig(path="tiny"))
    with pytest.raises(ConfigError, match=r"rows\.parquet: not a Parquet file"):
        load_questions(config, tmp_path)


def test_a_limit_with_a_name_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))
    path = tmp_path / "a.yaml"
    path.write_text(
        "conversations: [a.jsonl]\ntools: [stop]\nlimits: {stop: {name: the service, max_concurrent: 2}}\n"
    )
    limiter = load_rollout_tools(load_config(path), tmp_path).limits["stop"]
    assert isinstance(limiter, ClusterRateLimiter)
    assert (limiter.name, limiter.limits.max_concurrent) == ("the service", 2)


def test_services_are_tools_of_a_file_too(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "conversations: [a.jsonl]\ntools:\n"
        "  - sandbox_fusion: {sandbox_fusion_url: 'http://localhost:1', rate_limit: 3}\n"
        "  - search: {retrieval_service_url: 'http://localhost:1/retrieve'}\n"
        "  - http: {allowed_hosts: [example.org]}\n"
    )
    assert [tool.name for tool in make_tools(load_config(path), tmp_path)] == [
        "code_interpreter",
        "search",
        "http",
    ]
    path.write_text("conversations: [a.jsonl]\ntools: [search]\n")
    with pytest.raises(ConfigError, match="retrieval_service_url"):
        make_tools(load_config(path), tmp_path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["python", "stop"]),
        ("limits: {stop: {max_concurrent: 1}}\n", ["python", "stop"]),
        ("tools: [http]\n", ["http"]),
        ("tools: []\n", []),
        ("function_tool_path: f.py\n", ["look"]),
        ("multi_turn: {tool_config_path: more.yaml}\n", ["http"]),
    ],
)
def test_a_rollout_has_the_tools_that_it_names_from_wherever_or_two_of_ours(
    tmp_path: Path, text: str, names: list[str]
):
    _write(tmp_path / "f.py", "from torchrl_agentic import tool\n@tool\ndef look() -> str:\n    'Look.'\n")
    _write(tmp_path / "more.yaml", "tools: [http]\n")
    config = load_config(_write(tmp_path / "c.yaml", "conversations: [a.jsonl]\n" + text))
    assert [tool.name for tool in make_tools(config, tmp_path)] == names


def test_a_rollout_takes_parser_and_bound_from_verls_section_unless_it_says_its_own(tmp_path: Path):
    text = "conversations: [a.jsonl]\ntools: [stop]\nmulti_turn: {format: glm, max_parallel_calls: 2}\n"
    config = load_config(_write(tmp_path / "c.yaml", text))
    assert config.parser == "glm"
    assert load_rollout_tools(config, tmp_path).max_calls_per_turn == 2
    assert load_config(_write(tmp_path / "c.yaml", text + "parser: xml\n")).parser == "xml"


def test_error_in_the_tools_of_a_rollout_has_its_line(tmp_path: Path):
    text = "conversations: [a.jsonl]\ntools:\n- stop\n- python:\n    timout: 1\n"
    config = load_config(_write(tmp_path / "c.yaml", text))
    with pytest.raises(ConfigError, match=r"c\.yaml:5: .*did you mean 'timeout'\?"):
        make_tools(config, tmp_path)
