"""Batches whose rows differ in length, and a mark that names what a test of tensordict relies on."""

import functools
import importlib

import tensordict
import torch
from helpers.chat_envs import begin, call, chat_env, dataset_env
from helpers.limit import limit
from helpers.token_rollouts import Says, sampled_ids

from torchrl_agentic import EndTrajectory, ToolCompose, TurnTokenizer
from torchrl_agentic.rollout.answer_rows import prompt_rows, write_answers
from torchrl_agentic.rollout.policies import FullSequence, TokensToHistory
from torchrl_agentic.testing import ScriptedPolicy, load_tiny
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.token_rows import TokenRow

MODULES = {
    "ValueStack": "value_stack",
    "Conversation": "history",
    "TokenRows": "token_rows",
    "AgentHistory": "history",
}
CALL = call("noop", a=1)


async def noop(a: int = 0) -> str:
    """Do nothing."""
    return "ok"


def owner(name):
    """Return a class of the border by its name."""
    return getattr(importlib.import_module(f"torchrl_agentic.transforms.{MODULES[name]}"), name)


def relies_on(*methods):
    """Add a note to the failures of a test: the methods by which it holds, such as "ValueStack._clone"."""
    for name in methods:
        kind, _, method = name.partition(".")
        assert method in vars(owner(kind)), f"{name} does not exist"

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                return test(*args, **kwargs)
            except Exception as error:
                error.add_note(
                    f"This holds by {', '.join(methods)}; tensordict is {tensordict.__version__}. "
                    "Compare the methods that they replace with those of the version before."
                )
                raise

        return run

    return decorate


def history(*rows):
    """Return a history of user messages: history(["a"], ["b", "c"]) has two rows."""
    return border.as_history([[{"role": "user", "content": text} for text in row] for row in rows])


def texts(found, batch_dims=1):
    """Return the contents of a history, a list per row of the flattened batch."""
    return [[m.read().content for m in row.messages] for row in border.conversations(found, batch_dims)]


def prompts(td):
    """Return the contents of ("history", "prompt"), a list per row of the flattened batch."""
    return [[m.read().content for m in row.messages] for row in border.prompts(td)]


def uneven(chat):
    """Answer as a policy does whose rows grow apart: rows of even questions call a tool in each turn."""
    first = next(message.content for message in chat if message.role == "user")
    return CALL if int(str(first)[1:]) % 2 == 0 else "hm"


def uneven_env(shape=(2,), *transforms, **options):
    """Create an environment without a data set, whose tool does nothing."""
    return chat_env(shape, ToolCompose([noop]), *transforms, **options)


def uneven_dataset_env(batch=1, turns=2):
    """Create an environment that resets itself; its trajectories end after some turns."""
    return dataset_env(batch, ToolCompose([noop]), EndTrajectory(max_turns=turns))


def ragged(turns=2, shape=(2,)):
    """Return the root of a step after some turns: each even row has 1 + 2 messages per turn, others 1 + 1."""
    env = uneven_env(shape)
    td, policy = begin(env), ScriptedPolicy(uneven)
    for _ in range(turns):
        td = env.step_mdp(env.step(policy(td)))
    return td


@functools.cache
def tokenizer():
    return load_tiny()[1]


def sampled(td, texts, *, masks=False):
    """Answer in tokens mode, as `agent_policy` does: the batch stays dense. With masks, of all tokens."""
    prompts = prompt_rows(td)
    answers = []
    for row, text in zip(prompts, texts, strict=True):
        ids = sampled_ids(tokenizer(), Says(text))
        full = torch.cat([row.tensors["prompt"], ids])
        tokens = row.merged(TokenRow({"response": ids, "full": full}))
        answer = {"tokens": tokens, "log_probs": TokenRow({"response": torch.zeros(len(ids))})}
        if masks:
            answer["masks"] = TokenRow({"all_attention_mask": torch.ones(len(full), dtype=torch.bool)})
        answers.append(answer)
    return FullSequence()(TokensToHistory(tokenizer())(write_answers(td, answers)))


def token_transforms(*between):
    """Return transforms of an environment with tokens, whose tool does nothing."""
    compose = ToolCompose([noop])
    tokens = TurnTokenizer(tokenizer(), tools=compose.tools, tokenization_sanity_check_mode="disable")
    return [compose, *between, tokens]


def token_env(rows=2, *between):
    """Create an environment with a `TurnTokenizer`."""
    return chat_env((rows,), *token_transforms(*between))


def token_policy(td):
    """Answer in tokens mode; rows of even number call a tool in each turn."""
    return sampled(td, [CALL if row % 2 == 0 else "hm" for row in range(td.numel())])


def token_step(turns=2, rows=2):
    """Return a whole step with tokens after some turns; rows differ in their numbers of tokens."""
    env = token_env(rows)
    td = begin(env)
    for _ in range(turns):
        step = env.step(token_policy(td))
        td = env.step_mdp(step)
    return step


def token_lengths(td):
    """Return the number of tokens of the prompt of each row."""
    return [len(row["tokens", "prompt"]) for row in td.unbind(0)]


def read_in_another_process(there, back):
    td = there.get(timeout=limit(60))
    back.put([prompts(td), type(td["history"].prompt).__name__, token_lengths(td)])
