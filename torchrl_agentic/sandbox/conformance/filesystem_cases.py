"""File systems: code inside reaches nothing of the host that was not granted."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import check_attacks_stopped, prepared_inside, python
from torchrl_agentic.sandbox.conformance.base import CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import (
    SECRET,
    files_named,
    full_folders,
    host_folder,
    host_secrets,
    new_mark,
    secret_file,
)
from torchrl_agentic.sandbox.python_runtime import find_packages

group = CaseGroup("filesystem")


@group.case("host_files")
async def files_of_the_host_cannot_be_read(sandbox: Sandbox) -> None:
    code = """
        for path in paths:
            attempt(path, lambda: open(path).read())
    """
    with host_secrets() as paths:
        more = (
            "/etc/shadow",
            "/etc/gshadow",
            "/root/.bash_history",
            "/root/.ssh/id_rsa",
            "/proc/kcore",
            "/dev/mem",
        )
        await check_attacks_stopped(sandbox, code, paths=[*paths, *more])


@group.case("host_files")
async def folders_of_the_host_cannot_be_listed(sandbox: Sandbox) -> None:
    code = """
        for place in places:
            attempt(place, lambda: expect(os.listdir(place) and os.path.realpath(place) != os.getcwd()))
    """
    with host_folder() as folder:
        places = full_folders(
            str(folder), "/root", "/var/lib", "/boot", "/mnt", "/media", "/srv", str(Path.home())
        )
        await check_attacks_stopped(sandbox, code, places=places)


@group.case("host_metadata")
async def files_and_services_of_the_host_are_out_of_sight(sandbox: Sandbox) -> None:
    services = (
        "/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/systemd/private",
        "/run/dbus/system_bus_socket", "/run/secrets", "/var/run/secrets/kubernetes.io", "/tmp/.X11-unix",
        "/run/user",
    )  # fmt: skip
    code = """
        for path in paths: attempt(path, lambda: expect(os.stat(path).st_size == len(secret)))
        for path in services: attempt(path, lambda: os.stat(path))
    """
    with host_secrets() as paths:
        await check_attacks_stopped(sandbox, code, paths=paths, services=services, secret=SECRET)


@group.case("host_paths", needs=["linux"])
async def paths_of_the_host_are_hidden(sandbox: Sandbox) -> None:
    """Those of packages and folders that are shown inside, under these or other paths."""
    code = """
        shown = os.getcwd()
        for name in ('mountinfo', 'mounts', 'mountstats'):
            try: shown += open('/proc/self/' + name).read()
            except OSError: pass
        for path in paths: attempt(path, lambda: expect(path in shown))
    """
    workspaces = os.path.join(tempfile.gettempdir(), "torchrl_agentic-")
    await check_attacks_stopped(sandbox, code, paths=[workspaces, *find_packages()])


@group.case("host_metadata")
async def rights_and_times_of_the_hosts_files_cannot_be_changed(sandbox: Sandbox) -> None:
    code = """
        own = os.path.realpath(sys.executable)
        for path in (folder + '/secret', folder, '/usr/bin/env', '/bin/sh', own, os.__file__):
            attempt('chmod ' + path, lambda: os.chmod(path, os.stat(path).st_mode))
            attempt('utime ' + path, lambda: os.utime(path))
            attempt('chown ' + path, lambda: os.chown(path, os.getuid(), os.getgid()))
            attempt('xattr ' + path, lambda: os.setxattr(path, 'user.planted', b'x'))
    """
    with host_folder() as folder:
        await check_attacks_stopped(sandbox, code, folder=str(folder))


@group.case("host_files")
async def files_of_the_host_cannot_be_written(sandbox: Sandbox) -> None:
    code = """
        import sysconfig
        places = ['/', '/usr', '/usr/bin', '/usr/lib', '/etc', '/var', '/opt', '/home', '/boot', '/proc']
        places += ['/sys', '/lib', '/bin', folder]
        places += [sysconfig.get_path('stdlib'), sysconfig.get_path('purelib')]
        for place in filter(None, places + sys.path):
            attempt(place, lambda: open(place + '/planted', 'w'))
            attempt('mkdir ' + place, lambda: os.mkdir(place + '/planted'))
            attempt('link ' + place, lambda: os.symlink('/', place + '/planted'))
        own = os.path.realpath(sys.executable)
        for path in (folder + '/secret', '/usr/bin/env', '/bin/sh', own, os.__file__):
            attempt('append ' + path, lambda: open(path, 'a'))
            attempt('truncate ' + path, lambda: os.truncate(path, os.stat(path).st_size))
            attempt('rename ' + path, lambda: os.rename(path, path + '-moved'))
            attempt('remove ' + path, lambda: os.unlink(path + '-moved'))
    """
    with host_folder() as folder:
        await check_attacks_stopped(sandbox, code, folder=str(folder))
        assert [path.name for path in folder.iterdir()] == ["secret"]


@group.case("host_files")
async def temporary_files_of_the_host_are_not_those_inside(sandbox: Sandbox) -> None:
    name = f"conformance-{new_mark()}"
    code = """
        import os
        for place in ('/tmp', '/var/tmp', '/dev/shm'):
            if os.access(place, os.W_OK): open(place + '/' + name, 'w').close()
    """
    await python(sandbox, code, name=name)
    assert not files_named(name)


@group.case("host_files", needs=["linux"])
async def paths_through_proc_lead_to_no_other_root(sandbox: Sandbox) -> None:
    code = """
        for pid in processes() + ['self', 'thread-self']:
            for link in ('root', 'cwd', 'cwd/../../../../..', 'root/../..', 'task/1/root', 'fd/0/../../..'):
                attempt(link, lambda: open(f'/proc/{pid}/{link}{path}').read())
        def climb():
            for _ in range(99): os.chdir('..')
            open(path[1:])
        attempt('..', climb)
        attempt('/work/../..', lambda: open('/work/../../..' + path))
    """
    with host_folder() as folder:
        await check_attacks_stopped(sandbox, code, path=f"{folder}/secret")


@group.attacks("host_files", needs=["linux"])
def programs_that_run_cannot_be_overwritten() -> str:
    """The class of CVE-2019-5736."""
    return """
        for pid in processes() + ['self']:
            attempt(f'{pid}/exe', lambda: os.open(f'/proc/{pid}/exe', os.O_RDWR))
            attempt(f'touch {pid}/exe', lambda: os.utime(f'/proc/{pid}/exe'))
            attempt(f'{pid}/map_files', lambda: [os.open(f'/proc/{pid}/map_files/{name}', os.O_RDWR)
                for name in os.listdir(f'/proc/{pid}/map_files')] or expect(False))
    """


@group.case("host_files", needs=["linux"])
async def files_that_others_have_open_are_out_of_reach(sandbox: Sandbox) -> None:
    code = """
        for pid in processes():
            for number in {number_of_secret, *range(40)}:
                path = f'/proc/{pid}/fd/{number}'
                if os.path.isfile(path):
                    attempt(path, lambda: expect(secret in open(path, errors='replace').read()))
    """
    with secret_file() as number:
        await check_attacks_stopped(sandbox, code, secret=SECRET, number_of_secret=number)


@group.case("host_files")
async def hard_links_to_files_of_the_host_cannot_be_made(sandbox: Sandbox) -> None:
    code = """
        attempt('link', lambda: os.link(path, 'linked'))
        attempt('follow', lambda: os.link('/proc/self/root' + path, 'followed', follow_symlinks=True))
        def by_number():
            fd = os.open(path, os.O_RDONLY)
            os.link(f'/proc/self/fd/{fd}', 'numbered', follow_symlinks=True)
        attempt('number', by_number)
    """
    with host_folder() as folder:
        await check_attacks_stopped(sandbox, code, path=f"{folder}/secret")


@group.case("host_files", needs=["linux"])
async def device_nodes_cannot_be_made(sandbox: Sandbox) -> None:
    code = """
        import stat
        def node(kind, number, path):
            os.mknod(path, 0o666 | kind, os.makedev(*number)); os.unlink(path)
        for place in ('.', '/tmp', '/dev', '/dev/shm'):
            for number in ((1, 1), (1, 2), (1, 11), (10, 232)):
                attempt(f'{number} in {place}', lambda: node(stat.S_IFCHR, number, f'{place}/{name}'))
            for number in ((8, 0), (254, 0), (7, 0)):
                attempt(f'disk {number} in {place}', lambda: node(stat.S_IFBLK, number, f'{place}/{name}'))
    """
    await check_attacks_stopped(sandbox, code, name=f"conformance-{new_mark()}")


@group.attacks("host_files", needs=["linux"])
def devices_are_only_those_that_every_program_needs() -> str:
    """Zero, null, random numbers and terminals, but no disk, kernel memory or virtual machine."""
    return """
        import stat
        harmless = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)}
        def device(path):
            status = os.stat(path)
            number = os.major(status.st_rdev), os.minor(status.st_rdev)
            expect(stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode) and number not in harmless)
            os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        for folder, names, files in os.walk('/dev'):
            names[:] = [name for name in names if name != 'pts']
            for name in files: attempt(name, lambda: device(os.path.join(folder, name)))
    """


@group.attacks("privileges", needs=["linux"])
def settings_of_the_kernel_cannot_be_written() -> str:
    """By files in /proc and /sys, except those about own namespaces."""
    return """
        import re
        of_ipc_and_pid = 'kernel/(msg|shm|sem$|auto_msgmni|ns_last_pid|pid_max)'
        own = re.compile(f'/proc/sys/(fs/mqueue/|net/|user/|{of_ipc_and_pid})')
        names = ['sysrq-trigger', 'kcore', 'kmsg', 'kallsyms', 'timer_list', 'acpi/wakeup']
        names += ['irq/default_smp_affinity', 'sys/kernel/core_pattern', 'sys/kernel/modprobe']
        names += ['sys/kernel/hostname', 'sys/kernel/sysrq', 'sys/kernel/randomize_va_space']
        names += ['sys/vm/drop_caches', 'sys/vm/overcommit_memory', 'sys/net/ipv4/ip_forward']
        names += ['sys/fs/binfmt_misc/register']
        for name in names: attempt(name, lambda: os.open('/proc/' + name, os.O_WRONLY))
        for folder, _, names in os.walk('/proc/sys'):
            for path in (os.path.join(folder, name) for name in names):
                if os.access(path, os.W_OK) and not own.match(path):
                    attempt(path, lambda: os.open(path, os.O_WRONLY))
        for name in ('kernel/uevent_helper', 'power/state', 'fs/cgroup/cgroup.procs', 'kernel/mm/ksm/run',
                     'fs/cgroup/release_agent', 'kernel/security/apparmor/.load'):
            attempt('/sys/' + name, lambda: os.open('/sys/' + name, os.O_WRONLY))
    """


@group.case("privileges", needs=["x86_64"])
async def mounts_cannot_be_changed(sandbox: Sandbox) -> None:
    code = """
        mount, umount, pivot, chroot = 165, 166, 155, 161
        bind, remount, move, private = 4096, 32, 8192, 1 << 18
        os.makedirs('m/old')
        for path in (b'/', b'/usr', b'/work', b'/proc', b'/dev', b'/tmp'):
            for flags in (remount, remount | bind, bind, private):
                attempt(f'mount {path} {flags}', lambda: syscall(mount, b'/', path, None, flags, None))
            attempt(f'umount {path}', lambda: syscall(umount, path, 2))
        for kind in (b'tmpfs', b'proc', b'sysfs', b'devtmpfs', b'cgroup2', b'overlay', b'mqueue', b'debugfs'):
            attempt(f'mount {kind}', lambda: syscall(mount, kind, b'm', kind, 0, b'lowerdir=/usr:/etc'))
            attempt(f'fsopen {kind}', lambda: syscall(430, kind, 0))
        attempt('move', lambda: syscall(mount, b'/tmp', b'm', None, move, None))
        attempt('open_tree', lambda: syscall(428, -100, b'/', 1))
        attempt('fspick', lambda: syscall(433, -100, b'/', 0))
        attempt('mount_setattr', lambda: syscall(442, -100, b'/', 0x8000, bytes(32), 32))
        attempt('pivot_root', lambda: syscall(pivot, b'm', b'm/old'))
        attempt('chroot', lambda: syscall(chroot, b'm'))
        attempt('swapon', lambda: syscall(167, b'm', 0))
    """
    await check_attacks_stopped(sandbox, code)
    for argv in (
        ["mount", "-t", "tmpfs", "none", "/tmp"],
        ["mount", "-o", "remount,rw", "/"],
        ["umount", "/proc"],
    ):
        assert (await sandbox.run(argv)).exit_code != 0, argv
    assert (await sandbox.run(["chroot", "/tmp", "true"])).exit_code != 0


@group.factory_case("host_files", needs=["linux"])
async def two_sandboxes_share_no_folder_that_can_be_written(make: Make) -> None:
    """One sandbox leaves a file wherever it can: in its own file systems, and in writable mounts."""
    name = f"conformance-{new_mark()}"
    plant = """
        import os
        places = [os.getcwd(), '/', '/work', '/tmp', '/var/tmp', '/dev', '/dev/shm', '/run', '/opt', '/mnt']
        try:
            mounts = [line.split() for line in open('/proc/self/mounts')]
            places += [words[1] for words in mounts if 'ro' not in words[3].split(',')]
        except OSError: pass
        for place in dict.fromkeys(places):
            if place.startswith('/proc'): continue
            for folder, names, _ in os.walk(place):
                if folder.count('/') > place.count('/') + 1: del names[:]
                try:
                    open(os.path.join(folder, name), 'w').close()
                    print(os.path.join(folder, name))
                except OSError:
                    pass
    """
    look = "for path in paths: attempt(path, lambda: open(path))"
    clear = "import os\nfor path in paths:\n    os.path.exists(path) and os.unlink(path)"
    async with make() as sandbox, make() as other:
        paths = (await python(sandbox, plant, name=name)).stdout.splitlines()
        assert paths, "it can write nowhere, not even in /work"
        try:
            await check_attacks_stopped(other, look, paths=paths)
        finally:
            await python(sandbox, clear, paths=paths)


@group.factory_case("terminal", needs=["linux"])
async def two_sandboxes_share_no_terminals(make: Make) -> None:
    code = "a, b = os.openpty(); print(os.ttyname(b))"
    attack = """
        attempt(path, lambda: os.open(path, os.O_RDWR | os.O_NOCTTY))
        attempt('the list of terminals', lambda: expect(set(os.listdir('/dev/pts')) - {'ptmx'}))
    """
    async with make() as sandbox, make() as other, prepared_inside(sandbox, code) as path:
        await check_attacks_stopped(other, attack, path=path.strip())
