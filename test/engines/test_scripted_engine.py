"""The scripted engine keeps the contract and answers in the order of its script."""

import asyncio

import pytest

from torchrl_agentic.engines import Sampled, ScriptedEngine
from torchrl_agentic.engines.scripted_engine import MOST_KEYS, AnswerCursor
from torchrl_agentic.testing import EngineContract, byte_tokenizer, run_skipping

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class TestScriptedEngine(EngineContract):
    prompts = (_ids("Hello"), _ids("Hi there"), _ids("?"))
    stop_ids = (EOS,)
    min_tokens = 10
    too_long = (5,) * 200

    async def make(self) -> ScriptedEngine:
        return ScriptedEngine(
            lambda key, turn, ids: f"You wrote {len(ids)} tokens.",
            TOKENIZER,
            log_prob=-0.5,
            token_s=1e-4,
            piece_tokens=2,
            max_concurrent=5,
            context_length=150,
        )


class TestAnEngineWithoutDelaysAndLogProbs(EngineContract):
    prompts = ([1, 2], [3])
    stop_ids = (0,)
    min_tokens = 4
    has_log_probs = False

    async def make(self) -> ScriptedEngine:
        return ScriptedEngine(lambda key, turn, ids: [ids[0], 7, 8, 0], stop_token_ids=[0])


async def _texts(engine: ScriptedEngine, *keys: str) -> list[str]:
    found = [await engine.sample([1], max_tokens=99, key=key) for key in keys]
    assert all(one.ids[-1] == EOS for one in found)
    return [TOKENIZER.decode(one.ids[:-1]) for one in found]


async def test_lists_are_taken_in_the_order_in_which_trajectories_begin():
    engine = ScriptedEngine([["a0", "a1"], ["b0"]], TOKENIZER)
    assert await _texts(engine, "x", "y", "x", "z", "x", "y") == ["a0", "b0", "a1", "a0", "", ""]


async def test_a_mapping_names_trajectories_or_tasks():
    engine = ScriptedEngine({"task": ["t0", "t1"], "task/1": ["own"]}, TOKENIZER)
    keys = ("task/0", "task/1", "task/2", "task/0", "task")
    assert await _texts(engine, *keys) == ["t0", "own", "t0", "t1", "t0"]


async def test_a_trajectory_that_the_mapping_lacks_is_named():
    engine = ScriptedEngine({"task": ["t0"]}, TOKENIZER)
    with pytest.raises(ValueError, match=r"'other/0'.*'task'"):
        await engine.sample([1], max_tokens=9, key="other/0")


async def test_a_function_gets_the_key_the_turn_and_the_prompt():
    engine = ScriptedEngine(lambda key, turn, ids: f"{key} {turn} {len(ids)}", TOKENIZER)
    assert await _texts(engine, "a", "b", "a") == ["a 0 1", "b 0 1", "a 1 1"]


async def test_exact_ids_are_returned_as_they_are():
    engine = ScriptedEngine([[[7, 8, EOS], [7, 8]]], TOKENIZER)
    assert await engine.sample([1], max_tokens=9, key="a") == Sampled([7, 8, EOS], None, "stop", 0)
    assert await engine.sample([1], max_tokens=9, key="a") == Sampled([7, 8], None, "length", 0)


async def test_control_tokens_in_a_text_are_encoded_as_such():
    tokenizer = byte_tokenizer(added=("<tool_call>",))
    engine = ScriptedEngine([["<tool_call>"]], tokenizer)
    found = await engine.sample([1], max_tokens=9, key="a")
    assert found.ids == [tokenizer.convert_tokens_to_ids("<tool_call>"), tokenizer.eos_token_id]


def test_latencies_delay_the_first_piece_and_each_token():
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, int]] = []
        engine = ScriptedEngine(
            [[[1, 2, 3, 0]]],
            latency_s=lambda key, turn: 10.0 + turn,
            token_s=1.0,
            piece_tokens=3,
            stop_token_ids=[0],
        )
        await engine.sample(
            [1], max_tokens=9, key="a", on_ids=lambda ids: seen.append((loop.time(), len(ids)))
        )
        return seen

    assert run_skipping(main()) == [(13.0, 3), (14.0, 1)]


def test_an_answer_resumes_behind_the_ids_that_the_prompt_ends_with():
    async def main() -> list[Sampled]:
        engine = ScriptedEngine([["abcd", "next"]], TOKENIZER, token_s=1.0, piece_tokens=1)
        task = asyncio.create_task(engine.sample([1], max_tokens=9, key="a"))
        await asyncio.sleep(2.5)
        await engine.update(None)
        first = await task
        rest = await engine.sample([1, *first.ids], max_tokens=9 - len(first.ids), key="a")
        return [first, rest, await engine.sample([1], max_tokens=9, key="a")]

    first, rest, after = run_skipping(main())
    assert (first.ids, first.finish, first.version) == (_ids("ab"), "aborted", 0)
    assert (rest.ids, rest.finish, rest.version) == ([*_ids("cd"), EOS], "stop", 1)
    assert after.ids == [*_ids("next"), EOS]


def test_an_aborted_answer_that_is_asked_again_from_its_beginning_begins_again():
    async def main() -> Sampled:
        engine = ScriptedEngine([["abcd"]], TOKENIZER, token_s=1.0, piece_tokens=1)
        task = asyncio.create_task(engine.sample([1], max_tokens=9, key="a"))
        await asyncio.sleep(2.5)
        await engine.update(None)
        await task
        return await engine.sample([1], max_tokens=9, key="a")

    assert run_skipping(main()).ids == [*_ids("abcd"), EOS]


def test_a_list_of_texts_is_refused():
    with pytest.raises(TypeError, match="list of answers per trajectory"):
        ScriptedEngine(["a", "b"], TOKENIZER)
    with pytest.raises(TypeError, match="list of answers per trajectory"):
        ScriptedEngine({"task": "a"}, TOKENIZER)


async def test_a_text_without_a_tokenizer_is_refused():
    with pytest.raises(TypeError, match="tokenizer"):
        await ScriptedEngine([["text"]]).sample([1], max_tokens=9, key="a")


@pytest.mark.parametrize("options", [{"max_concurrent": 0}, {"piece_tokens": 0}])
def test_counts_below_one_are_refused(options: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(options))):
        ScriptedEngine([[]], **options)


def test_the_places_of_trajectories_that_ended_long_ago_are_forgotten():
    """A trajectory that is still asked for keeps its place, however many others come and go."""
    cursor, asked = AnswerCursor(lambda key, turn, ids: [turn, 0]), MOST_KEYS + 10
    for number in range(asked):
        cursor.finish(str(number), cursor.find(str(number), [1]).turn)
        cursor.find("alive", [1])
        if number == 0:
            cursor.finish("alive", 0)
    assert cursor.find("alive", [1]).turn == 1
    assert cursor.find(str(asked - 1), [1]).turn == 1
    assert cursor.find("0", [1]).turn == 0
