"""Interactions from YAML, as verl's files name them."""

import pytest
from helpers.simulated_users import Clerk, Shopper

from torchrl_agentic import ConfigError, Message, load_interactions
from torchrl_agentic.interactions import Gsm8kInteraction, Reply, ScriptedUser, VerlInteraction
from torchrl_agentic.interactions.base import name_of


def written(tmp_path, text):
    path = tmp_path / "interactions.yaml"
    path.write_text(text, "utf-8")
    return path


def test_classes_are_made_with_their_configuration(tmp_path):
    found = load_interactions(
        written(
            tmp_path,
            """
            interaction:
              - class_name: helpers.simulated_users.Clerk
                config: {shelf: 3}
              - name: mine
                class_name: helpers.simulated_users.Shopper
                config: {judged: 0.5}
              - name: quiet
                class_name: torchrl_agentic.interactions.ScriptedUser
            """,
        )
    )
    assert list(found) == ["clerk", "mine", "quiet"]
    assert isinstance(found["clerk"], VerlInteraction)
    assert isinstance(found["clerk"].target, Clerk)
    assert found["clerk"].target.config == {"name": "clerk", "shelf": 3}
    assert isinstance(found["mine"], Shopper)
    assert found["mine"].judged == 0.5
    assert isinstance(found["quiet"], ScriptedUser)
    assert [name_of(item) for item in found.values()] == list(found)


def test_a_class_of_a_file_is_found(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torchrl_agentic.interactions import ScriptedUser\n"
        "class QuietInteraction(ScriptedUser):\n    pass\n"
    )
    found = load_interactions(written(tmp_path, "interaction: [{class_name: 'mine.py:QuietInteraction'}]"))
    assert list(found) == ["quiet"]
    assert isinstance(found["quiet"], ScriptedUser)


async def test_verls_user_of_gsm8k_is_found_by_its_name_and_judges_answers(tmp_path):
    text = "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}]"
    (user,) = load_interactions(written(tmp_path, text)).values()
    assert isinstance(user, Gsm8kInteraction)
    assert name_of(user) == "gsm8k"
    chat = [Message("user", "What is 6 × 7?"), Message("assistant", "I say 41.")]
    async with user.session("t", ground_truth="#### 42", query="What is 6 × 7?") as live:
        wrong = Reply.of(await live.respond(chat))
        right = Reply.of(
            await live.respond([*chat, Message("user", wrong.text), Message("assistant", "#### 42.0")])
        )
        assert await live.score(chat) == 0.0
    assert (wrong.score, wrong.is_over, right.score, right.is_over) == (0.0, False, 1.0, True)
    with pytest.raises(ValueError, match="needs the right answer"):
        async with user.session("t"):
            pass


CLERK = "{class_name: helpers.simulated_users.Clerk}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"interaction:\n- {CLERK}\n- {CLERK}", ":3: .*two interactions are named 'clerk'"),
        (
            "interaction: [{class_name: helpers.simulated_users.Nobody}]",
            ":1: .*helpers.simulated_users has no attribute 'Nobody'",
        ),
        ("interaction: [{class_name: no.such.module.Nobody}]", "cannot import no.such.module"),
        ("interaction: [{class_name: Nobody}]", "'Nobody': expected 'package.module.Name'"),
        ("interaction: [{class_name: helpers.simulated_users.parrot}]", "parrot' is not a class"),
        ("interaction: [{class_name: helpers.simulated_users.Shopper, config: {x: 1}}]", "Shopper.*'x'"),
        ("interaction:\n- {name: a}", ":2: 'class_name' is missing"),
        ("interaction: [{class_name: a.B, config: [1]}]", r"0.config: .*valid dictionary; got \[1\]"),
        (
            "interaction:\n- class_name: a.B\n  configuration: {}",
            ":3: unknown key 'configuration'.*did you mean 'config'",
        ),
        ("interaction: [x]", "expected a mapping with keys of class_name, name, config; got x"),
        ("interaction: []", "at least 1 item"),
        ("interactions: [x]", "unknown key 'interactions'.*did you mean 'interaction'"),
        ("[1, 2]", r"expected a mapping with keys of interaction; got \[1, 2\]"),
        ("a: [", "not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_interactions(written(tmp_path, text))
    assert "interactions.yaml:" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_interactions(tmp_path / "none.yaml")
