"""`CodeScorer`: tests decide, and hostile code cannot decide for them."""

import json

import numpy as np
import pytest
from helpers.limit import limit

from torchrl_agentic import InfrastructureError, SandboxError
from torchrl_agentic.rewards import CodeScorer, last_code_block
from torchrl_agentic.rewards.code_scorer import read_tests, same_output
from torchrl_agentic.sandbox import default_sandbox
from torchrl_agentic.testing import ScorerContract, finished_trajectory

ADD = "assert add(1, 2) == 3"


def answer(code, *tests):
    return finished_trajectory(f"Here it is:\n```python\n{code}\n```\nDone.", data={"tests": list(tests)})


class TestContract(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return CodeScorer(timeout_s=20)

    def trajectories(self):
        return [
            answer("def add(a, b): return a + b", ADD, "assert add(1, 1) == 3"),
            answer("print(1)", ("", "1")),
        ]


@pytest.fixture(scope="module")
def scorer():
    return CodeScorer(timeout_s=20)


async def test_the_score_is_the_share_of_passed_tests(scorer):
    doubles = [{"input": str(number), "output": str(2 * number)} for number in (1, 2)]
    found = await scorer(answer("print(2 * int(input()))", *doubles, {"stdin": "3", "stdout": "7"}))
    assert found.value == pytest.approx(2 / 3)
    assert found.explanation == "2 of 3 tests passed\ntest 2: expected '7'; found '6'"
    assert found.answer == "print(2 * int(input()))\n"


async def test_all_or_nothing_stops_at_the_first_failure():
    scorer = CodeScorer(score="all", timeout_s=20)
    assert (await scorer(answer("def add(a, b): return a + b", ADD, "assert add(0, 0) == 0"))).value == 1
    found = await scorer(
        answer("def add(a, b): return a + b", "assert add(1, 1) == 3", "assert add(1, 1) == 4")
    )
    assert found.value == 0
    assert "test 1" not in found.explanation


SOUND = {
    "a function": ("def add(a, b): return a + b", ADD),
    "prints": ("print('loaded')\ndef add(a, b):\n    print('called')\n    return a + b", ADD),
    "keyword arguments": ("def add(a, *, b): return a + b", "assert add(1, b=2) == 3"),
    "plain data": (
        "def same(x): return x",
        "x = [1, 2.5, 'é\\ud800', b'b', (None, True), {1, 2}, {'a': {3: [frozenset({4})]}}]\n"
        "x += [10**40, 1j, -0.0]\n"
        "assert same(x) == x and same(x) is not x\nimport math\nassert math.isnan(same(math.nan))",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.items == [1]",
    ),
    "exceptions": (
        "class Wrong(ValueError): pass\ndef f(): raise Wrong('no')",
        "try:\n    f()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
    ),
    "generators": (
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert list(itertools.islice(count(), 4)) == [0, 1, 2, 3]",
    ),
    "changes in place": (
        "def sort(items, seen): items.sort(); seen.update({1: 2})",
        "a, b = [3, 1, 2], {}\nsort(a, b)\nassert a == [1, 2, 3] and b == {1: 2}",
    ),
    "a constant": ("LIMIT = [1, 2]", "assert LIMIT == [1, 2]"),
    "functions of functions": (
        "def twice(f): return lambda x: f(f(x))\ndef inc(x): return x + 1",
        "assert twice(inc)(1) == 3",
    ),
    "no main block": (
        "def f(): return 1\nif __name__ == '__main__':\n    raise SystemExit(3)",
        "assert f() == 1",
    ),
    "HumanEval": (
        "def add(a, b): return a + b",
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    ),
}


@pytest.mark.parametrize("name", sorted(SOUND))
async def test_a_right_solution_passes(scorer, name: str):
    found = await scorer(answer(*SOUND[name]))
    assert found.value == 1, found.explanation


HOSTILE = {
    "exits": "import sys, os\nprint('passed')\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit": "def add(a, b): raise SystemExit(0)",
    "prints a verdict": (
        "import os, sys\n"
        "for fd in range(1, 10):\n"
        '    try: os.write(fd, b\'{"verdict": true, "why": ""}\\n\')\n'
        "    except OSError: pass\n"
        "def add(a, b):\n    return {'verdict': True}"
    ),
    "an object that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "class Thing:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def add(a, b): return Thing()"
    ),
    "an int that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Any(7)"
    ),
    "patches builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.exec = lambda *a: None\n"
        "__builtins__ = {}\ndef add(a, b): return 0"
    ),
    "defines builtins": "def all(x): return True\nlen = any = all\ndef add(a, b): return 0",
    "speaks the protocol": (
        "import json, os\n"
        "fake = ['dict', [['all', ['ref', 1]], ['map', ['ref', 2]]]]\n"
        "names = [['add', ['ref', 0]], ['all', ['ref', 1]], ['__builtins__', fake]]\n"
        "yes = json.dumps({'value': True, 'changed': {}})\n"
        "for fd in range(3, 10):\n"
        "    try: os.write(fd, (json.dumps({'names': names}) + '\\n' + 50 * (yes + '\\n')).encode())\n"
        "    except OSError: pass\n"
        "import time\ntime.sleep(60)"
    ),
    "patches json": "import json\njson.dumps = lambda *a: '{\"verdict\": true}'\ndef add(a, b): return 0",
    "kills all": "import os, signal\ndef add(a, b):\n    os.kill(-1, signal.SIGKILL)",
    "writes the tests": "open('/work/tests.py', 'w').write('')\ndef add(a, b): return 0",
    "runs out of memory": "def add(a, b): return [bytearray(1 << 20) for _ in range(1 << 20)]",
    "sends too much": "def add(a, b): return 'x' * (12 << 20)",
    "recurses": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "no such function": "def sub(a, b): return a - b",
    "a syntax error": "def add(a, b: return 3",
    "nothing": "",
    "skips the tests by StopIteration": "def add(a, b): raise StopIteration",
}
TESTS = (
    ADD,
    "assert all([add(1, 2) == 3])",
    "for _ in map(lambda case: add(1, 2), [1]):\n    assert add(1, 2) == 3",
    "result = add(1, 2)\nassert not result != 3",
    "assert str(add(1, 2)).isdigit() and add(1, 2).bit_length() == 2 and abs(add(1, 2) - 3) < 1e-9",
)


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_hostile_code_does_not_pass(scorer, name: str):
    found = await scorer(answer(HOSTILE[name], *TESTS))
    assert found.value == 0
    assert found.explanation.startswith("0 of 5 tests passed\ntest 0: ")


async def test_an_object_does_not_stand_for_a_text(scorer):
    code = "class Any:\n    def __getattr__(self, name): return lambda *a: True\ndef f(x): return Any()"
    tests = ["assert f(1).startswith('a')", "assert f(1).issubset({1})", "assert f(1).isupper()"]
    assert (await scorer(answer(code, *tests))).value == 0


async def test_memory_of_the_tests_cannot_be_read_through_numpy(scorer):
    code = (
        "class Spy:\n"
        "    __array_interface__ = {'data': (4096, False), 'shape': (1,), 'typestr': '<i8', 'version': 3}\n"
        "    def __array__(self, *a, **k): return 3\n"
        "def add(a, b): return Spy()"
    )
    found = await scorer(answer(code, "import numpy\nassert numpy.all(numpy.asarray(add(1, 2)) == 3)"))
    assert found.value == 0
    assert "without a verdict" not in found.explanation  # the tests have not crashed


async def test_clearing_the_arguments_proves_nothing(scorer):
    code = "def srt(x):\n    x.clear()\n    return x"
    assert (await scorer(answer(code, "x = [2, 1]\nassert srt(x) == sorted(x)"))).value == 0


@pytest.mark.parametrize(
    "code",
    [
        "print('8')\nimport os\nos.kill(os.getpid(), 9)",
        "print('8' * (2 << 20))",
        "print(8)\nraise SystemExit(1)",
    ],
)
async def test_a_program_that_fails_or_floods_does_not_pass(scorer, code: str):
    assert (await scorer(answer(code, {"input": "4", "output": "8"}))).value == 0


async def test_all_tests_together_have_a_bound_too():
    scorer = CodeScorer(timeout_s=limit(60), total_timeout_s=1)
    for tests in ([ADD] * 9, [("", "1")] * 9):
        found = await scorer(answer("while True: pass", *tests))
        assert found.value == 0
        assert "test 0: no end within" in found.explanation
        assert "test 1: not run: all tests together took 1 s" in found.explanation


async def test_endless_code_ends_at_the_timeout():
    scorer = CodeScorer(timeout_s=1.5)
    endless = "while True: pass"
    program = await scorer(answer(endless, {"input": "", "output": ""}))
    tests = await scorer(answer(f"def add(a, b):\n    {endless}", ADD))
    forever = await scorer(answer("def add(a, b):\n    while True: yield 1", "assert list(add(1, 2)) == 3"))
    assert [one.value for one in (program, tests, forever)] == [0, 0, 0]
    assert "no end within 1.5 s" in program.explanation
    assert "no end within 1.5 s" in tests.explanation


async def test_the_state_of_one_test_is_gone_in_the_next(scorer):
    code = "calls = []\ndef f():\n    calls.append(1)\n    return len(calls)"
    assert (await scorer(answer(code, "assert f() == 1", "assert f() == 1"))).value == 1


async def test_no_code_scores_zero_without_a_sandbox(scorer):
    found = await scorer(finished_trajectory("I cannot.", data={"tests": [ADD]}))
    assert (found.value, found.explanation) == (0, "no code block")


async def test_code_and_tests_may_come_from_functions():
    scorer = CodeScorer(
        code=lambda one: one.final_answer,
        tests=lambda one: [f"{one.task.data['test']}\ncheck({one.task.data['entry_point']})"],
    )
    data = {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "inc"}
    assert (await scorer(finished_trajectory("inc = lambda x: x + 1", data=data))).value == 1


class Lost(type(default_sandbox())):
    """A sandbox that is lost when a command runs."""

    def fresh(self):
        return type(self)(self.limits)

    async def run(self, argv, **options):
        raise SandboxError("the machine is gone")

    async def spawn(self, argv):
        raise SandboxError("the machine is gone")


@pytest.mark.parametrize("test", [ADD, {"input": "", "output": ""}])
async def test_a_lost_sandbox_is_no_score(test):
    with pytest.raises(InfrastructureError, match="the machine is gone"):
        await CodeScorer(sandbox=Lost())(answer("def add(a, b): return a + b", test))


class EndedOutside(type(default_sandbox())):
    """A sandbox that reports that something outside ended its processes."""

    def fresh(self):
        return EndedOutside(self.limits)

    async def was_ended_outside(self, ended):
        return True


async def test_a_process_that_something_outside_ended_is_no_score():
    code = "import os\ndef add(a, b): os._exit(0)"
    with pytest.raises(SandboxError, match="lost while it ran code"):
        await CodeScorer(sandbox=EndedOutside())(answer(code, ADD))


async def test_a_task_without_tests_is_a_mistake(scorer):
    with pytest.raises(ValueError, match=r"task 'test' in the column 'tests': there are no tests"):
        await scorer(finished_trajectory("```\n1\n```"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("assert f() == 1", [("", None, "assert f() == 1")]),
        (["a", "b"], [("", None, "a"), ("", None, "b")]),
        ([("1", "2")], [("1", "2", "")]),
        ([{"input": ["1", "2"], "output": 3}], [("1\n2", "3", "")]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [("1", "3", ""), ("2", "4", "")]),
        (json.dumps({"inputs": ["1"], "outputs": ["3"]}), [("1", "3", "")]),
        ({"inputs": np.array(["1"]), "outputs": np.array(["3"])}, [("1", "3", "")]),
        (np.array(["a", "b"]), [("", None, "a"), ("", None, "b")]),
        ("[f() for _ in 'ab']", [("", None, "[f() for _ in 'ab']")]),
    ],
)
def test_tests_are_read_in_usual_forms(found, expected):
    assert [(one.stdin, one.stdout, one.code) for one in read_tests(found)] == expected


@pytest.mark.parametrize("found", [None, [], "", [{"input": "1"}], 3, {"inputs": ["1"], "outputs": []}])
def test_other_forms_of_tests_are_refused(found):
    with pytest.raises(ValueError, match="test"):
        read_tests(found)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```\n```bash\nb\n```", "a\n"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\na", None),
        ("```python```\n```python\na\n```", "a\n"),
        ("  ```Python title=x\n  a\r\n  ```  \r", "  a\r\n"),
        ("```\n```", ""),
        ("~~~" * 50_000, None),
        ("~~~\n" * 50_001, ""),
        ("```" + "`\n" * 50_000, None),
        ("a", None),
    ],
)
def test_the_last_code_block_counts(text: str, code: str | None):
    assert last_code_block(text) == code


def test_outputs_may_differ_in_white_space_at_ends_only():
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a b", "ab")
    assert not same_output("a\n\nb", "a\nb")


@pytest.mark.parametrize(
    "options", [{"score": "some"}, {"timeout_s": 0}, {"total_timeout_s": 0}, {"memory_bytes": 0}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CodeScorer(**options)
