"""Each sampled token of the trajectories of a group counts in exactly one training row."""

import math
from collections import Counter

import pytest
from helpers.chat_envs import call
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs import Compose

from torchrl_agentic import AgentCollector, EndTrajectory, Task, ToolCompose, Trajectory, TurnTokenizer, tool
from torchrl_agentic.collectors import Branching, Fork
from torchrl_agentic.collectors.batching import collector_batch
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.training_rows import Contexts, training_rows

TOKENIZER = load_tiny()[1]
TASK = Task("t", [{"role": "user", "content": "q"}])
pieces = st.lists(st.integers(5, 90), min_size=1, max_size=4)


class Likely:
    """Gives each sampled token a log-probability of its own, by which it is known again."""

    def __init__(self):
        self.given = []

    def of(self, count):
        new = [-0.001 * (len(self.given) + one + 1) for one in range(count)]
        self.given += new
        return new


def counted(batch):
    """Return the log-probabilities that a loss counts in a batch."""
    found = []
    for row in batch.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        assert mask.any()  # no row without a counted token
        assert row["log_probs", "full"][~mask].isnan().all()
        assert (row["collector", "policy_version"][~mask] == -1).all()
        assert ((row["collector", "turn"] >= 0) == mask).all()
        found += row["log_probs", "full"][mask].double().tolist()
    return Counter(round(value, 6) for value in found)


def turns(draw, ledger, likely, count, version=0):
    for _ in range(count):
        ids = draw(pieces)
        ledger.add_sampled(ids, likely.of(len(ids)), version=version)
        ledger.add_prompt(draw(pieces))


@st.composite
def groups(draw):
    """Return a group with trajectories of all kinds: plain, in trees, and with prompts rendered anew."""
    likely, found = Likely(), []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["plain", "tree", "anew"]))
        root = TokenLedger()
        root.add_prompt(draw(pieces))
        reward = lambda: draw(st.sampled_from([0.0, 1.0, 2.5]))  # noqa: E731
        if kind == "plain":
            turns(draw, root, likely, draw(st.integers(1, 3)))
            found.append(Trajectory(f"{index}", TASK, index, (), ledger=root, reward=reward()))
        elif kind == "tree":
            turns(draw, root, likely, 1)
            for branch in range(2):
                ledger = root.copy()
                turns(draw, ledger, likely, draw(st.integers(1, 2)))
                forks = (Fork(1, len(root), branch),)
                found.append(
                    Trajectory(
                        f"{index}.{branch}", TASK, index, (), ledger=ledger, reward=reward(), forks=forks
                    )
                )
        else:
            contexts = Contexts()
            prompt = draw(pieces)
            for version in range(draw(st.integers(1, 4))):
                ledger = TokenLedger()
                ledger.add_prompt(prompt)
                ids = draw(pieces)
                ledger.add_sampled(ids, likely.of(len(ids)), version=version)
                contexts.note(ledger, len(prompt))
                goes_on = draw(st.booleans())
                prompt = [*ledger.ids, *draw(pieces)] if goes_on else [99, *draw(pieces)]
            ledgers = tuple(contexts.ledgers)
            found.append(
                Trajectory(f"{index}", TASK, index, (), ledger=ledger, contexts=ledgers, reward=reward())
            )
    return found, likely


@given(groups())
def test_each_sampled_token_counts_once_over_all_kinds_of_rows(group):
    trajectories, likely = group
    batch = collector_batch([(0, trajectories)], has_trees=True)
    assert counted(batch) == Counter(round(value, 6) for value in likely.given)
    rows = training_rows(trajectories)
    ends = [row for row in rows if row.is_end]
    assert [row.trajectory.name for row in ends] == [one.name for one in trajectories]
    assert all(row.advantage == end.advantage for row in rows for end in ends if row.path == end.path)


def test_a_prompt_that_continues_the_tokens_stays_in_its_context():
    contexts = Contexts()
    ledger = TokenLedger()
    ledger.add_prompt([1, 2])
    ledger.add_sampled([3], [-0.5], version=0)
    contexts.note(ledger, 2)
    longer = TokenLedger()
    longer.add_prompt([1, 2, 3, 4])
    longer.add_sampled([5], [-0.25], version=1)
    contexts.note(longer, 4)
    (one,) = contexts.ledgers
    assert list(one.ids) == [1, 2, 3, 4, 5]
    assert list(one.mask) == [False, False, True, False, True]
    other = TokenLedger()
    other.add_prompt([1, 9])
    other.add_sampled([5], [-0.25], version=1)
    contexts.note(other, 2)
    assert [len(ledger) for ledger in contexts.ledgers] == [5, 3]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


FORGETS = """{%- for one in messages %}<|im_start|>{{ one.role }}
{{ one.content if loop.last or one.role != 'assistant' else one.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Thinks(Engine):
    """Answers with reasoning, which templates drop later; each token has a log-probability of its own."""

    version = 0

    def __init__(self):
        self.likely = Likely()

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        turn = TOKENIZER.decode(ids).count("<|im_start|>assistant")
        text = f"<think>\nturn {turn}\n</think>\n\n" + (call("add", a=turn, b=1) if turn < 3 else "Done.")
        found = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        return Sampled(found, self.likely.of(len(found)), "stop", 0)

    async def update(self, weights):
        return 0

    async def close(self): ...


@pytest.mark.parametrize(
    ("renders_anew", "branching"), [(False, None), (False, Branching(at=(1, 2))), (True, None)]
)
def test_the_tokens_of_an_engine_count_once_in_the_batches_of_a_collector(renders_anew, branching):
    engine = Thinks()
    compose = ToolCompose([add])
    writer = TurnTokenizer(
        TOKENIZER, tools=compose.tools, use_inference_chat_template=renders_anew, chat_template=FORGETS
    )
    with AgentCollector(
        Compose(compose, EndTrajectory(when_no_calls=True), writer),
        engine=engine,
        tokenizer=None,
        tasks=[{"query": "q"}],
        group_size=2,
        branching=branching,
        reward=lambda trajectory: float(trajectory.index),
        max_staleness=0,
    ) as collector:
        (batch,) = list(collector)
    assert counted(batch) == Counter(round(value, 6) for value in engine.likely.given)
    ends = [row for row in batch.unbind(0) if row["next", "done"].all()]
    assert len(ends) == (8 if branching else 2)
    if renders_anew:
        assert len(batch) > len(ends)
    last = [int(row["collector", "turn"].max()) for row in ends]
    assert last == [2] * len(ends)
    assert math.isfinite(float(batch["advantage"].sum()))
