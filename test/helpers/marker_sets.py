"""Control tokens of model families, as the added tokens of small tokenizers."""

import functools

from torchrl_agentic.testing import chat_tokenizer

_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MARKER_SETS = {
    "chatml": ("<|im_start|>", "<|im_end|>", *_TOOLS, "<|fim_prefix|>", "<|vision_start|>"),
    "llama2": ("[INST]", "</s>", "<s>", "<unk>", "[/INST]", "<<SYS>>", "<</SYS>>", "<image>"),
    "llama3": (
        "<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eom_id|>",
        "<|python_tag|>", "<|reserved_special_token_7|>",
    ),
    "llama4": ("<|header_start|>", "<|eot|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
    "mistral": (
        "[INST]", "</s>", "<s>", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[ARGS]",
        "[CALL_ID]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[THINK]", "[/THINK]", "[AUDIO]", "[BEGIN_AUDIO]",
        "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>", "<SPECIAL_20>",
    ),
    "gemma": (
        "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<start_of_image>",
        "<end_of_image>", "<image_soft_token>", "<unused7>", "<start_function_call>", "<end_function_call>",
        "<start_function_response>", "<escape>",
    ),
    "gemma4": (
        "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
        "<|tool>", "<tool|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>', "<eos>",
    ),
    "deepseek": (
        "<｜User｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
        "｜DSML｜", "<think>", "</think>",
    ),
    "glm": (
        "<|user|>", "<|observation|>", "[gMASK]", "<sop>", "<eop>", "[MASK]", "[sMASK]", "<|assistant|>",
        "<|system|>", *_TOOLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
    ),
    "hy": (
        "<｜hy_User｜>", "<｜hy_eos｜>", "<tool_calls>", "</tool_calls>", "<tool_sep>", "<tool_responses>",
        "</tool_responses>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "<think>",
    ),
    "hy_suffixed": (
        "<｜hy_User:opensource｜>", "<｜hy_eos:opensource｜>", "<tool_calls:opensource>",
        "<tool_sep:opensource>",
        "</tool_calls:opensource>", "<tool_call:opensource>", "<tool_responses:6124c78e>",
        "</tool_response:opensource>", "<arg_key:opensource>", "</arg_value:opensource>",
        "<think:opensource>", "</think:6124c78e>",
    ),
    "kimi": (
        "<|im_user|>", "<|im_end|>", "[BOS]", "[EOS]", "[EOT]", "[PAD]", "[UNK]", "<|im_middle|>",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    ),
    "kimi_k3": (
        "<|open|>", "<|end_of_msg|>", "<|close|>", "<|sep|>", "<|kimi_image_placeholder|>", "[BOS]", "[EOS]",
    ),
    "minimax": (
        "]~b]", "[e~[", "]~!b[", "]!p~[", "]!d~[", "<minimax:tool_call>", "</minimax:tool_call>",
        "]<]image[>[", "]<]start of image[>[", "]<]speech[>[", "<fim_prefix>", "<reponame>", "<think>",
        "]<]minimax[>[", "<mm:think>", "</mm:think>",
    ),
    "minicpm": (
        "<|im_start|>", "<|im_end|>", "<function", "</function>", "<param", "</param>", "<tool_sep>",
        "<tool_def_sep>",
    ),
    "seed_oss": (
        "<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>", "<seed:tool_call>",
        "</seed:tool_call>", "<seed:cot_budget_reflect>",
    ),
    "inkling": (
        "<|message_user|>", "<|end_message|>", "<|message_model|>", "<|message_tool|>", "<|content_text|>",
        "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|content_model_end_sampling|>",
    ),
    "harmony": (
        "<|start|>", "<|return|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>",
    ),
    "phi": ("<|user|>", "<|end|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|/tool_call|>"),
    "plamo": ("<|plamo:op|>", "<|plamo:tag|>", "<|plamo:msg|>", "<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
    "dots": ("<|response|>", "<|endofresponse|>", "<dots_function_call>", "</dots_function_call>"),
    "k2_horizon": (
        "<|ifm|im_start|>", "<|ifm|im_end|>", "<ifm|think>", "</ifm|think_fast>", "<ifm|tool_calls>",
        "</ifm|tool_calls>", "<ifm|tool_call>", "<ifm|arg_key>", "</ifm|arg_type>", "</ifm|arg_value>",
    ),
    "granite": (
        "<|start_of_role|>", "<|end_of_text|>", "<|end_of_role|>", "<|tool_call|>", "<fim_prefix>",
        "<reponame>", "<gh_stars>", "<jupyter_code>",
    ),
    "lfm2": ("<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_response_end|>", "<|startoftext|>"),
    "cohere": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<PAD>", "<CLS>"),
    "nemotron": (
        "<SPECIAL_10>", "<SPECIAL_12>", "<extra_id_0>", "<extra_id_1>", "<TOOLCALL>", "</TOOLCALL>",
        "<TOOL_RESPONSE>", "</TOOL_RESPONSE>",
    ),
    "jamba": ("<|bom|>", "<|eom|>", "<tool_calls>", "</tool_calls>", "<|startoftext|>", "<|pad|>"),
    "apriel": (
        "<|begin_user|>", "<|end|>", "<|begin_assistant|>", "<|begin_tool_result|>", "<tool_calls>",
        "</tool_calls>", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]",
    ),
    "longcat": (
        "<longcat_user>", "</longcat_s>", "<longcat_assistant>", "<longcat_s>", "<longcat_tool_call>",
        "</longcat_tool_call>", "<longcat_think>", "</longcat_think>", "<longcat_system>",
    ),
    "internlm": ("<|im_start|>", "<|im_end|>", "<|action_start|>", "<|action_end|>", "<|plugin|>"),
    "gigachat": ("<|role_sep|>", "<|message_sep|>", "<|function_call|>", "｜GCML｜", "<s>", "</s>"),
    "apertus": (
        "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|tools_prefix|>",
        "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>",
    ),
    "minimax_m1": (
        "<beginning_of_sentence>", "<end_of_sentence>", "<begin_of_document>", "<tool_calls>",
        "</tool_calls>",
    ),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"),
}  # fmt: skip
"""By family: what opens a turn, what ends one, and more added tokens of its `tokenizer_config.json`."""

TEMPLATE = """\
{%% if tools %%}%(start)ssystem
{%% for tool in tools %%}{{ tool | tojson }}{{ tool.function.description }}{%% endfor %%}%(end)s
{%% endif %%}
{%%- for m in messages %%}%(start)s{{ m.role }} {{ m.name }} {{ m.tool_call_id }}
{%% if m.content is string %%}{{ m.content | trim }}{%% else %%}
{%%- for part in m.content %%}{{ (part.text or part.content) | trim }}{%% endfor %%}{%% endif %%}%(end)s
{%% endfor %%}{%% if add_generation_prompt %%}%(start)sassistant
{%% endif %%}"""


@functools.cache
def marker_tokenizer(family):
    """Return a tokenizer with the markers of a family, whose template writes names and ids as well."""
    start, end, *others = MARKER_SETS[family]
    template = TEMPLATE % {"start": start, "end": end}
    return chat_tokenizer(template, eos=end, control=(start,), added=tuple(others))


def control_ids(tokenizer, ids):
    """Return those of some ids that are added tokens."""
    added = tokenizer.added_tokens_decoder  # made anew at each access
    return [token for token in ids if token in added]
