"""Against the real vLLM, SGLang and xgrammar; `make test-vllm` installs them."""

import json

import pytest
from helpers.call_outcomes import outcomes

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

TOOLS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
SPECS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]
ADD, SAY = ("add", {"a": 1}), ("say", {"text": 'x "y"'})
MARKERS = tuple(
    marker
    for name in PARSERS
    for marker in getattr(get_parser(name), "control_markers", tuple)()
    if marker[0] in "<["
)
TOKENIZER = byte_tokenizer(
    added=tuple(dict.fromkeys(marker for marker in MARKERS if marker.endswith((">", "]"))))
)
BOTH = ("hermes", "qwen3_coder", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45")
ENGINES = [
    *(
        f"vllm:{name}"
        for name in (*BOTH, "deepseek_v32", "minimax_m2", "granite-20b-fc", "phi4_mini_json", "seed_oss")
    ),
    *(f"vllm:{name}" for name in ("llama3_json", "pythonic", "olmo3", "lfm2")),
    *(
        f"sglang:{name}"
        for name in ("qwen25", "qwen3_coder", "deepseekv3", "deepseekv31", "kimi_k2", "glm45", "llama3")
    ),
    *(f"sglang:{name}" for name in ("lfm2", "pythonic", "minimax-m2")),
]
BROKEN = ["hermes", "qwen3_coder", "deepseek_v31", "kimi_k2", "glm45", "minimax_m2"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_reads_what_ours_writes(name):
    parser = get_parser(name, tokenizer=TOKENIZER)
    text = parser.native.render_calls([ParsedCall(*ADD, "call_0_0"), ParsedCall(*SAY, "call_0_1", index=1)])
    result = parser.parse(text, tools=SPECS)
    assert outcomes(result) == [ADD, SAY]
    assert parser.parse("hello", tools=SPECS).calls == ()
    assert parser.parse("hello", tools=SPECS).text == "hello"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", BROKEN)
def test_nothing_that_an_engine_drops_is_lost(engine, name):
    """Cut anywhere after its opener, a call is an entry: the call itself, or an error."""
    known = {"hermes": "qwen25", "deepseek_v31": "deepseekv31", "minimax_m2": "minimax-m2"}
    parser = get_parser(
        f"{engine}:{known.get(name, name) if engine == 'sglang' else name}", tokenizer=TOKENIZER
    )
    text = parser.native.render_call(ParsedCall(*SAY, "call_0_0"))
    opener = parser.native.format.openers[0]
    begin = text.index(opener) + len(opener)
    for end in range(begin, len(text), 3):
        result = parser.parse(text[:end], tools=SPECS)
        assert len(result.calls) == 1, text[:end]
        assert "".join([result.text, text[result.calls[0].span[0] : result.calls[0].span[1]]])


def test_unknown_formats_of_engines_are_named():
    with pytest.raises(ValueError, match="no tool parser 'nope'"):
        get_parser("vllm:nope", tokenizer=TOKENIZER).parse("hello")
    with pytest.raises(ValueError, match="no tool parser 'nope'"):
        get_parser("sglang:nope").parse("hello")


UNTAGGED = (
    "pythonic", "olmo3", "lfm2", "tags", "fence", "hy_v3", "gemma4", "functiongemma", "minicpm5", "step3",
    "dots", "k2_horizon", "xlam", "gigachat35",
)  # fmt: skip
"""Formats for whose arguments, or tags, xgrammar has no style."""
TAGGED = [name for name in PARSERS if name not in ("openai", "anthropic", "json")]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_structural_tag_is_valid_to_vllm_and_lets_pass_what_can_be_read(name, choice):
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    parser = get_parser(name)
    tag = parser.structural_tag(SPECS, tool_choice=choice)
    if tag is None:
        assert name in UNTAGGED
        return
    text = json.dumps(tag)
    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=text)))
    grammar = Grammar.from_structural_tag(text)
    add, say = ParsedCall(*ADD, "call_0_0"), ParsedCall(*SAY, "call_0_1", index=1)
    assert accepts(grammar, "hello") is (choice == "auto")
    begin = tag["format"]["triggers"][0]
    for calls in ([add], [add, say]):
        written = parser.render_calls(calls)
        assert accepts(grammar, written[written.index(begin) :])
    assert accepts(grammar, "hello " + parser.render_calls([add, say])) is (choice == "auto")
    single = Grammar.from_structural_tag(json.dumps(parser.structural_tag(SPECS, parallel=False)))
    assert not accepts(single, parser.render_calls([add, say]))
    for wrong in (
        ParsedCall("fly", {}, "call_0_0"),
        ParsedCall("say", {}, "call_0_0"),
        ParsedCall("add", {"a": "x"}, "c"),
    ):
        assert not accepts(grammar, parser.render_calls([wrong]))
