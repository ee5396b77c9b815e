"""Granted folders are there in every tier, wherever they lie, or refused when the sandbox is made."""

import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from torchrl_agentic.errors import ToolError
from torchrl_agentic.repl import ForkServerRepl
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ForkServerSandbox,
    LandlockSandbox,
    ResourceLimits,
    bubblewrap,
    forkserver_sandbox,
    landlock,
)
from torchrl_agentic.sandbox import python_runtime as found
from torchrl_agentic.tools import FileReadTool, FileWriteTool
from torchrl_agentic.tools.base import ToolContext

TIERS = {
    ForkServerSandbox: forkserver_sandbox.cannot_work(),
    BubblewrapSandbox: bubblewrap.why_not(),
    LandlockSandbox: landlock.why_not(),
}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root is somebody else inside")


@pytest.fixture(params=TIERS, ids=lambda kind: kind.name)
def kind(request):
    if TIERS[request.param] is not None:
        pytest.skip(TIERS[request.param])
    return request.param


@pytest.fixture(params=["/tmp", "/var/tmp", "/dev/shm"])
def folder(request) -> Generator[Path]:
    """A folder of the host's that others may read, with a file in a folder in it."""
    made = Path(tempfile.mkdtemp(dir=request.param, prefix="roots-"))
    (made / "below").mkdir()
    (made / "below" / "f").write_text("in")
    for path in (made, made / "below"):
        path.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def elsewhere() -> Generator[Path]:
    """The same, in one place, for what does not depend on it."""
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="roots-"))
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made, ignore_errors=True)


def writable(path: Path) -> None:
    path.chmod(0o777)


async def test_a_folder_that_can_be_read_is_there_and_cannot_be_written(kind, folder):
    """Not even where the host's rights would allow it."""
    writable(folder)
    writable(folder / "below")
    async with kind(ResourceLimits(fs_read_roots=(str(folder),))) as sandbox:
        assert (await sandbox.run(["cat", f"{folder}/below/f"])).stdout == "in"
        for command in (
            ["touch", f"{folder}/new"],
            ["rm", f"{folder}/below/f"],
            ["chmod", "777", str(folder)],
        ):
            assert (await sandbox.run(command)).exit_code != 0
    assert [path.name for path in folder.iterdir()] == ["below"]


async def test_a_folder_that_can_be_written_is_the_hosts(kind, folder):
    writable(folder)
    async with kind(ResourceLimits(fs_write_roots=(str(folder),))) as sandbox:
        result = await sandbox.run(["sh", "-c", f"cat {folder}/below/f && echo out > {folder}/new"])
        assert (result.stdout, result.exit_code) == ("in", 0)
    assert (folder / "new").read_text() == "out\n"


async def test_writable_folder_may_be_inside_a_readable_one(kind, folder):
    writable(folder)
    writable(folder / "below")
    limits = ResourceLimits(fs_read_roots=(str(folder),), fs_write_roots=(f"{folder}/below",))
    async with kind(limits) as sandbox:
        assert (await sandbox.run(["touch", f"{folder}/below/new"])).exit_code == 0
        assert (await sandbox.run(["touch", f"{folder}/new"])).exit_code != 0
    assert (folder / "below" / "new").exists()


async def test_one_file_can_be_granted(kind, folder):
    (folder / "below" / "g").write_text("other")
    path = f"{folder}/below/f"
    async with kind(ResourceLimits(fs_read_roots=(path,))) as sandbox:
        assert (await sandbox.run(["cat", path])).stdout == "in"
        assert await sandbox.read_file(path) == b"in"
        assert (await sandbox.run(["cat", f"{folder}/below/g"])).exit_code != 0


async def test_an_interpreter_and_its_clones_see_the_folder_and_copy_nothing_of_it(folder):
    if TIERS[ForkServerSandbox] is not None:
        pytest.skip(TIERS[ForkServerSandbox])
    (folder / "large").write_bytes(bytes(3 << 20))
    limits = ResourceLimits(fs_read_roots=(str(folder),), disk_total_bytes=2 << 20)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        await repl.execute(f"x = open('{folder}/below/f').read(); open('/tmp/own', 'w').write('mine')")
        (clone,) = await repl.fork()
        async with clone:
            code = f"x, open('{folder}/below/f').read(), open('/tmp/own').read()"
            assert (await clone.execute(code)).value == "('in', 'in', 'mine')"
            size = await clone.execute(f"import os; os.path.getsize('{folder}/large')")
            assert size.value == str(3 << 20)


async def test_folders_below_those_of_the_sandbox_do_not_take_their_place(kind, folder):
    async with kind(ResourceLimits(fs_read_roots=(str(folder),))) as sandbox:
        await sandbox.write_file("f", b"mine")
        command = "cat f; for d in /work /tmp /dev/shm; do touch $d/x || exit 1; done; ls /tmp"
        result = await sandbox.run(["sh", "-c", command if kind is not LandlockSandbox else "cat f"])
        assert result.exit_code == 0
        assert result.stdout.startswith("mine")
        assert "roots-" not in result.stdout or folder.parent == Path("/tmp")
        listed = [name for name in result.stdout.split() if name.startswith("roots-")]
        assert listed in ([], [folder.name])


@pytest.mark.parametrize("kind", [ForkServerSandbox, BubblewrapSandbox])
@pytest.mark.parametrize("root", ["/", "/tmp", "/dev", "/dev/shm", "/proc", "/proc/self", "/dev/fd"])
def test_a_folder_that_the_sandbox_has_of_its_own_is_refused(kind, root):
    with pytest.raises(ValueError, match=f"fs_read_roots grants '{root}', but"):
        kind(ResourceLimits(fs_read_roots=(root,)))


def test_missing_folder_is_rejected(kind):
    with pytest.raises(ValueError, match="fs_write_roots grants '/no/such/place', but it does not exist"):
        kind(ResourceLimits(fs_write_roots=("/no/such/place",)))


@root_only
def test_folder_inside_one_for_root_only_is_rejected_with_the_remedy(kind, elsewhere):
    inner = elsewhere / "inner"
    inner.mkdir()
    elsewhere.chmod(0o700)
    with pytest.raises(ValueError, match=f"chmod o\\+x {elsewhere}, or put it elsewhere"):
        kind(ResourceLimits(fs_read_roots=(str(inner),)))
    link = Path(tempfile.mkdtemp(dir="/var/tmp")) / "link"
    link.parent.chmod(0o755)
    link.symlink_to(inner)
    try:
        with pytest.raises(ValueError, match=f"chmod o\\+x {elsewhere}"):
            kind(ResourceLimits(fs_read_roots=(str(link),)))
    finally:
        shutil.rmtree(link.parent)


@root_only
def test_a_folder_that_root_keeps_for_itself_is_refused_with_the_remedy(kind, elsewhere):
    elsewhere.chmod(0o700)
    with pytest.raises(ValueError, match=f"may not read it: chmod -R o\\+rX {elsewhere}"):
        kind(ResourceLimits(fs_read_roots=(str(elsewhere),)))
    elsewhere.chmod(0o755)
    with pytest.raises(ValueError, match=f"may not write it: chown -R 65534 {elsewhere}"):
        kind(ResourceLimits(fs_write_roots=(str(elsewhere),)))


async def test_the_remedies_help(kind, elsewhere):
    if os.geteuid() == 0:
        os.chown(elsewhere, 65534, -1)
    async with kind(ResourceLimits(fs_write_roots=(str(elsewhere),))) as sandbox:
        assert (await sandbox.run(["touch", f"{elsewhere}/new"])).exit_code == 0


async def test_file_tools_follow_the_granted_folders(kind, folder):
    writable(folder / "below")
    limits = ResourceLimits(fs_read_roots=(str(folder),), fs_write_roots=(f"{folder}/below",))
    ctx = ToolContext(call_id="c1")
    async with kind(limits) as sandbox:
        read, write = FileReadTool(sandbox), FileWriteTool(sandbox)
        assert (await read.run({"path": f"{folder}/below/f"}, ctx)).text == "in"
        await write.run({"path": f"{folder}/below/deep/er/g", "content": "out"}, ctx)
        assert (await sandbox.run(["sh", "-c", f"echo more >> {folder}/below/deep/er/g"])).exit_code == 0
        assert (await read.run({"path": f"{folder}/below/deep/er/g"}, ctx)).text == "outmore\n"
        for path in (f"{folder}/g", f"{folder}/below/../g", "/etc/passwd", f"{folder}x/f", f"{folder}/new/g"):
            with pytest.raises(ToolError):
                await write.run({"path": path, "content": "x"}, ctx)
        for path in (f"{folder}/../x", f"{folder}", f"{folder}/none", "/etc/passwd", f"{folder}x/f"):
            with pytest.raises(ToolError):
                await read.run({"path": path}, ctx)
    assert sorted(path.name for path in folder.iterdir()) == ["below"]


async def test_file_tools_follow_no_link_out_of_a_granted_folder(kind, folder):
    writable(folder)
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("/etc")
    async with kind(ResourceLimits(fs_write_roots=(str(folder),))) as sandbox:
        await sandbox.run(["ln", "-s", "/etc/hostname", f"{folder}/planted"])
        for name in ("link", "up/passwd", "planted"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(f"{folder}/{name}")
            with pytest.raises(PermissionError):
                await sandbox.write_file(f"{folder}/{name}", b"x")


@root_only
async def test_file_tools_can_do_no_more_than_code_inside(kind, folder):
    """Root reads and writes files of the host that the user nobody cannot."""
    writable(folder)
    (folder / "secret").write_text("of root")
    (folder / "secret").chmod(0o600)
    (folder / "private").mkdir(mode=0o700)
    (folder / "private" / "f").write_text("of root")
    async with kind(ResourceLimits(fs_write_roots=(str(folder),))) as sandbox:
        for path in ("secret", "private/f"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(f"{folder}/{path}")
        for path in ("secret", "private/f", "private/new", "below/f", "below/new", "below/new/f"):
            with pytest.raises(PermissionError):
                await sandbox.write_file(f"{folder}/{path}", b"x")
    assert (folder / "secret").read_text() == "of root"
    assert (folder / "below" / "f").read_text() == "in"


class TestPackages:
    """Which folders of packages are shown, by the `sys.path` that `site` has made."""

    @pytest.fixture(autouse=True)
    def anew(self) -> Generator[None]:
        found.find_packages.cache_clear()
        yield
        found.find_packages.cache_clear()

    @pytest.fixture
    def same_version(self) -> None:
        inside = found.find_python()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if inside is None or Path(inside[0]).resolve().name != version:
            pytest.skip("inside runs another Python, and sees no packages")

    @pytest.fixture
    def overlay(self, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder of packages that a `.pth` file adds, and a project that another one adds, as editable."""
        site_packages, project = elsewhere / "other" / "site-packages", elsewhere / "project"
        for folder in (site_packages, project):
            folder.mkdir(parents=True)
        (site_packages / "overlaid.py").write_text("x = 1")
        own = elsewhere / "site-packages"
        own.mkdir()
        (own / "both.pth").write_text(f"{site_packages}\n{project}\n")
        monkeypatch.setattr(sys, "path", [*sys.path])
        site.addsitedir(str(own))
        assert str(project) in sys.path
        return elsewhere

    def test_those_of_overlays_are_and_projects_are_not(self, overlay):
        folders = found.package_folders()
        assert str(overlay / "other" / "site-packages") in folders
        assert str(overlay / "project") not in folders
        assert folders.index(sysconfig.get_path("purelib")) < folders.index(str(overlay / "site-packages"))

    @pytest.mark.usefixtures("overlay", "same_version")
    async def test_a_package_of_an_overlay_can_be_imported_inside(self, kind):
        async with kind() as sandbox:
            result = await sandbox.run([*sandbox.python_argv, "-c", "import overlaid; print(overlaid.x)"])
        assert result.stdout == "1\n", result.stderr

    @root_only
    @pytest.mark.usefixtures("same_version")
    def test_folders_for_root_only_are_logged(self, overlay, caplog):
        overlay.chmod(0o700)
        assert not [folder for folder in found.find_packages() if folder.startswith(str(overlay))]
        assert f"cannot use the packages in {overlay}/other/site-packages" in caplog.text

    def test_python_of_another_version_is_logged(self, monkeypatch, caplog):
        monkeypatch.setattr(found, "find_python", lambda: ("/usr/bin/python2.7", None))
        assert not found.find_packages()
        assert "another version" in caplog.text
