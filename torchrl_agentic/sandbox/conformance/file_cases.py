"""The file API: files that are written can be read, and nothing outside /work is ever touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

from torchrl_agentic.errors import FilesNotCopied
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import never_infra, python, refused
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import SECRET, files_named, host_folder
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("files")


@group.case(needs=["files"])
async def a_file_that_is_written_is_read_back(sandbox: Sandbox) -> None:
    await sandbox.write_file("folder/file.bin", b"\0\xff data")
    assert await sandbox.read_file("/work/folder/file.bin") == b"\0\xff data"
    assert await sandbox.read_file("folder/file.bin", 2) == b"\0\xff"
    assert await sandbox.read_file("folder/file.bin", 0) == b""
    assert (await sandbox.run(["cat", "folder/file.bin"])).stdout.endswith(" data")


@group.case(needs=["files"])
async def written_files_belong_to_the_code(sandbox: Sandbox) -> None:
    await sandbox.write_file("folder/below/file", b"#!/bin/sh\n")
    change = "echo echo ran >> folder/below/file && chmod +x folder/below/file && folder/below/file"
    result = await sandbox.run(["sh", "-c", f"{change} && rm -r folder && ls"])
    assert result.stdout == "ran\n", result


@group.case(needs=["files"])
async def files_of_the_code_can_be_read(sandbox: Sandbox) -> None:
    await sandbox.run(["sh", "-c", "umask 077; mkdir -p a/b; printf content > a/b/file; touch empty"])
    assert await sandbox.read_file("a/b/file") == b"content"
    assert await sandbox.read_file("empty") == b""


@group.factory_case(needs=["files"])
async def files_persist_between_calls_but_not_after_closing(make: Make) -> None:
    sandbox = make()
    async with sandbox:
        await sandbox.run(["sh", "-c", "echo content > file"])
        assert (await sandbox.run(["cat", "file"])).stdout == "content\n"
        async with sandbox.fresh() as other:
            assert (await other.run(["cat", "file"])).exit_code != 0
    async with sandbox:
        assert (await sandbox.run(["cat", "file"])).exit_code != 0
        await refused(sandbox.read_file("file"), FileNotFoundError)


@group.case(needs=["files"])
async def the_last_content_is_the_only_one(sandbox: Sandbox) -> None:
    for data in (b"a long content", b"short", b""):
        await sandbox.write_file("file", data)
        assert await sandbox.read_file("file") == data


@group.case(needs=["files"])
async def large_files_go_there_and_back(sandbox: Sandbox) -> None:
    data = random.Random(0).randbytes(16 << 20)
    await sandbox.write_file("large", data)
    assert await sandbox.read_file("large") == data
    assert (await sandbox.run(["sh", "-c", "wc -c < large"])).stdout.strip() == str(len(data))


@group.case(needs=["files"])
async def names_may_be_odd(sandbox: Sandbox) -> None:
    for name in (
        "-rf",
        "--",
        "a b",
        "a\nb",
        "ünï",
        "日本",
        "...",
        "$(id)",
        "*",
        "'",
        "\x01",
        "x" * 255,
        "~",
        "a\\b",
    ):
        await sandbox.write_file(f"folder/{name}", name.encode())
        assert await sandbox.read_file(f"folder/{name}") == name.encode(), name
        assert (await sandbox.run(["cat", f"./folder/{name}"])).stdout == name, name


@group.case(needs=["files"])
async def invalid_names_are_refused(sandbox: Sandbox) -> None:
    """Each by an error about the path; the sandbox still works."""
    for path in ("x" * 256, "a\0b", "\ud800", "a/\udbff/b"):
        for written in (False, True):
            work = sandbox.write_file(path, b"x") if written else sandbox.read_file(path)
            with never_infra(f"{path[:10]!r}"):
                await refused(work, OSError, ValueError)
    await sandbox.write_file("after", b"well")
    assert await sandbox.read_file("after") == b"well"


@group.case(needs=["files"])
async def folders_may_be_nested_deeply(sandbox: Sandbox) -> None:
    """Alternatively an error about the path says that they are too deep."""
    for depth in (100, 3000):
        path = "x/" * depth + "file"
        try:
            await sandbox.write_file(path, b"deep")
            assert await sandbox.read_file(path) == b"deep"
        except OSError as error:
            assert depth > 100, error


@group.case()
async def paths_that_leave_the_workspace_are_refused(sandbox: Sandbox) -> None:
    outside = (
        "../secret",
        "/etc/passwd",
        "a/../../b",
        "/work/../etc/passwd",
        "/",
        "/workshop/x",
        "//etc/passwd",
        "..",
    )
    for path in outside:
        await refused(sandbox.read_file(path), PermissionError)
        await refused(sandbox.write_file(path, b"x"), PermissionError)


@group.case(needs=["files"])
async def a_missing_file_and_a_folder_are_told_apart(sandbox: Sandbox) -> None:
    await sandbox.run(["mkdir", "folder"])
    await refused(sandbox.read_file("missing"), FileNotFoundError)
    await refused(sandbox.read_file("missing/below"), FileNotFoundError)
    for path in ("folder", "folder/", ".", "/work", ""):
        await refused(sandbox.read_file(path), IsADirectoryError)
        await refused(sandbox.write_file(path, b"x"), IsADirectoryError)


@group.case(needs=["files"])
async def special_files_are_refused_at_once(sandbox: Sandbox) -> None:
    """A FIFO would block the reader forever."""
    await sandbox.run(["sh", "-c", "mkfifo pipe; touch file; ln -s /dev/zero zero"])
    async with asyncio.timeout(HANG_S):
        for path in ("pipe", "zero", "file/below"):
            await refused(sandbox.read_file(path), OSError)
            await refused(sandbox.write_file(path, b"x"), OSError)


@group.case(needs=["files"])
async def links_of_the_model_are_not_followed(sandbox: Sandbox) -> None:
    with host_folder() as folder:
        links = f"ln -s /etc/passwd link; ln -s {folder}/secret file; ln -s {folder} folder; ln -s link chain"
        await sandbox.run(
            ["sh", "-c", f"{links}; mkdir d; ln -s ../file d/up; ln -s {folder}/new dangling; ln -s d inner"]
        )
        for path in ("link", "file", "folder/secret", "chain", "d/up", "inner/x"):
            await refused(sandbox.read_file(path), PermissionError)
        for path in ("file", "folder/planted", "dangling", "folder/a/b", "inner/x"):
            await refused(sandbox.write_file(path, b"x"), PermissionError)
        assert [path.name for path in folder.iterdir()] == ["secret"]
        assert (folder / "secret").read_text() == SECRET


@group.case(needs=["files"], limits=ResourceLimits(disk_bytes=None, disk_total_bytes=None))
async def the_head_of_a_huge_file_is_read_without_the_rest(sandbox: Sandbox) -> None:
    assert (await python(sandbox, "open('huge', 'wb').truncate(1 << 34)")).exit_code == 0
    async with asyncio.timeout(HANG_S):
        assert await sandbox.read_file("huge", 10) == bytes(10)


@group.case(needs=["files"])
async def many_files_can_be_read_and_written_at_the_same_time(sandbox: Sandbox) -> None:
    async def there_and_back(number: int) -> bool:
        await sandbox.write_file(f"folder/{number}", b"%d" % number * 1000)
        return await sandbox.read_file(f"folder/{number}") == b"%d" % number * 1000

    command = asyncio.create_task(sandbox.run(["sleep", "0.2"]))
    assert all(await asyncio.gather(*map(there_and_back, range(40))))
    assert (await command).exit_code == 0


@group.factory_case(needs=["files"])
async def files_and_links_are_copied_with_their_type(make: Make) -> None:
    """A link of the model stays a link, and special files do not block."""
    made = "mkdir -p a/b; printf one > a/b/file; chmod 700 a/b/file; printf two > '-x\ny'; mkfifo pipe a/e"
    with host_folder() as folder:
        async with make() as sandbox, make() as other:
            await sandbox.run(["sh", "-c", f"{made}; ln -s {folder}/secret link; ln -s {folder} out"])
            await other.run(["sh", "-c", f"printf old > kept; ln -s {folder}/secret ./'-x\ny'"])
            await sandbox.copy_files(other)
            assert await other.read_file("a/b/file") == b"one"
            assert await other.read_file("-x\ny") == b"two"
            assert await other.read_file("kept") == b"old"
            assert (await other.run(["sh", "-c", "test -x a/b/file && test -L link"])).exit_code == 0
            await refused(other.read_file("link"), PermissionError)
        assert [path.name for path in folder.iterdir()] == ["secret"]
        assert (folder / "secret").read_text() == SECRET


@group.factory_case(needs=["files"])
async def odd_folders_are_copied_or_are_the_fault_of_the_code(make: Make) -> None:
    """Deep folders, holes, hard links, odd names; then a folder without rights, which may be refused."""
    code = """
        import os
        top = os.open('.', os.O_RDONLY)
        for _ in range(900): os.mkdir('d'); os.chdir('d')
        open('bottom', 'w').write('deep'); os.fchdir(top)
        for name in ('holes', 'more'): open(name, 'wb').truncate(48 << 20)
        open('one', 'wb').write(bytes(4 << 20))
        for number in range(30): os.link('one', f'link{number}')
        os.mkfifo('pipe'); os.mkdir('dir'); os.link('one', 'dir/link')
        for name in (b'\\xff\\n', b'-rf', b'x' * 255, 'é*?'.encode()): os.close(os.open(name, os.O_CREAT))
    """
    look = """
        import os
        top = os.open('.', os.O_RDONLY)
        for name in (b'\\xff\\n', b'-rf', b'x' * 255, 'é*?'.encode()): os.stat(name)
        print([os.stat(name).st_size >> 20 for name in ('holes', 'more', 'one', 'dir/link')])
        print(sum(os.stat(name).st_blocks >> 11 for name in ('holes', 'more')), os.stat('one').st_nlink)
        for _ in range(900): os.chdir('d')
        print(open('bottom').read())
    """
    async with make() as sandbox, make() as other:
        assert (await python(sandbox, code)).exit_code == 0
        async with asyncio.timeout(HANG_S):
            await sandbox.copy_files(other)
        assert (await python(other, look)).stdout == "[48, 48, 4, 4]\n0 32\ndeep\n"
        await sandbox.run(["sh", "-c", "mkdir shut; touch shut/file; chmod 000 shut"])
        with contextlib.suppress(FilesNotCopied):
            await sandbox.copy_files(other)


@group.case(needs=["files"])
async def rights_that_code_takes_away_are_its_own_mistake(sandbox: Sandbox) -> None:
    await sandbox.run(["sh", "-c", "mkdir shut; touch shut/file locked; chmod 000 shut locked ."])
    for path in ("locked", "shut/file"):
        with contextlib.suppress(OSError):
            await sandbox.read_file(path)
        with contextlib.suppress(OSError):
            await sandbox.write_file(path, b"x")
    assert isinstance((await sandbox.run(["true"])).exit_code, int)


@group.factory_case("file_size", needs=["files", "disk_total"])
async def a_full_sandbox_takes_no_more_files(make: Make) -> None:
    async with make(ResourceLimits(disk_total_bytes=2 << 20)) as sandbox:
        await refused(sandbox.write_file("large", bytes(8 << 20)), OSError)
        await sandbox.run(["rm", "-f", "large"])
        await sandbox.write_file("small", b"well")
        assert await sandbox.read_file("small") == b"well"


@group.factory_case(needs=["files"])
async def closing_removes_files_that_are_hard_to_remove(make: Make) -> None:
    name = f"conformance-{os.getpid()}"
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"
    async with make() as sandbox:
        await sandbox.run(
            ["sh", "-c", f"mkdir -p a/b/c; touch {name}; ln -s / link; mkfifo pipe; chmod 000 a/b a"]
        )
        await python(sandbox, deep)
        await sandbox.run(["chmod", "000", "."])
    assert not files_named(name)
