"""Each name that engines know resolves, and no name is guessed to be another version's."""

import pytest

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.parsers import ALIASES, PARSERS, get_parser
from torchrl_agentic.parsers.formats.api_messages import warn_of_harmony
from torchrl_agentic.testing.tokenizers import byte_tokenizer


@pytest.mark.parametrize("name", ["kimi_k9", "minimax_m9", "deepseek_v9", "hermes9", "seed_oss2"])
def test_another_version_is_never_suggested(name):
    with pytest.raises(ValueError, match="no parser is named") as error:
        get_parser(name)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(("typed", "meant"), [("hermse", "hermes"), ("qwen3coder", "qwen3_coder")])
def test_a_typing_error_is_answered_with_the_name(typed, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        get_parser(typed)


def test_no_alias_is_the_name_of_another_parser():
    assert not ALIASES.keys() & PARSERS.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("apertus2509", "apertus"),
        ("interns1", "internlm"),
        ("gigachat31", "gigachat3"),
        ("llama_nemotron_json", "nemotron_nano_v2"),
        ("smollm3", "hermes"),
        ("firefunction_v2", "phi4_mini"),
        ("trinity", "hermes"),
    ],
)
def test_names_of_engines_and_models_mean_the_format(name, meant):
    assert get_parser(name) == get_parser(meant)


def test_a_format_that_only_an_engine_reads_asks_for_that_engine(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(MissingExtra, match="vllm"):
        get_parser("muse", tokenizer=byte_tokenizer())


def test_the_name_that_vllm_gives_to_harmony_is_explained_once(caplog):
    warn_of_harmony.cache_clear()
    result = get_parser("openai").parse('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>')
    assert result.notes == ("harmony_text",)
    assert "parser 'harmony'" in caplog.text
    adapter = get_parser("vllm:openai", tokenizer=byte_tokenizer())
    assert adapter.native.name == "harmony"
