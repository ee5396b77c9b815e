"""Text that a model writes between the markers of a section costs none of its calls."""

import json
from typing import Any

import pytest
from helpers.read_message import read_message

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import get_parser

NAMES = ["kimi_k2", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "minimax_m2", "qwen3_coder"]
NAMES += ["seed_oss", "mimo"]
FIRST, SECOND = ("save", {"body": "v"}), ("load", {"place": "w"})


def _parts(name: str) -> tuple[str, str, str, str]:
    """Return the opener of a section, two calls, and its closer."""
    parser = get_parser(name)
    calls = [ParsedCall(*FIRST, "functions.save:0"), ParsedCall(*SECOND, "functions.load:1", index=1)]
    opener, closer = type(parser).format.section
    bodies = [parser.render_call(call).removeprefix(opener).removesuffix(closer).strip() for call in calls]
    return opener, *bodies, closer


def _entries(result: Any) -> list[Any]:
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("noise", ["ok", "I save it, then load it:\n", "1. ", "```json\n", "a > b", "<eos>"])
def test_prose_before_the_first_call_stays_text(name: str, noise: str):
    opener, first, second, closer = _parts(name)
    result = read_message(name, f"Well. {opener} {noise} {first}\n{second}{closer}")
    assert _entries(result) == [FIRST, SECOND]
    assert result.text.startswith(f"Well. {opener} {noise} ")
    assert closer not in result.text
    assert "text_in_section" in result.notes


@pytest.mark.parametrize("name", NAMES)
def test_prose_between_calls_stays_text(name: str):
    opener, first, second, closer = _parts(name)
    result = read_message(name, f"{opener}{first} and then {second}{closer} done")
    assert _entries(result) == [FIRST, SECOND]
    assert result.text == " and then  done"
    assert result.notes == ("text_in_section",)


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_section_has_no_note(name: str):
    opener, first, second, closer = _parts(name)
    result = read_message(name, f"{opener}\n{first}\n{second}\n{closer} and {opener}{second}{closer}")
    assert _entries(result) == [FIRST, SECOND, SECOND]
    assert result.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_section_of_prose_alone_is_one_error(name: str):
    opener, first, _, closer = _parts(name)
    result = read_message(name, f"{opener} ok, I save it {closer} or {opener}{first}{closer}")
    assert _entries(result) == ["wrong_dialect", FIRST]
    assert _entries(read_message(name, f"{opener} ok, I save it")) == ["wrong_dialect"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "odd",
    ['{"name": "save", "arguments": {}}', '[save(body="v")]', '<call name="save"/>', "save<key>body</key>"],
)
def test_call_in_another_dialect_is_a_separate_attempt(name: str, odd: str):
    opener, first, second, closer = _parts(name)
    assert _entries(read_message(name, f"{opener}{odd}\n{first}\n{second}{closer}")) == [
        "wrong_dialect", FIRST, SECOND
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_call_quoted_in_another_dialect_does_not_run(name: str):
    opener, first, second, closer = _parts(name)
    odd = json.dumps({"name": "save", "arguments": {"body": first}})
    result = read_message(name, f"{opener}{odd}{closer}\n{opener}{second}{closer}")
    assert _entries(result) == ["wrong_dialect", SECOND]


@pytest.mark.parametrize("name", NAMES)
def test_call_in_reasoning_after_the_opener_does_not_run(name: str):
    opener, first, second, closer = _parts(name)
    think = get_parser(name).format.think  # pyright: ignore[reportAttributeAccessIssue]
    result = read_message(
        name, f"{opener}{think[0]}perhaps {first}{think[1]}{closer}{opener}{second}{closer}"
    )
    assert _entries(result) == ["wrong_dialect", SECOND]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["text", "error"])
def test_section_inside_reasoning_ends_with_it(name: str, policy: Any):
    opener, first, second, closer = _parts(name)
    think = get_parser(name).format.think  # pyright: ignore[reportAttributeAccessIssue]
    text = f"{think[0]}I write {opener} then{think[1]}{opener}{first}\n{second}{closer}"
    assert _entries(read_message(name, text, parse_reasoning=policy))[-2:] == [FIRST, SECOND]


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31", "qwen3_coder", "minimax_m2"])
def test_many_openers_behind_noise_take_linear_time(name: str):
    opener, first, _, _ = _parts(name)
    marker = get_parser(name).format.openers[0]  # pyright: ignore[reportAttributeAccessIssue]
    for text in (
        (opener + " {" + marker) * 5000,
        (opener + " ok " + first) * 2000,
        opener + ("{" + marker) * 9000,
    ):
        get_parser(name).parse(text)
