"""Calls of LFM2 and LFM2.5: raw strings as the newer chat template writes them, JSON, missing end tags."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import get_parser

LFM2 = get_parser("lfm2")
TEXT = {"type": "string"}
TOOLS = {
    "run": {"type": "object", "properties": {"code": TEXT, "timeout": {"type": "integer"}}},
    "edit": {"type": "object", "properties": {"path": TEXT, "old": TEXT, "new": TEXT}},
}


def block(text):
    return f"<|tool_call_start|>{text}<|tool_call_end|>"


def as_template(*calls):
    """Write calls as LFM2.5's chat template does: strings between quotes, nothing escaped."""
    said = []
    for name, args in calls:
        shown = (
            f"{key}='{value}'" if isinstance(value, str) else f"{key}={value}" for key, value in args.items()
        )
        said.append(f"{name}({', '.join(shown)})")
    return block(f"[{', '.join(said)}]")


def in_pieces(text, size, tools):
    stream = LFM2.stream(tools=tools)
    for start in range(0, len(text), size):
        stream.feed(text[start : start + size])
    return stream.close()


def read(text, tools=TOOLS):
    """Return the calls of a message, read as a whole and as a stream."""
    result = LFM2.parse(text, tools=tools)
    for size in (1, 7):
        assert in_pieces(text, size, tools) == result
    return [(call.tool, call.args) if call.error is None else call.error.code for call in result.calls]


CODE = (
    "x = 1\nprint(x)",
    "print('hello')",
    "print('a', sep='b')",
    "def f(a='x', b='y'):\n    return f('(', b=')')\n",
    'print("it\'s", end="")\n',
    "sed -n '3,8p' notes.txt | sort -k 2",
    "# it's a comment, isn't it\ny = {'k': ['v']}",
    "s = r'\\d+'\nprint(s, 'a\\tb')",
    "grep 'x' a.txt\nawk '{print $1, $2}' b.txt",
    "f'{x}'\nb'y'",
    "'a string alone'",
    "\"\"\"Say\nmore.\"\"\"\nx = '''three'''",
    "g(code='z', path='p')\nrun(code='q')",
    "[f('x')]\n",
    "a = ['x', 'y']  # [1]\n",
)


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["known", "unknown"])
@pytest.mark.parametrize("code", CODE)
def test_code_is_read_as_the_template_of_lfm2_5_writes_it(code, tools):
    calls = [("run", {"code": code, "timeout": 5})]
    assert read(as_template(*calls), tools) == calls
    calls = [("edit", {"path": "a.py", "old": code, "new": f"{code}\n"}), ("run", {"code": code})]
    assert read(as_template(*calls), tools) == calls


PIECES = (
    "print('a')", "x = 1", "it's", "foo(a='b', c='d')", '"quoted"', "\n", " ", "'", "(", ")", "]", ", ", "[",
    "\\n", "\\'", "f'x'", "', b=", "')", "')]", "=", "# ",
)  # fmt: skip


@settings(deadline=None)
@given(values=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=2, max_size=2))
@example(values=["'), print('a')", ""])
def test_a_raw_string_is_read_right_or_noted_or_an_error(values):
    """A call that is also valid Python, such as one that the string itself closes, is read as Python."""
    wanted = {"code": values[0] + "\n'", "path": values[1]}
    text = as_template(("f", wanted))
    listed = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    by_python = get_parser("pythonic").parse(listed, tools={"f": {}}).calls
    as_python = [(call.tool, call.args) for call in by_python if not call.error]
    assume(len(as_python) < len(by_python))  # that reading comes first
    for tools in (None, {"f": {"properties": {"code": TEXT, "path": TEXT}}}):
        result = LFM2.parse(text, tools=tools)
        assert in_pieces(text, 3, tools) == result
        assert result.calls
        for call in result.calls:
            assert call.error or "raw_string" in call.notes or (call.tool, call.args) in as_python


@settings(deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(
            ("print('a')", "foo('x', path='y')", "# it's", 'z = "q"', "d = {'k': 1}", "go()", "s = ''")
        ),
        min_size=1,
        max_size=5,
    ),
    is_known=st.booleans(),
)
def test_lines_of_code_are_never_read_as_others(lines, is_known):
    wanted = {"code": "\n".join(lines), "path": "it's.py", "old": "\n".join(lines[::-1])}
    tools = {"f": {"properties": dict.fromkeys(wanted, TEXT)}} if is_known else None
    for call in LFM2.parse(as_template(("f", wanted)), tools=tools).calls:
        assert call.error is None
        assert call.args == wanted


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(("a", "b")),
        st.text(st.sampled_from("'\"\n\\(), b=]x"), max_size=12)
        | st.lists(st.text("'\"x", max_size=3), max_size=2),
    )
)
def test_rendered_calls_need_no_raw_string(args):
    (call,) = LFM2.parse(LFM2.render_call(ParsedCall("f", args, "1"))).calls
    assert (call.tool, call.args, call.notes) == ("f", args, ())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[run(code='a\nb')]", {"code": "a\nb"}),
        ('[run(code="a\nb")]', {"code": "a\nb"}),
        ("[run(code='it's')]", {"code": "it's"}),
        ("[run(code='')]", {"code": ""}),
        ("[run(code='''')]", {"code": "''"}),
        ("[run(code='print(1')]", {"code": "print(1"}),
        ("[run(code='a\\tb')]", {"code": "a\tb"}),  # a Python literal
        ("[run(code='a\\tb\n')]", {"code": "a\\tb\n"}),  # none, so nothing is an escape
        ("[run(code='x', timeout=07)]", {"code": "x", "timeout": 7}),
        ("[run(code={'a', 'b'})]", {"code": ["a", "b"]}),
        ("[run(code={1, 2})]", {"code": [1, 2]}),
    ],
)
def test_one_call_is_read(text, wanted):
    assert read(block(text)) == [("run", wanted)]


@pytest.mark.parametrize(
    "text",
    [
        "[run(code='C:\\')]",
        "[edit(old='dogs' tails', new='cats' tails')]",
        "[edit(old=':( it's', new='ok :)')]",
        "[edit(old='x = 'a', new='b'')]",
        '[run(code="print("a")")]',
        '[run(code="a\\"b\n")]',
        "[run(code='echo \\'a\\'\nls')]",
        "[run(code='\\ud800')]",
        "[run(code='x', timeout=0755)]",
        "[run(code='a\nb']",
        "[run(code='it's', timeout=f(x))]",
        "run(code='it's')",
    ],
)
def test_a_string_whose_value_is_not_certain_is_an_error(text):
    assert set(read(block(text))) == {"not_literal"}


def test_liberties_are_noted():
    def notes(text):
        return [call.notes for call in LFM2.parse(text).calls]

    assert notes(block("[f(a='x\ny'), g(a='z')]")) == [("raw_string",), ()]
    assert notes(block("[f(a=07, b={1}, c='it's')]")) == [("leading_zero", "set_as_list", "raw_string")]
    assert notes(block('[{"name": "f", "parameters": {}}]')) == [("args_alias", "json_call")]
    assert notes("<|tool_call_start|>[f(a=1)]") == [("unclosed_tag",)]


def test_a_raw_string_needs_the_end_tag():
    """Or the end of a string might be a quote inside it."""
    for end in ("", "<|im_end|>"):
        assert read(f"<|tool_call_start|>[run(code='print('a')]{end}") == ["unclosed"]


def test_an_apostrophe_behind_the_block_changes_nothing():
    text = block("[run(code='it's')]") + " I'm done. " + block("[run(code='don't\n')]") + "It's."
    assert read(text) == [("run", {"code": "it's"}), ("run", {"code": "don't\n"})]
    assert LFM2.parse(text, tools=TOOLS).text == " I'm done. It's."


@pytest.mark.parametrize("end", ["<|tool_call_end|>", "", "\n", "<|im_end|>"])
def test_json_calls_are_read(end):
    one, two = (
        '{"name": "run", "arguments": {"code": "it\'s"}}',
        '{"name": "edit", "parameters": {"path": "a"}}',
    )
    first, second = ("run", {"code": "it's"}), ("edit", {"path": "a"})
    assert read(f"<|tool_call_start|>{one}{end}") == [first]
    assert read(f"<|tool_call_start|>[{one}, {two}]{end}") == [first, second]
    assert read(f"so <|tool_call_start|>\n[ {two}\n]\n{end}") == [second]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ('<|tool_call_start|>[{"name": "run", "arguments": {}}', ["unclosed"]),
        (block('[{"name": "run", "arguments": {}}'), ["invalid_json"]),
        (block('{"name": "run", "arguments": {}} so'), ["extra_data"]),
        (block('[{"arguments": {}}, {"name": "run", "arguments": {}}]'), ["missing_name", ("run", {})]),
        (block('{"a": 1}'), ["missing_name"]),
        (block("{'name': 'run'}"), ["invalid_json"]),
    ],
)
def test_broken_json_is_an_error(text, codes):
    assert read(text) == codes


@pytest.mark.parametrize(
    ("name", "opener", "calls", "turn_end"),
    [
        ("lfm2", "<|tool_call_start|>", "[f(a='x'), g()]", "<|im_end|>"),
        ("olmo3", "<function_calls>", "f(a='x')\ng()", "<|im_end|>"),
        ("pythonic", "<|python_start|>", "[f(a='x'), g()]", "<|eot|>"),
    ],
)
def test_a_list_that_lacks_only_its_end_tag_is_read(name, opener, calls, turn_end):
    parser = get_parser(name)
    for end in ("", "\n", turn_end, f"\n{turn_end}"):
        result = parser.parse(f"{opener}{calls}{end}")
        assert [(call.tool, call.args, call.notes) for call in result.calls] == [
            ("f", {"a": "x"}, ("unclosed_tag",)),
            ("g", {}, ("unclosed_tag",)),
        ]
        for cut in (calls[:-1], calls[:-2], calls[:4], f"{calls} so"):
            found = parser.parse(f"{opener}{cut}{end}").calls
            assert [call.error and call.error.code for call in found] == ["unclosed"], cut
