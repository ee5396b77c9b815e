"""Small chat templates that write calls as one model family does."""

from torchrl_agentic.testing.tokenizers import byte_tokenizer

HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
FOOTER = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n%s{% endif %}"
CALL = "{% for c in m.tool_calls %}%s{% endfor %}"
NAME, ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def tokenizer_with(written: str, beginning: str = ""):
    """Return a tokenizer whose template writes call `c` as `written` and begins answers with `beginning`."""
    tokenizer = byte_tokenizer()
    calls = "{% if m.tool_calls %}" + CALL.replace("%s", written) + "{% endif %}"
    tokenizer.chat_template = HEADER + calls + FOOTER.replace("%s", beginning)
    return tokenizer
