"""Tokenizers that carry the chat templates of real model families; trl ships most of these templates."""

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from torchrl_agentic.testing import chat_tokenizer

MISTRAL = """\
{{- bos_token if bos_token is defined else '' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if loop.first and tools %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- else %}
        {{- ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
"""Template in the style of Mistral v3: no header before an answer, ids of nine characters, JSON results."""
QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """A chat template and the special tokens that a tokenizer needs for it.

    Attributes:
        template: Name of a template that trl ships, or "mistral" for ours.
        eos: Token that ends an answer.
        stops: Further tokens that end an answer.
        added: Tokens that are added to the vocabulary without being control tokens.
        sentencepiece: Build a tokenizer like those made by SentencePiece.
        extends: True if the rendering of a longer conversation begins with that of a shorter one.
    """

    template: str
    eos: str
    stops: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    sentencepiece: bool = False
    extends: bool = True

    def tokenizer(self):
        text = self.source()
        control = re.findall(r"<\|[a-z_]+\|>|\[/?[A-Z_]{3,}\]|<sop>|\[gMASK\]|</s>", text)
        found = [one for one in dict.fromkeys(control) if one not in self.added]
        return _made(text, self.eos, (*self.stops, *found), self.added, self.sentencepiece)

    def source(self):
        return MISTRAL if self.template == "mistral" else trl_template(self.template)


_made = functools.cache(
    lambda text, eos, control, added, sentencepiece: chat_tokenizer(
        text, eos=eos, control=control, added=added, sentencepiece=sentencepiece
    )
)


def trl_template(name):
    """Return a chat template that trl ships, without importing trl."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "the tests read chat templates of trl: pip install -e '.[test]'"
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


FAMILIES = {
    "qwen2_5": Family("qwen2_5", "<|im_end|>", added=QWEN_TOKENS),
    "qwen3": Family("qwen3", "<|im_end|>", added=QWEN_TOKENS),
    "qwen3_6": Family("qwen3_6", "<|im_end|>", added=QWEN_TOKENS, extends=False),
    "llama3_1": Family("llama3_1", "<|eot_id|>", ("<|eom_id|>",)),
    "mistral": Family("mistral", "</s>", sentencepiece=True, extends=False),
    "glm4moe": Family(
        "glm4moe",
        "<|endofanswer|>",
        ("<|observation|>", "<|user|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        extends=False,
    ),
    "gptoss": Family("gptoss", "<|return|>", ("<|call|>",), extends=False),
    "lfm2": Family("lfm2", "<|im_end|>"),
}
