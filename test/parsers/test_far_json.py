"""JSON far into a long message is read as at its beginning, errors included."""

import pytest

from torchrl_agentic.parsers import get_parser

FAR = "x" * 100_000 + "\n"


@pytest.mark.parametrize("size", [0, 10, *range(4040, 4100, 9), 9000])
@pytest.mark.parametrize(
    "end",
    [
        '"}}', '"}', '"}]}', '", "b": NaN}}', '", "b": 1e999}}', '", "b": ' + "1" * 5000 + "}}",
        '"} , }', '\n"}}',
        '", "b": tru}}', '", "b": "\\u12"}}', '", "b": "\\ud800"}}',
        '", "b": 1.5e3}}', "", '", "b": ' + "[" * 300,
        '", "b": NaN',
    ],
)  # fmt: skip
def test_distance_from_the_start_does_not_change_a_call(size, end):
    parser = get_parser("llama3_json")
    text = f'{{"name": "f", "parameters": {{"a": "{"é" * size}{end}\nand'
    near, far = parser.parse(f"\n{text}"), parser.parse(FAR + text)
    assert [(call.tool, call.args, call.error and call.error.code) for call in near.calls] == [
        (call.tool, call.args, call.error and call.error.code) for call in far.calls
    ]
    for one, other in zip(near.calls, far.calls, strict=True):
        assert (other.span[0] - one.span[0], other.span[1] - one.span[1]) == (100_000, 100_000)
        if one.error:
            assert _place(other.error.message) - _place(one.error.message) in (0, 100_000)


def _place(message: str) -> int:
    """The place that an error message names."""
    _, found, rest = message.partition("at character ")
    return int(rest.split(",")[0].split(".")[0]) if found else 0
