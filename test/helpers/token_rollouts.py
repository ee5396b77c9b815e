"""Rollouts in tokens mode with a scripted model, which samples the ids of given texts."""

import torch
from helpers.chat_envs import begin
from tensordict import LazyStackedTensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies.common import LogProbs, Tokens

from torchrl_agentic import ToolCompose
from torchrl_agentic.rollout.policies import TokensToHistory
from torchrl_agentic.transforms import EndTrajectory, TurnTokenizer
from torchrl_agentic.transforms.turn_tokenizer import read_ledger


class Says:
    """A sampled answer: a text, and the token that ends it, or None if it was cut off."""

    def __init__(self, text, end="eos"):
        self.text, self.end = text, end


def sampled_ids(tokenizer, said):
    """Return the ids of a text and of the token that ends it."""
    ids = tokenizer(said.text, add_special_tokens=False)["input_ids"] if said.text else []
    end = tokenizer.eos_token if said.end == "eos" else said.end
    return torch.tensor(ids + ([tokenizer.convert_tokens_to_ids(end)] if end else []), dtype=torch.int64)


def sample(td, tokenizer, said, stops=()):
    """Write the keys of a TorchRL wrapper in tokens mode, then the history."""
    td = td if isinstance(td, LazyStackedTensorDict) else td.to_lazystack(0)
    prompts = [row["tokens", "prompt"] for row in td.unbind(0)]
    answers = [sampled_ids(tokenizer, Says(one) if isinstance(one, str) else one) for one in said]
    out = LazyStackedTensorDict(*[row.empty() for row in td.unbind(0)])
    tokens, log_probs = Tokens._from_tensordict(out.copy()), LogProbs._from_tensordict(out.copy())
    tokens.prompt, tokens.response = prompts, answers
    tokens.full = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    log_probs.response = [-torch.arange(1.0, len(ids) + 1) / 100 for ids in answers]
    td.set("tokens", tokens)
    td.set("log_probs", log_probs)
    return TokensToHistory(tokenizer, [tokenizer.convert_tokens_to_ids(stop) for stop in stops])(td)


def token_env(
    tokenizer, tools, rows=1, *, max_turns=None, when_no_calls=False, parser="hermes", media=False, **options
):
    """Create an environment whose last transform is a `TurnTokenizer`."""
    compose = ToolCompose(tools, parser, media=media, tool_role=options.get("tool_role", "tool"))
    between = []
    if max_turns or when_no_calls:
        between = [EndTrajectory(max_turns=max_turns, when_no_calls=when_no_calls)]
    turns = TurnTokenizer(tokenizer, tools=compose.tools, **options)
    return TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(compose, *between, turns))


class Rollout:
    """A rollout that advances turn by turn."""

    def __init__(self, env, tokenizer, stops=(), td=None):
        self.env, self.tokenizer, self.stops = env, tokenizer, stops
        self.td, self.next = begin(env) if td is None else td, None

    def turn(self, *said):
        """Make one turn in each row; assert that the next prompt of a row begins with all its ids so far."""
        td = sample(self.td, self.tokenizer, said, self.stops)
        step = self.env.step(td)
        for before, after in zip(td.unbind(0), step["next"].unbind(0), strict=True):
            full, prompt = before["tokens", "full"], after["tokens", "prompt"]
            assert before["done"].any() or torch.equal(prompt[: len(full)], full)
            assert after["masks", "all_attention_mask"].shape == prompt.shape
        self.next, self.td = step["next"], self.env.step_mdp(step)
        return self

    def ledger(self, row=0):
        return read_ledger(self.td.unbind(0)[row])

    def text(self, row=0):
        return self.tokenizer.decode(self.td.unbind(0)[row]["tokens", "prompt"])

    def drift(self):
        return self.next["agentic", "token_drift"].flatten().tolist()
