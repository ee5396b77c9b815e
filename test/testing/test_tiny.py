"""The tiny model is small, is a plain folder, reads and writes as large ones do, and solves its problems."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_tiny_lessons import NO_TOOL, broken_code, calls
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing import TINY, load_tiny, tiny_questions
from torchrl_agentic.testing.conversations import converse
from torchrl_agentic.testing.problems import TEMPLATES, problems, value_of
from torchrl_agentic.tools import PythonTool
from torchrl_agentic.transforms import AgentHistory
from torchrl_agentic.transforms import history as border

TOOL = {
    "type": "function",
    "function": {"name": "python", "description": "é", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "2 + 3"}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two sums?"},
    {"role": "assistant", "content": "Both:", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "5"},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "The answer is 5 and 5."},
]
SHOWN = """<|im_start|>system
Be brief.

# Tools

<tools>
{"type": "function", "function": {"name": "python", "description": "é", "parameters": {"type": "object"}}}
</tools>

To call a tool, write:
<tool_call>
{"name": <name>, "arguments": <JSON object>}
</tool_call><|im_end|>
<|im_start|>user
Two sums?<|im_end|>
<|im_start|>assistant
Both:
<tool_call>
{"name": "python", "arguments": {"code": "2 + 3"}}
</tool_call>
<tool_call>
{"name": "python", "arguments": {"code": "2 + 3"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response>
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
The answer is 5 and 5.<|im_end|>
"""


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny[1]


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 5_000_000


def test_the_padding_is_not_the_end_of_a_message(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_each_digit_is_a_token(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12000")] == list("12000")
    assert not [piece for piece in tokenizer.get_vocab() if len(piece) > 1 and any(map(str.isdigit, piece))]


@given(text=st.text())
@settings(deadline=None)
def test_any_text_reads_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_template_matches_those_of_large_models(tokenizer):
    assert tokenizer.apply_chat_template(CHAT, tools=[TOOL], tokenize=False) == SHOWN


def test_calls_in_the_content_look_as_calls_in_their_field(tokenizer):
    """An environment stores the model's messages as text; rendered again, they must look the same."""
    written = [*CHAT[:2], {"role": "assistant", "content": "Both:\n" + calls(["2 + 3", "2 + 3"])}, *CHAT[3:]]
    assert tokenizer.apply_chat_template(written, tools=[TOOL], tokenize=False) == SHOWN


def test_assistant_mask_covers_exactly_its_messages(tokenizer):
    shown = tokenizer.apply_chat_template(
        CHAT, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True
    )
    said = [i for i, mine in zip(shown["input_ids"], shown["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(said) == "Both:\n" + calls(["2 + 3", "2 + 3"]) + "The answer is 5 and 5."


def test_torchrl_takes_the_folders_template(tokenizer):
    """It does so only where it finds `{% generation %}`, letter by letter; else it uses one of its own."""
    plain = [*CHAT[:2], {"role": "assistant", "content": "5"}, {"role": "tool", "content": "6"}]
    history = AgentHistory.of([border.Conversation.of(plain)])[0]
    shown = history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=True)
    assert shown == tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert "<tool_response>" in shown


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:]], ids=["system", "no system"])
def test_prompt_continues_the_conversation(tokenizer, chat, tools):
    """Without this, tokens that were sampled could not stay as they are from turn to turn."""
    for length in (1, len(chat) - 1):
        before = tokenizer.apply_chat_template(
            chat[:length], tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert (
            tokenizer.apply_chat_template(chat, tools=tools, tokenize=False).startswith(before)
            or chat[length]["role"] != "assistant"
        )


def test_it_is_a_plain_folder(tiny):
    """Transformers uses Qwen2's own tokenizer class for any folder; the ids are the same."""
    model, tokenizer = tiny
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    assert plain.dtype == torch.bfloat16
    assert {name: weight.shape for name, weight in plain.named_parameters()} == {
        name: weight.shape for name, weight in model.named_parameters()
    }
    automatic = AutoTokenizer.from_pretrained(TINY)
    assert automatic.encode(SHOWN) == tokenizer.encode(SHOWN)
    assert automatic.chat_template == tokenizer.chat_template
    assert (automatic.eos_token_id, automatic.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )


def test_the_splits_have_no_problem_in_common():
    """Numbers alone decide, for a template: names and things do not make a problem new."""

    def asked(split):
        made = itertools.islice(problems(0, split), 2000)
        return {(problem.kind, problem.turns) for problem in made if problem.kind == "pair"}

    assert not asked("train") & asked("test")


def test_questions_are_the_same_for_a_seed():
    assert tiny_questions(5, seed=3) == tiny_questions(9, seed=3)[:5] != tiny_questions(5, seed=4)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_results_are_what_the_codes_give(kind):
    made = [problem for problem in itertools.islice(problems(0, "test"), 200) if problem.kind == kind]
    for problem in made:
        values = tuple(tuple(str(value_of(code)) for code in codes) for codes in problem.turns)
        assert values == problem.results


def test_held_out_problems_are_solved_with_the_real_tool(tiny):
    questions = tiny_questions(32)
    chats = converse(*tiny, [PythonTool()], [question["query"] for question in questions])
    said = [chat[-1].content for chat in chats]
    right = [f"The answer is {question['answer']}." for question in questions]
    assert sum(a == b for a, b in zip(said, right, strict=True)) >= 0.9 * 32
    calling = [message for chat in chats for message in chat if "<tool_call>" in message.content]
    parsed = [
        get_parser("hermes").parse(message.content) for message in calling if message.role == "assistant"
    ]
    assert all(call.tool == "python" and not call.error for reply in parsed for call in reply.calls)


def test_model_calls_no_tools_if_none_are_offered(tiny):
    chats = converse(*tiny, [], [question["query"] for question in tiny_questions(8)])
    assert [chat[-1].content for chat in chats] == [NO_TOOL] * 8


def test_a_call_that_failed_is_made_again(tiny):
    made = list(itertools.islice(problems(0, "test"), 16))
    rng = random.Random(0)
    first = [calls([broken_code(problem.turns[0][0], rng)]) for problem in made]
    chats = converse(*tiny, [PythonTool()], [problem.query for problem in made], first=first)
    right = [f"The answer is {problem.answer}." for problem in made]
    assert sum(chat[-1].content == text for chat, text in zip(chats, right, strict=True)) >= 12
