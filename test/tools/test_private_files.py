"""New files are readable only by their owner by default; existing files keep their permissions."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import run_program
from helpers.record_strategies import record

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.records import Dump, Recorder
from torchrl_agentic.tools import Cassette
from torchrl_agentic.viewer.html import write_page


def bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o000], ids=oct, autouse=True)
def umask(request: pytest.FixtureRequest):
    """Permissions are the same under any."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def dump(path: Path, **options: Any) -> None:
    with Recorder(path, **options) as recorder:
        recorder.write(record())


def cassette(path: Path, **options: Any) -> None:
    with Cassette(path, **options) as tape:
        tape.append("t", "echo", "c1", {}, ToolResult.from_text("secret"), 0.0)


def page(path: Path, **options: int) -> None:
    dump(path.with_name("dump.jsonl"))
    with Dump(path.with_name("dump.jsonl")) as found:
        write_page(found, path, **options)


WRITERS = {
    "Recorder": (dump, "a.jsonl"),
    "compressed": (dump, "a.jsonl.zst"),
    "Cassette": (cassette, "a.jsonl"),
    "page": (page, "a.html"),
}
writers = pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS.keys())


@writers
def test_file_is_readable_only_by_its_owner(tmp_path: Path, write, name: str):
    write(tmp_path / name)
    assert bits(tmp_path / name) == 0o600


@writers
def test_other_permissions_can_be_given(tmp_path: Path, write, name: str):
    write(tmp_path / name, mode=0o664)
    assert bits(tmp_path / name) == 0o664


@writers
def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path, write, name: str):
    (tmp_path / name).touch()
    (tmp_path / name).chmod(0o644)
    write(tmp_path / name)
    assert bits(tmp_path / name) == 0o644
    assert (tmp_path / name).stat().st_size > 0


@writers
def test_a_link_to_a_file_that_is_not_there_creates_it(tmp_path: Path, write, name: str, umask: int):
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    write(tmp_path / name)
    assert bits(tmp_path / "elsewhere") == 0o600 & ~umask


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, 0o700), ({"mode": 0o640}, 0o750), ({"mode": 0o666}, 0o777)]
)
@pytest.mark.parametrize("write", [dump, cassette])
def test_created_folders_can_be_entered_by_readers(
    tmp_path: Path, write, options: dict[str, int], wanted: int
):
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o755)
    write(tmp_path / "there" / "run" / "dump" / "0.jsonl", **options)
    assert bits(tmp_path / "there") == 0o755
    assert bits(tmp_path / "there" / "run") == wanted
    assert bits(tmp_path / "there" / "run" / "dump") == wanted


@pytest.mark.parametrize("write", [dump, cassette])
def test_folders_keep_the_group_of_the_one_above(tmp_path: Path, write):
    """A folder with the set-group-ID bit gives it to those that are created in it, and its group to files."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    write(tmp_path / "shared" / "run" / "dump" / "0.jsonl", mode=0o640)
    assert bits(tmp_path / "shared" / "run") == bits(tmp_path / "shared" / "run" / "dump") == 0o2750


own_umask = pytest.mark.parametrize("umask", [0o022], indirect=True)
"""For tests whose process sets its own."""


@own_umask
@pytest.mark.parametrize("error", ["EPERM", "EACCES", "ENOTSUP", "ENOSYS"])
def test_file_systems_without_permissions_are_written_to_with_one_warning(tmp_path: Path, error: str):
    done = _write_where_permissions_fail(tmp_path, error)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"0.jsonl", "1.jsonl"}
    assert done.stderr.count("permissions") == 1
    assert str(tmp_path / "run") in done.stderr


@own_umask
def test_other_failures_to_set_permissions_are_raised(tmp_path: Path):
    done = _write_where_permissions_fail(tmp_path, "EIO")
    assert done.returncode != 0
    assert "Input/output error" in done.stderr


def _write_where_permissions_fail(folder: Path, error: str) -> subprocess.CompletedProcess[str]:
    """Create files and folders as on FUSE or vfat: they have the permissions that the mount gives them."""
    code = f"""
import errno, os
from pathlib import Path
def refuse(*_, **__):
    raise OSError(errno.{error}, os.strerror(errno.{error}))
os.chmod = os.fchmod = Path.chmod = refuse
os.umask(0o022)
from torchrl_agentic.tools import Cassette
from torchrl_agentic.messages import ToolResult
for step in range(2):
    with Cassette({str(folder / "run")!r} + f"/{{step}}.jsonl", mode=0o666) as tape:
        tape.append("t", "echo", "c1", {{}}, ToolResult.from_text("secret"), 0.0)
"""
    return run_program([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_each_file_of_a_folder_has_them(tmp_path: Path):
    """A step's file is created when its first trajectory ends."""
    with Recorder(tmp_path / "dump") as recorder:
        for step in range(3):
            recorder.step = step
            recorder.write(record())
    assert bits(tmp_path / "dump") == 0o700
    assert [bits(tmp_path / "dump" / f"{step}.jsonl") for step in range(3)] == [0o600] * 3


@pytest.mark.parametrize("make", [Recorder, Cassette])
@pytest.mark.parametrize(
    ("mode", "error", "said"),
    [("0600", TypeError, "such as 0o600"), (600, ValueError, "0o1130"), (0o444, ValueError, "0o444")],
)
def test_invalid_mode_is_rejected(tmp_path: Path, make, mode: object, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        make(tmp_path / "a.jsonl", mode=mode)
