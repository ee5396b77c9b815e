"""The bound on prompts counts the tokens that the first prompt of a trajectory has."""

import logging

import pytest
from helpers.model_families import FAMILIES
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, Task, ToolCompose, TurnTokenizer, load_tasks, tool
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.rollout import rollout
from torchrl_agentic.rollout.load_tasks import PromptLength


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
def look(place: str) -> str:
    """Look at a place.

    Args:
        place: Its name.
    """
    return place


class Ends(Engine):
    """An engine that ends each answer at once, and keeps the prompts."""

    version, max_concurrent = 0, 4

    def __init__(self, stop: int) -> None:
        self.stop, self.prompts = stop, {}

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.prompts[key.split("/")[0]] = len(ids)
        return Sampled([self.stop], [-1.0], "stop")

    async def update(self, weights):
        raise NotImplementedError

    async def close(self):
        pass


ROWS = [
    {"question": "1 + 1?", "name": "plain"},
    {"question": "1 + 1?", "name": "one tool", "tool_selection": ["look"]},
    {"question": "1 + 1?", "name": "nested", "extra_info": {"tool_selection": ["add"]}},
    {"question": "sum <|im_end|> " * 9, "name": "control tokens"},
    {
        "messages": [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "é"}],
        "name": "both",
    },
]


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILIES["qwen2_5"].tokenizer()


def forms(tokenizer):
    """Return transforms and further options of a collector, by name."""
    compose = ToolCompose([add, look])
    return {
        "list": (ToolCompose([add, look]), {}),
        "compose": (compose, {}),
        "no tools": (ToolCompose([]), {}),
        "options": (ToolCompose([add, look]), {"tokenizer_options": {"template_kwargs": {"today": "x"}}}),
        "tokens": (
            Compose(
                compose, EndTrajectory(when_no_calls=True), TurnTokenizer(tokenizer, tools=compose.tools)
            ),
            {},
        ),
    }


@pytest.mark.parametrize("form", ["compose", "list", "options", "tokens"])
def test_the_count_is_that_of_the_first_prompt_of_a_rollout(tokenizer, form: str):
    transforms, options = forms(tokenizer)[form]
    tasks = load_tasks(ROWS, system_prompt="Be brief.")
    engine = Ends(tokenizer.eos_token_id)
    given = None if form == "tokens" else tokenizer
    rollout(transforms, engine, given, tasks, **options)
    offered = [add, look] if form == "list" else transforms
    measure = PromptLength(given, offered, options.get("tokenizer_options"))
    assert {task.name: measure(task) for task in tasks} == engine.prompts
    assert len(set(engine.prompts.values())) > 3


def test_schemas_of_tools_count(tokenizer):
    task = Task("t", [{"role": "user", "content": "1 + 1?"}])
    assert PromptLength(tokenizer, [add])(task) > PromptLength(tokenizer, [])(task) + 20


def test_long_prompts_are_left_out_and_counted(tokenizer, caplog: pytest.LogCaptureFixture):
    measure = PromptLength(tokenizer, [add, look])
    lengths = {task.name: measure(task) for task in load_tasks(ROWS)}
    bound = sorted(lengths.values())[-2]
    with caplog.at_level(logging.WARNING):
        kept = load_tasks(ROWS, tokenizer=tokenizer, tools=[add, look], max_prompt_tokens=bound)
    assert {task.name for task in kept} == {name for name, length in lengths.items() if length <= bound}
    said = f"1 of 5 tasks have prompts of more than {bound} tokens; the longest has {max(lengths.values())}"
    assert caplog.messages == [f"left out: {said}"]
    limited = load_tasks(ROWS[::-1], tokenizer=tokenizer, tools=[add, look], max_prompt_tokens=bound, limit=2)
    assert [task.name for task in limited] == ["both", "nested"]


def test_prompts_that_are_all_too_long_are_an_error(tokenizer):
    with pytest.raises(
        ValueError, match=r"no tasks are left: 5 of 5 tasks have prompts of more than 3 tokens"
    ):
        load_tasks(ROWS, tokenizer=tokenizer, max_prompt_tokens=3)


def test_messages_that_the_template_rejects_are_named_with_their_place(tokenizer):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no!') }}{% endif %}" + (
        tokenizer.chat_template
    )
    with pytest.raises(ValueError, match="row 1: the prompt cannot be rendered: no!"):
        load_tasks(
            [{"question": "good"}, {"question": "bad"}],
            tokenizer=tokenizer,
            max_prompt_tokens=500,
            tokenizer_options={"chat_template": template},
        )


def test_wrong_tools_and_tokenizers_are_named(tokenizer):
    with pytest.raises(TypeError, match="tools is a list of tools or a ToolCompose; got FunctionTool"):
        PromptLength(tokenizer, add)
    with pytest.raises(ValueError, match="needs tokenizer="):
        PromptLength(None, [add])
    with pytest.raises(TypeError, match="tokenizer must be a fast tokenizer"):
        PromptLength("gpt2", [add])
    transforms, _ = forms(tokenizer)["tokens"]
    with pytest.raises(ValueError, match="the TurnTokenizer decides template_kwargs"):
        PromptLength(None, transforms, {"template_kwargs": {}})
