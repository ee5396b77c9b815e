"""Prompts that the tiny model knows, and log-probabilities by transformers, for tests of `VLLMEngine`."""

import copy

import torch

from torchrl_agentic.parsers.base import specs_of
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions
from torchrl_agentic.tools import PythonTool

MODEL, TOKENIZER = load_tiny()
CONTEXT = 1024
ARGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8, "max_model_len": CONTEXT}

ROUNDING = 1e-2
"""Bound on a difference of log-probabilities that rounding explains, under `other_weights`.

Seen: 1.5e-3 at most in 50,000 tokens, all under those weights, which amplify it. Wrong weights: 2.4 or more
in each answer.
"""


def prompt_of(text):
    """Return the ids of a question, with the tool in the prompt."""
    return TOKENIZER.apply_chat_template(
        [{"role": "user", "content": text}],
        tools=list(specs_of([PythonTool()])),
        add_generation_prompt=True,
        return_dict=False,
    )


PROMPTS = [prompt_of(question["query"]) for question in tiny_questions(8)]


def own_log_probs(model, prompt, ids, *, temperature=1.0, never=()):
    """Return the log-probabilities of an answer as transformers computes them, without some ids."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    logits[:, list(never)] = -torch.inf
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def gap(model, prompt, found, **options):
    """Return the largest difference between log-probabilities of an engine and of transformers."""
    own = own_log_probs(model, prompt, found.ids, **options)
    return (own - torch.tensor(found.log_probs)).abs().max().item()


def other_weights():
    """Return the model with other weights, under which answers and log-probabilities differ."""
    torch.manual_seed(0)
    other = copy.deepcopy(MODEL)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    return other
