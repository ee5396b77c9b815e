"""Engines end an answer with every end token of the model, and collectors know which these are."""

import copy

import pytest
import torch
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, PythonTool, ToolCompose
from torchrl_agentic.engines import EnginePool, TransformersEngine
from torchrl_agentic.rollout import LockStep, agent_policy, rollout
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.tokens.writer import stop_ids
from torchrl_agentic.transforms import TurnTokenizer

MODEL, TOKENIZER = load_tiny()
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
OTHER = TOKENIZER.convert_tokens_to_ids("!")


def model_that_says(token, ends):
    """A model that samples one token only, with these ids as `generation_config.eos_token_id`."""
    model = copy.deepcopy(MODEL).eval()
    model.generation_config.eos_token_id = ends
    head = model.get_output_embeddings()
    size = head.weight.shape[0]

    def forced(hidden):
        logits = torch.full((*hidden.shape[:-1], size), -20.0)
        logits[..., token] = 20.0
        return logits

    head.forward = forced
    return model


ENGINES = {
    "transformers": lambda model: TransformersEngine(model, TOKENIZER, temperature=0),
    "pool": lambda model: EnginePool([TransformersEngine(model, TOKENIZER, temperature=0)]),
    "policy": lambda model: LockStep(
        agent_policy(model, TOKENIZER, max_new_tokens=12, temperature=0), TOKENIZER
    ),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("ends", [[EOS, OTHER], [OTHER], OTHER, [EOS, OTHER, PAD]])
async def test_an_answer_ends_with_every_end_id_of_the_model(name, ends):
    engine = ENGINES[name](model_that_says(OTHER, ends))
    found = await engine.sample(TOKENIZER.encode("hi"), max_tokens=12, key="k")
    assert (list(found.ids), found.finish) == ([OTHER], "stop")
    assert engine.stop_token_ids == (EOS, OTHER)
    await engine.close()


async def test_an_answer_goes_on_behind_a_token_that_is_no_end_id():
    engine = ENGINES["transformers"](model_that_says(OTHER, [EOS]))
    found = await engine.sample(TOKENIZER.encode("hi"), max_tokens=12, key="k")
    assert (len(found.ids), found.finish) == (12, "length")
    await engine.close()


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_a_trajectory_ends_with_the_end_ids_of_its_engine(name, has_tokenizer):
    """Whether the environment has a TurnTokenizer, which knows only the tokenizer, or not."""
    compose = ToolCompose([PythonTool()])
    writers = [TurnTokenizer(TOKENIZER, tools=compose.tools)] if has_tokenizer else []
    engine = ENGINES[name](model_that_says(OTHER, [EOS, OTHER]))
    env = Compose(compose, EndTrajectory(max_turns=3, when_no_calls=True), *writers)
    (found,) = rollout(env, engine, TOKENIZER, [{"query": "q"}], max_new_tokens=12)
    assert (found.reason, found.turns[0].message.is_complete) == ("no_calls", True)
    assert found.turns[0].message.text == ""


def test_the_pad_token_of_a_generation_config_is_no_stop_id():
    """Such as <|endoftext|> of Qwen2.5, which is never sampled."""
    assert stop_ids(TOKENIZER, generation_config={"eos_token_id": [EOS, PAD]}) == (EOS,)
    assert stop_ids(TOKENIZER, generation_config={"eos_token_id": None}) == (EOS,)
