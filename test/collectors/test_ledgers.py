"""A collector and an environment write the same tokens for the same samples, whatever updates abort."""

import asyncio
import math
import random
import re

import pytest
import torch
from helpers.chat_envs import echo
from helpers.model_families import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import (
    PARSERS,
    EndTrajectory,
    ParsedCall,
    StopTool,
    ToolCompose,
    TurnTokenizer,
    get_parser,
)
from torchrl_agentic.collectors import Task
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.rollout.answer_rows import answered, prompt_rows, write_answers
from torchrl_agentic.rollout.policies import TokensToHistory
from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.turn_tokenizer import read_ledger

LEFT_OUT = {"fence", "tags", "anthropic", "openai"}
"""Formats that cannot call `echo`, and formats of API messages, which chat templates do not take."""
MAX_TURNS = 4
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say <|im_end|> twice."}]


def log_prob(turn, place):
    """Return a number that float32 holds exactly."""
    return -(turn * 64 + place % 64 + 1) / 128


class Interrupted(Engine):
    """An engine that knows its answers, and aborts each request at drawn places, as updates do."""

    max_concurrent = 4

    def __init__(self, answers, cuts, stops):
        self.answers, self.cuts, self.stops = answers, cuts, stops
        self.version = self.turn = self.done = 0

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        await asyncio.sleep(0)
        rest = self.answers[self.turn][self.done :]
        size, version = self.cuts.random.randint(0, len(rest) + 2), self.version
        if self.cuts.random.random() < self.cuts.share and size < min(len(rest), max_tokens):
            self.version += 1
            finish = "aborted"
        else:
            size = min(len(rest), max_tokens)
            finish = "stop" if size and rest[size - 1] in self.stops else "length"
        piece = list(rest[:size])
        values = [log_prob(self.turn, self.done + place) for place in range(size)]
        self.done += size
        if on_ids is not None:
            on_ids(piece)
        if finish != "aborted":
            self.turn, self.done = self.turn + 1, 0
        return Sampled(piece, values, finish, version)

    async def update(self, weights):
        self.version += 1
        return self.version

    async def close(self):
        pass


class Cuts:
    """Where answers are aborted: in a share of the requests, at random places."""

    def __init__(self, seed, share):
        self.random, self.share = random.Random(seed), share


def answer_ids(tokenizer, text, end):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids + ([] if end is None else [tokenizer.convert_tokens_to_ids(end)])


def lock_step(transforms, tokenizer, answers, stops):
    """Roll a row out in an environment, step by step; return its ledger and messages."""
    env = TransformedEnv(ChatEnv(batch_size=(1,)), transforms)
    query = border.as_history([QUESTION])
    td = env.reset(TensorDict({"query": query}, batch_size=[1]))
    read = TokensToHistory(tokenizer, stops)
    for turn, ids in enumerate(answers):
        (row,) = prompt_rows(td)
        left = td.get(("agentic", "tokens_left"), None)
        ids = ids if left is None else ids[: max(0, int(left))]
        values = [log_prob(turn, place) for place in range(len(ids))]
        step = env.step(read(write_answers(td, [answered(row, ids, values)])))
        if step["next", "done"].any():
            (conversation,) = border.prompts(step["next"])
            reason = int(step["next", "agentic", "ended_by"])
            found = (
                read_ledger(step["next"].unbind(0)[0]),
                [one.read() for one in conversation.messages],
                reason,
            )
            env.close()
            return found
        td = env.step_mdp(step)
    raise AssertionError("the trajectory has not ended")


@st.composite
def cases(draw):
    family = draw(st.sampled_from(sorted(FAMILIES)))
    formats = ["mistral"] if family == "mistral" else sorted(set(PARSERS) - LEFT_OUT)
    parser = get_parser(draw(st.sampled_from(formats)))
    ends = [FAMILIES[family].eos, *FAMILIES[family].stops]
    texts = st.text(st.sampled_from("ab <|>é日\n\"'{}"), max_size=12)
    turns = []
    for turn in range(MAX_TURNS):
        calls = [
            ParsedCall("echo", {"text": draw(texts)}, f"abcdefg{turn}{index}")
            for index in range(draw(st.integers(0, 2)))
        ]
        if draw(st.integers(0, 9)) == 0:
            calls.append(ParsedCall("stop", {}, f"abcdefg{turn}s"))
        text = draw(texts) + "".join(parser.render_call(call) for call in calls)
        turns.append((text, draw(st.sampled_from([*ends, None, ends[0], ends[0]]))))
    bound = draw(st.sampled_from([None, None, 700, 2000]))
    cuts = Cuts(draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.5, 0.9])))
    return family, parser.name, turns, bound, cuts, draw(st.booleans())


def environment(tokenizer, parser, stops, bound):
    compose = ToolCompose([echo, StopTool()], parser, tokenizer=tokenizer)
    return Compose(
        compose,
        EndTrajectory(max_turns=MAX_TURNS, when_no_calls=True),
        TurnTokenizer(
            tokenizer,
            tools=compose.tools,
            stop_token_ids=stops,
            max_trajectory_tokens=bound,
            tokenization_sanity_check_mode="disable",
        ),
    )


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_a_collector_writes_the_ledger_of_the_environment(case):
    family, parser, turns, bound, cuts, speculate = case
    tokenizer = FAMILIES[family].tokenizer()
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in FAMILIES[family].stops]
    answers = [answer_ids(tokenizer, *turn) for turn in turns]

    async def collect():
        transforms = environment(tokenizer, parser, stops, bound)
        spec = TrajectorySpec.of(list(leaves(transforms)), None, max_turns=MAX_TURNS)
        stop_ids = spec.encoder.stop_token_ids
        engine = Interrupted(answers, cuts, stop_ids)
        requests = Requests(engine, stop_ids=stop_ids)
        run = TrajectoryRun(
            spec, requests, Task("t", QUESTION), name="t", max_new_tokens=100_000, speculate=speculate
        )
        return await run.run(), engine

    transforms = environment(tokenizer, parser, stops, bound)
    try:
        ledger, messages, reason = lock_step(transforms, tokenizer, answers, stops)
    except ValueError as error:  # the template cannot render this format
        with pytest.raises(ValueError, match=re.escape(str(error))):
            asyncio.run(collect())
        return
    trajectory, engine = asyncio.run(collect())
    found = trajectory.ledger
    assert list(found.ids) == list(ledger.ids)
    assert list(found.sources) == list(ledger.sources)
    assert list(found.mask) == list(ledger.mask)
    values = torch.tensor(found.log_probs, dtype=torch.float32).tolist()
    pairs = zip(values, ledger.log_probs, strict=True)
    assert all(mine == theirs or (math.isnan(mine) and math.isnan(theirs)) for mine, theirs in pairs)
    assert list(trajectory.messages) == messages
    assert trajectory.reason == REASONS[reason]
    versions = [version for version, mine in zip(found.versions, found.mask, strict=True) if mine]
    assert versions == sorted(versions)
    assert all(0 <= version <= engine.version for version in versions)
    assert all(version == -1 for version, mine in zip(found.versions, found.mask, strict=True) if not mine)
