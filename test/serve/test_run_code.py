"""`POST /run_code` over real HTTP: each status of the protocol, without defects of the original server."""

import asyncio
import base64
from typing import Any

import httpx
import pytest
from helpers.limit import limit

from .conftest import Run

embedded = pytest.mark.embedded


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_the_server_answers_a_ping(http: httpx.Client):
    answer = http.get("/v1/ping")
    assert (answer.status_code, answer.text.strip('"')) == (200, "pong")


def test_a_program_that_ends_well_is_a_success(run: Run):
    answer = run("print(1)")
    ran = answer["run_result"]
    assert answer["status"] == "Success"
    assert answer["compile_result"] is None
    assert (ran["status"], ran["return_code"], ran["stdout"], ran["stderr"]) == ("Finished", 0, "1\n", "")
    assert 0 < ran["execution_time"] < 10
    assert {"message", "executor_pod_name", "files"} <= answer.keys()


@pytest.mark.parametrize(
    ("code", "return_code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)],
)
def test_an_exit_code_that_is_not_zero_is_a_failure(run: Run, code: str, return_code: int):
    answer = run(code)
    assert answer["status"] == "Failed"
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == return_code


def test_traceback_is_written_to_stderr(run: Run):
    ran = run("def f():\n    1 / 0\nf()")["run_result"]
    assert "line 2, in f" in ran["stderr"]
    assert ran["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_timed_out_program_returns_its_output_so_far(run: Run):
    answer = run("print('begun', flush=True)\nwhile True: pass", run_timeout=1)
    ran = answer["run_result"]
    assert answer["status"] == "Failed"
    assert (ran["status"], ran["return_code"], ran["stdout"]) == ("TimeLimitExceeded", None, "begun\n")


@embedded
def test_buffered_output_survives_the_time_limit(run: Run):
    ran = run("print('begun')\nwhile True: pass", run_timeout=0.5)["run_result"]
    assert (ran["status"], ran["stdout"], ran["stderr"]) == ("TimeLimitExceeded", "begun\n", "")


@embedded
def test_a_program_that_ignores_interrupts_is_stopped_too(run: Run):
    code = "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('on', flush=True)\nwhile True: pass"
    ran = run(code, run_timeout=0.3)["run_result"]
    assert (ran["status"], ran["stdout"]) == ("TimeLimitExceeded", "on\n")


@embedded
def test_a_time_limit_of_zero_is_over_at_once(run: Run):
    assert run("print(1)\nwhile True: pass", run_timeout=0)["run_result"]["status"] == "TimeLimitExceeded"


def test_stdin_is_read_to_its_end(run: Run):
    code = "import sys\nprint(input())\nprint(len(sys.stdin.read()))"
    assert run(code, stdin="first\n" + "é" * 100_000)["run_result"]["stdout"] == "first\n100000\n"


def test_program_that_ignores_stdin_is_not_a_sandbox_error(run: Run):
    """The original loses a race here and then blames the sandbox."""
    assert run("print(1)", stdin="x" * 1_000_000)["status"] == "Success"


def test_without_stdin_there_is_nothing_to_read(run: Run):
    assert run("import sys; print(repr(sys.stdin.read()))")["run_result"]["stdout"] == "''\n"


@embedded
@pytest.mark.parametrize("language", ["python", "bash"])
def test_output_that_fills_the_pipes_does_not_stop_a_program(run: Run, language: str):
    """The original reads only after the end: from 180 KiB on, programs wait for ever."""
    code = {"python": "print('x' * 200_000, end='')", "bash": "head -c 200000 /dev/zero | tr '\\0' x"}
    ran = run(code[language], language)["run_result"]
    assert (ran["status"], ran["stdout"]) == ("Finished", "x" * 200_000)


@embedded
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_of_ten_megabytes_head_and_tail_are_kept_and_the_rest_is_counted(run: Run, stream: str):
    ran = run(f"import sys; sys.{stream}.write('a' + 'x' * 10_000_000 + 'z')")["run_result"]
    assert ran["return_code"] == 0
    head, _, rest = ran[stream].partition("\n… [")
    count, _, tail = rest.partition(" bytes omitted] …\n")
    assert len(head) + len(tail) + int(count) == 10_000_002
    assert (head[0], tail[-1]) == ("a", "z")
    assert len(ran[stream]) < 2 << 20


@embedded
def test_output_that_is_not_utf_8_is_replaced(run: Run):
    assert run("import os; os.write(1, b'a\\xffb')")["run_result"]["stdout"] == "a�b"


@embedded
def test_numpy_can_be_imported_under_a_memory_limit(run: Run):
    pytest.importorskip("numpy")
    ran = run("import numpy; print(numpy.ones(3).sum())", memory_limit_MB=64)["run_result"]
    assert (ran["stdout"], ran["stderr"]) == ("3.0\n", "")


@embedded
@pytest.mark.parametrize("limit", [128, 1024])
def test_a_program_gets_no_more_memory_than_its_limit(run: Run, limit: int):
    below, above = (limit - 64) << 20, (limit + 8) << 20
    code = f"x = bytearray({below}); del x\nprint('ok', flush=True)\nx = bytearray({above})\nprint('no')"
    answer = run(code, memory_limit_MB=limit, run_timeout=30)
    assert answer["status"] == "Failed"
    assert answer["run_result"]["stdout"] == "ok\n"
    assert "MemoryError" in answer["run_result"]["stderr"]


@embedded
def test_a_program_may_not_use_more_than_the_sandbox_has_however_it_asks(run: Run):
    """Many processes, each below the limit of one."""
    code = """
import os, time
for _ in range(8):
    if not os.fork():
        taken = bytearray(200 << 20)
        time.sleep(60)
time.sleep(60)
"""
    answer = run(code, run_timeout=30)
    assert answer["status"] == "Failed"
    assert answer["run_result"]["status"] == "Finished"
    assert "MiB" in answer["run_result"]["stderr"]


def test_files_are_put_there_and_fetched(run: Run):
    code = "import os\ntext = open('data/in.txt').read()\nopen('out.txt', 'w').write(text.upper())"
    answer = run(code, files={"data/in.txt": _encoded("ä"), "none": None}, fetch_files=["out.txt"])
    assert answer["status"] == "Success"
    assert answer["files"] == {"out.txt": _encoded("Ä")}


def test_missing_fetched_file_is_not_a_failure(run: Run):
    answer = run("print(1)", fetch_files=["missing"])
    assert (answer["status"], answer["files"]) == ("Success", {})


@embedded
@pytest.mark.parametrize("path", ["missing", "/etc/passwd", "../secret", "folder", "link", ""])
def test_files_that_are_not_fetched_are_named(run: Run, path: str):
    answer = run("import os\nos.mkdir('folder')\nos.symlink('/etc/passwd', 'link')", fetch_files=[path])
    assert (answer["status"], answer["files"]) == ("Success", {})
    assert f"{path!r} is not returned" in answer["message"]


@embedded
def test_files_of_a_program_that_ran_out_of_time_are_fetched_too(run: Run):
    answer = run("open('out', 'w').write('half')\nwhile True: pass", run_timeout=1, fetch_files=["out"])
    assert answer["files"] == {"out": _encoded("half")}


@embedded
def test_file_with_the_name_of_the_program_is_unchanged(run: Run):
    answer = run("import main; print(main.x)", files={"main.py": _encoded("x = 7")})
    assert answer["run_result"]["stdout"] == "7\n"


def test_two_requests_share_no_files(run: Run):
    run("open('left', 'w').write('1'); open('/tmp/left', 'w').write('1')")
    ran = run("import os; print(os.path.exists('left'), os.path.exists('/tmp/left'))")["run_result"]
    assert ran["stdout"] == "False False\n"


@embedded
def test_leftover_processes_end_with_their_program(run: Run):
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(3600)\nprint('done')"
    ran = run(code)["run_result"]
    assert (ran["stdout"], ran["return_code"]) == ("done\n", 0)


def test_bash_runs(run: Run):
    ran = run('read x; echo "$x $((1 + 1))"; exit 4', "bash", stdin="in\n")["run_result"]
    assert (ran["stdout"], ran["return_code"]) == ("in 2\n", 4)


@embedded
def test_bash_that_takes_too_long_is_stopped(run: Run):
    ran = run("echo begun; sleep 60", "bash", run_timeout=0.5)["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"]) == ("TimeLimitExceeded", None, "begun\n")


def test_compiled_program_has_two_results(run: Run):
    code = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; return 5; }"
    answer = run(code, "cpp", stdin="21", compile_timeout=60)
    _skip_if_missing(answer)
    assert answer["status"] == "Failed"
    assert answer["compile_result"]["return_code"] == 0
    assert (answer["run_result"]["stdout"], answer["run_result"]["return_code"]) == ("42", 5)


def test_program_that_does_not_compile_is_not_run(run: Run):
    answer = run("int main() {", "cpp", compile_timeout=60)
    _skip_if_missing(answer)
    assert (answer["status"], answer["run_result"]) == ("Failed", None)
    assert answer["compile_result"]["status"] == "Finished"
    assert "expected" in answer["compile_result"]["stderr"]


def test_a_compiler_that_takes_too_long_is_stopped(run: Run):
    answer = run("#include <iostream>\nint main() {}", "cpp", compile_timeout=0.01)
    _skip_if_missing(answer)
    assert (answer["status"], answer["run_result"]) == ("Failed", None)
    assert answer["compile_result"]["status"] == "TimeLimitExceeded"


@embedded
def test_node_runs_under_a_memory_limit(run: Run):
    """It reserves more address space than any limit would allow."""
    answer = run("console.log(process.argv.length)", "nodejs", memory_limit_MB=256, run_timeout=30)
    _skip_if_missing(answer)
    assert answer["run_result"]["stdout"] == "2\n"


def _skip_if_missing(answer: dict[str, Any]) -> None:
    if answer["status"] == "SandboxError" and "cannot be run here" in answer["message"]:
        pytest.skip(answer["message"])


def test_a_language_that_has_no_runner_is_a_sandbox_error(run: Run):
    answer = run("select 1", "sql")
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)


@embedded
def test_unknown_language_error_lists_the_available_ones(run: Run):
    message = run("select 1", "sql")["message"]
    assert message.startswith("sql cannot be run here; ")
    assert "bash" in message
    assert "python" in message


@pytest.mark.parametrize(
    "body",
    [
        '{"code": "1"',
        '{"language": "python"}',
        '{"code": "1", "language": "klingon"}',
        '{"code": "1", "language": "python", "run_timeout": "soon"}',
        '{"code": 1, "language": "python"}',
        "[]",
        "",
    ],
)
def test_invalid_body_is_rejected(http: httpx.Client, body: str):
    answer = http.post("/run_code", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"]


@embedded
@pytest.mark.parametrize(
    "more",
    [
        {"run_timeout": -1},
        {"compile_timeout": 1e9},
        {"files": {"../x": ""}},
        {"files": {"/etc/x": ""}},
        {"files": {".": ""}},
        {"files": {"x": "not base64"}},
        {"files": {"x": "", "x/y": ""}},
        {"memory_limit_MB": 1 << 40},
    ],
    ids=str,
)
def test_invalid_request_is_rejected_with_a_reason(http: httpx.Client, more: dict[str, Any]):
    answer = http.post("/run_code", json={"code": "print(1)", "language": "python", **more})
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"]


@embedded
def test_invalid_numbers_in_a_request_are_rejected(http: httpx.Client):
    body = '{"code": "1", "language": "python", "run_timeout": NaN}'
    assert (
        http.post("/run_code", content=body, headers={"Content-Type": "application/json"}).status_code == 422
    )


def test_other_paths_and_methods_are_not_served(http: httpx.Client):
    assert http.get("/run_code").status_code == 405
    assert http.post("/run_everything").status_code == 404


async def test_a_hundred_requests_at_once_get_their_own_answers(url: str):
    async with httpx.AsyncClient(base_url=url, timeout=limit(100), trust_env=False) as client:

        async def one(number: int) -> str:
            body = {"code": f"print({number} ** 2)", "language": "python", "run_timeout": 60}
            answer = await client.post("/run_code", json=body)
            return answer.json()["run_result"]["stdout"]

        async with asyncio.timeout(limit(100)):
            answers = await asyncio.gather(*map(one, range(100)))
    assert answers == [f"{number**2}\n" for number in range(100)]
