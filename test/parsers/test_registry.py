"""Each name that engines know resolves, and no name is guessed to be another version's."""

import pytest

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.parsers import ALIASES, PARSERS, get_parser
from torchrl_agentic.parsers.adapters.sglang import SGLangParser
from torchrl_agentic.parsers.adapters.transformers import TransformersParser
from torchrl_agentic.parsers.adapters.vllm import VLLMParser
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


VLLM = {
    "dots": "dots", "deepseek_v3": "deepseek_v3", "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v32", "deepseek_v4": "deepseek_v4", "deepseek_v41": "deepseek_v41",
    "cohere_command3": "cohere_command3", "cohere_command4": "cohere_command3", "ernie45": "hermes",
    "glm45": "glm45", "glm47": "glm45", "ling3": "glm45", "granite-20b-fc": "granite-20b-fc",
    "granite": "granite", "granite4": "hermes", "hermes": "hermes", "poolside_v1": "glm45",
    "hunyuan_a13b": "hunyuan_a13b", "hy_v3": "hy_v3", "hy_v4": "hy_v4", "internlm": "internlm",
    "jamba": "jamba", "lfm2": "lfm2", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3",
    "k2_horizon": "k2_horizon", "llama3_json": "llama3_json", "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic", "longcat": "longcat", "mimo": "mimo", "minimax_m2": "minimax_m2",
    "minimax_m3": "minimax_m3", "minicpm5": "minicpm5", "mistral": "mistral", "olmo3": "olmo3",
    "plamo3": "plamo3", "phi4_mini_json": "phi4_mini", "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder", "qwen3_json": "hermes", "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed_oss", "step3": "step3", "step3p5": "qwen3_coder", "step5": "qwen3_coder",
    "inkling": "inkling", "xlam": "xlam", "gigachat3": "gigachat3", "functiongemma": "functiongemma",
    "gemma4": "gemma4", "apertus": "apertus",
}  # fmt: skip
"""The names of vLLM 0.33 → the format that both mean."""

SGLANG = {
    "apertus2509": "apertus", "cohere_command4": "cohere_command3", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41", "dots": "dots", "glm": "glm45", "glm45": "glm45", "glm47": "glm45",
    "gpt-oss": "harmony", "k2_horizon": "k2_horizon", "kimi_k2": "kimi_k2", "kimi_k3": "kimi_k3",
    "lfm2": "lfm2", "ling3": "glm45", "llama3": "llama3_json", "mimo": "mimo", "minicpm5": "minicpm5",
    "mistral": "mistral", "poolside_v1": "glm45", "pythonic": "pythonic", "qwen": "hermes",
    "qwen25": "hermes", "qwen3_coder": "qwen3_coder", "spark25": "glm45", "step3": "step3",
    "step3p5": "qwen3_coder", "minimax-m2": "minimax_m2", "minimax-m3": "minimax_m3",
    "nanbeige": "qwen3_coder", "trinity": "hermes", "interns1": "internlm", "hermes": "hermes",
    "hunyuan": "hy_v3", "gigachat3": "gigachat3", "gigachat35": "gigachat35", "gemma4": "gemma4",
    "inkling": "inkling",
}  # fmt: skip
"""The names of SGLang 0.5.23 → the format that both mean."""

ONLY_ENGINES = {
    "beam": "vllm:beam", "muse": "vllm:muse", "muse_glimmer": "vllm:muse_glimmer",
    "musespark1x": "vllm:musespark1x", "iquest_q1": "sglang:iquest_q1", "hf": "transformers:",
    "response_template": "transformers:",
}  # fmt: skip
"""The names for formats that we do not read → the adapter that `get_parser` makes, with a warning."""


@pytest.mark.parametrize(
    ("engine", "name", "ours"),
    [("vllm", *item) for item in VLLM.items()] + [("sglang", *item) for item in SGLANG.items()],
)
def test_a_name_of_an_engine_means_the_same_format_here(engine, name, ours):
    assert get_parser(name).name == ours
    assert get_parser(f"{engine}:{name}", tokenizer=byte_tokenizer()).native.name == ours


@pytest.mark.parametrize(("name", "adapter"), ONLY_ENGINES.items())
def test_a_format_that_only_an_engine_reads_is_read_by_its_adapter(name, adapter, monkeypatch):
    for kind in (VLLMParser, SGLangParser, TransformersParser):
        monkeypatch.setattr(kind, "prepare", lambda self: None)
    tokenizer = byte_tokenizer()
    tokenizer.response_template = {"fields": {}}
    with pytest.warns(UserWarning, match=f"'{adapter}' is used"):
        parser = get_parser(name, tokenizer=tokenizer)
    assert f"{parser.engine}:{parser.format}" == adapter
    assert parser.native is None
