"""`POST /run_jupyter` over real HTTP: cells share an interpreter, timeouts hold, each cell has a result."""

import base64
from typing import Any

import httpx
import pytest

embedded = pytest.mark.embedded


def _run(http: httpx.Client, *cells: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/run_jupyter", json={"cells": list(cells), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_cells_share_what_they_define(http: httpx.Client):
    answer = _run(http, "x = 20", "print(x + 1)", "x + 2")
    assert answer["status"] == "Success"
    assert (answer["driver"]["status"], answer["driver"]["return_code"]) == ("Finished", 0)
    assert [cell["stdout"] for cell in answer["cells"]] == ["", "21\n", ""]
    assert answer["cells"][2]["display"][0]["text/plain"] == "22"


def test_stderr_is_returned_separately(http: httpx.Client):
    cell = _run(http, "import sys; print(1); print(2, file=sys.stderr)")["cells"][0]
    assert (cell["stdout"], cell["stderr"], cell["error"]) == ("1\n", "2\n", [])


def test_later_cells_run_after_an_error(http: httpx.Client):
    answer = _run(http, "1 / 0", "print('on')")
    (error,) = answer["cells"][0]["error"]
    assert answer["status"] == "Success"
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert any("ZeroDivisionError" in line for line in error["traceback"])
    assert answer["cells"][1]["stdout"] == "on\n"


def test_two_requests_share_nothing(http: httpx.Client):
    _run(http, "left = 1; open('left', 'w').write('1')")
    cells = _run(http, "print('left' in globals())", "import os; print(os.path.exists('left'))")["cells"]
    assert [cell["stdout"] for cell in cells] == ["False\n", "False\n"]


def test_files_are_put_there_and_fetched(http: httpx.Client):
    data = base64.b64encode(b"abc").decode()
    code = "open('out', 'w').write(open('in').read() * 2)"
    answer = _run(http, code, files={"in": data}, fetch_files=["out", "missing"])
    assert answer["files"] == {"out": base64.b64encode(b"abcabc").decode()}


@embedded
def test_a_cell_that_takes_too_long_is_stopped_and_the_next_one_runs(http: httpx.Client):
    """The original has a field for this and ignores it."""
    answer = _run(http, "x = 5", "while True: pass", "print(x)", cell_timeout=0.5)
    assert answer["status"] == "Success"
    assert answer["cells"][1]["error"][0]["ename"] == "CellTimeoutError"
    assert answer["cells"][2]["stdout"] == "5\n"


@embedded
def test_total_timeout_stops_all_cells_and_returns_earlier_results(http: httpx.Client):
    """Without an allowance: the original adds ten seconds."""
    answer = _run(http, "print(1)", "print(2, flush=True)\nwhile True: pass", "print(3)", total_timeout=0.5)
    assert answer["status"] == "Failed"
    driver = answer["driver"]
    assert (driver["status"], driver["return_code"]) == ("TimeLimitExceeded", None)
    assert "2 of 3 were run" in driver["stderr"]
    assert [cell["stdout"] for cell in answer["cells"]] == ["1\n", "2\n"]
    assert driver["execution_time"] < 5


@embedded
def test_dead_interpreter_is_reported_and_replaced(http: httpx.Client):
    cells = _run(http, "x = 1", "import os; os._exit(3)", "print('x' in globals())")["cells"]
    assert cells[1]["error"][0]["ename"] == "DeadKernelError"
    assert "exit code 3" in cells[1]["error"][0]["evalue"]
    assert cells[2]["stdout"] == "False\n"


@embedded
def test_the_memory_limit_is_kept_also_by_a_second_interpreter(http: httpx.Client):
    """The original ignores it."""
    take = "x = bytearray(300 << 20)"
    cells = _run(http, take, "import os; os._exit(0)", take, "print('on')", memory_limit_MB=256)["cells"]
    assert [cell["error"][0]["ename"] for cell in cells[:3]] == [
        "MemoryError",
        "DeadKernelError",
        "MemoryError",
    ]
    assert cells[3]["stdout"] == "on\n"


@embedded
def test_pictures_are_displayed(http: httpx.Client):
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as p\np.plot([1, 2])\np.show()"
    (shown,) = _run(http, code, total_timeout=60)["cells"][0]["display"]
    assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")


@embedded
def test_a_kernel_that_is_not_here_is_a_sandbox_error(http: httpx.Client):
    answer = _run(http, "1", kernel="julia")
    assert (answer["status"], answer["driver"], answer["cells"]) == ("SandboxError", None, [])
    assert "'python3'" in answer["message"]


@embedded
def test_no_cells_are_a_success(http: httpx.Client):
    assert _run(http)["status"] == "Success"


@pytest.mark.parametrize("body", ["{}", '{"cells": "print(1)"}', '{"cells": [1]}'])
def test_invalid_body_is_rejected(http: httpx.Client, body: str):
    assert (
        http.post("/run_jupyter", content=body, headers={"Content-Type": "application/json"}).status_code
        == 422
    )
