"""Rights that were not granted cannot be gained by any system call."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import check_attacks_stopped, prepared_inside, python
from torchrl_agentic.sandbox.conformance.base import CaseGroup
from torchrl_agentic.sandbox.conformance.host_cases import (
    oom_score_adj,
    trainer,
)

group = CaseGroup("rights")


@group.case("privileges", needs=["linux"])
async def a_process_has_no_privileges(sandbox: Sandbox) -> None:
    """According to the kernel, also if /proc is not available."""
    code = """
        import ctypes, os, struct
        libc = ctypes.CDLL(None)
        header, words = struct.pack('<Ii', 0x20080522, 0), ctypes.create_string_buffer(24)
        print('capget', libc.capget(header, words))
        print('held', sum(struct.unpack('<6I', words.raw)))
        print('ambient', sum(libc.prctl(47, 1, number, 0, 0) == 1 for number in range(64)))
        print('can_get_more', 1 - libc.prctl(39, 0, 0, 0, 0))
        print('root', int(0 in os.getresuid() + os.getresgid() + tuple(os.getgroups())))
        print('filter', libc.prctl(21, 0, 0, 0, 0))
    """
    for before in ("", "import os, sys\nif os.fork(): sys.exit(os.wait()[1])"):
        result = await python(sandbox, code, before=before)
        found = dict(line.split() for line in result.stdout.splitlines())
        used = found.pop("filter", None)
        assert len(found) == 5, result
        assert set(found.values()) == {"0"}, found
        assert used == "2" or not sandbox.limits_enforced.get("seccomp"), f"no system call filter: {used}"


@group.attacks("privileges")
def the_user_cannot_be_changed() -> str:
    return """
        for name in ('setuid', 'setgid', 'seteuid', 'setegid'): attempt(name, lambda: getattr(os, name)(0))
        for name in ('setreuid', 'setregid'): attempt(name, lambda: getattr(os, name)(0, 0))
        for name in ('setresuid', 'setresgid'): attempt(name, lambda: getattr(os, name)(0, 0, 0))
        attempt('setgroups', lambda: os.setgroups([0, 27]))
        attempt('setuid 65533', lambda: os.setuid(65533))
        attempt('chown', lambda: (open('mine', 'w'), os.chown('mine', 0, 0)))
    """


@group.attacks("privileges", needs=["x86_64"])
def capabilities_cannot_be_taken() -> str:
    return """
        import struct
        header, one = struct.pack('<Ii', 0x20080522, 0), 1 << 21
        for bits in (1 << 7, 1 << 12, one, 0xffffffff):
            attempt('capset', lambda: syscall(126, header, struct.pack('<6I', *[bits] * 3, 0, 0, 0)))
        attempt('ambient', lambda: syscall(157, 47, 2, 21, 0, 0))
        attempt('keep', lambda: (syscall(157, 38, 0, 0, 0, 0)))
    """


@group.attacks("privileges", needs=["linux"])
def setuid_programs_give_no_rights() -> str:
    return """
        import shutil, subprocess
        pipe = subprocess.PIPE
        def user(argv):
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)
            time.sleep(0.02)
            lines = open(f'/proc/{process.pid}/status').readlines()
            process.kill()
            expect('0' in [line for line in lines if line.startswith('Uid:')][0].split())
        for name in ('su', 'passwd', 'newgrp', 'chsh', 'mount', 'pkexec', 'fusermount3'):
            if shutil.which(name): attempt(name, lambda: user([shutil.which(name)]))
        shutil.copy(shutil.which('sleep'), 'mine')
        def give():
            os.chown('mine', 0, 0); os.chmod('mine', 0o6755); user(['./mine', '9'])
        attempt('chmod', give)
    """


@group.case("privileges", needs=["x86_64"])
async def no_namespace_can_be_made(sandbox: Sandbox) -> None:
    code = """
        import struct
        kinds = dict(user=1 << 28, mount=1 << 17, pid=1 << 29, net=1 << 30, ipc=1 << 27, uts=1 << 26,
                     cgroup=1 << 25, time=1 << 7)
        for name, kind in kinds.items():
            for more in (0, kinds['user']):
                attempt(f'unshare {name}', lambda: syscall(272, kind | more))
                if name == 'time': continue  # of clone(2), a part of the number of the signal
                def clone(number, *words):
                    if syscall(number, *words) == 0: os._exit(0)
                attempt(f'clone {name}', lambda: clone(56, kind | more | 17, None, None, None, None))
                words = struct.pack('<8Q', kind | more, 0, 0, 0, 17, 0, 0, 0)
                attempt(f'clone3 {name}', lambda: clone(435, words, 64))
    """
    await check_attacks_stopped(sandbox, code)
    assert (await sandbox.run(["unshare", "-Ur", "true"])).exit_code != 0


@group.attacks("privileges", needs=["x86_64"])
def no_other_namespace_can_be_entered() -> str:
    return """
        def enter(path):
            fd = os.open(path, os.O_RDONLY); syscall(308, fd, 0)
        for pid in processes() + ['self']:
            for kind in ('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup', 'time', 'pid_for_children'):
                attempt(f'{pid} {kind}', lambda: enter(f'/proc/{pid}/ns/{kind}'))
        def parent():
            import fcntl
            for request in (0xb701, 0xb702): fcntl.ioctl(os.open('/proc/self/ns/user', os.O_RDONLY), request)
        attempt('the parent of the namespace', parent)
    """


@group.attacks("privileges", needs=["x86_64", "seccomp"])
def the_memory_and_files_of_others_cannot_be_taken() -> str:
    """Not even those of its own child, and not those of process 1."""
    return """
        import struct, threading
        word = ctypes.create_string_buffer(8)
        local = struct.pack('<QQ', ctypes.addressof(word), 8)
        child = os.fork()
        if child == 0: time.sleep(60); os._exit(0)
        for pid in (child, 1):
            for request in (16, 0x4206):
                attempt(f'ptrace {request}', lambda: syscall(101, request, pid, 0, 0))
            attempt('process_vm_readv', lambda: syscall(310, pid, local, 1, local, 1, 0))
            attempt('process_vm_writev', lambda: syscall(311, pid, local, 1, local, 1, 0))
            attempt('kcmp', lambda: syscall(312, os.getpid(), pid, 2, 0, 0))
            def take():
                syscall(438, syscall(434, pid, 0), 0, 0)
            attempt('pidfd_getfd', take)
            attempt('process_madvise', lambda: syscall(440, syscall(434, pid, 0), local, 1, 21, 0))
            attempt('move_pages', lambda: syscall(279, pid, 0, None, None, None, 0))
        attempt('ptrace me', lambda: syscall(101, 0, 0, 0, 0))
        os.kill(child, 9)
    """


@group.attacks("privileges", needs=["linux", "seccomp"])
def no_process_that_can_be_written_into_has_more_rights() -> str:
    """A process that can write the memory of another, by /proc, has its rights."""
    return """
        def take(pid):
            os.close(os.open(f'/proc/{pid}/mem', os.O_WRONLY))
            fields = dict(line.split(':') for line in open(f'/proc/{pid}/status') if line.count(':') == 1)
            held = (int(fields['Seccomp']), int(fields['NoNewPrivs']), int(fields['CapBnd'], 16))
            expect(held != (2, 1, 0))
        for pid in processes(): attempt(pid, lambda: take(pid))
    """


@group.attacks("privileges", needs=["x86_64", "seccomp"])
def keyrings_cannot_be_used() -> str:
    return """
        for ring in (-1, -2, -3, -4, -5):
            attempt(f'add_key {ring}', lambda: syscall(248, b'user', b'planted', b'x', 1, ring))
            attempt(f'keyctl {ring}', lambda: syscall(250, 0, ring, 1))
        attempt('join', lambda: syscall(250, 1, None))
        attempt('request_key', lambda: syscall(249, b'user', b'planted', None, -2))
    """


@group.attacks("privileges", needs=["x86_64", "seccomp"])
def parts_of_the_kernel_that_only_attacks_need_are_denied() -> str:
    """With valid arguments, so that a kernel that allows them succeeds."""
    return """
        import struct
        attempt('io_uring_setup', lambda: syscall(425, 8, bytes(120)))
        array = struct.pack('<IIII', 2, 4, 8, 1).ljust(120, bytes(1))
        attempt('bpf map', lambda: syscall(321, 0, array, 120))
        program = ctypes.create_string_buffer(bytes.fromhex('b700000000000000' '9500000000000000'))
        license = ctypes.create_string_buffer(b'GPL')
        load = struct.pack('<IIQQ', 1, 2, ctypes.addressof(program), ctypes.addressof(license))
        attempt('bpf program', lambda: syscall(321, 5, load.ljust(120, bytes(1)), 120))
        event = struct.pack('<IIQ', 1, 112, 1).ljust(112, bytes(1))
        attempt('perf_event_open', lambda: syscall(298, event, 0, -1, -1, 0))
        for flags in (0, 1): attempt(f'userfaultfd {flags}', lambda: syscall(323, flags))
        attempt('memfd_secret', lambda: syscall(447, 0))
        handle = ctypes.create_string_buffer(struct.pack('<I', 128), 136)
        mount = ctypes.create_string_buffer(8)
        attempt('name_to_handle_at', lambda: syscall(303, -100, b'/', handle, mount, 0))
        attempt('fanotify_init', lambda: syscall(300, 0x200, 0))
        attempt('modify_ldt', lambda: syscall(154, 0, ctypes.create_string_buffer(64), 64))
        attempt('personality', lambda: syscall(135, 0x40000))
        attempt('mbind', lambda: syscall(237, 0, 0, 0, None, 0, 0))
        attempt('get_mempolicy', lambda: syscall(239, None, None, 0, 0, 0))
    """


@group.attacks("host_processes", needs=["seccomp", "x86_64"])
def files_that_others_open_cannot_be_watched() -> str:
    return """
        import fcntl
        for name, number in dict(inotify_init=253, inotify_init1=294, fanotify_init=300).items():
            attempt(name, lambda: syscall(number, 0, 0))
        folder = os.open('/usr/bin', os.O_RDONLY)
        open('mine', 'w').close()
        attempt('lease', lambda: fcntl.fcntl(os.open('mine', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK))
        attempt('dnotify', lambda: fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS))
    """


@group.attacks("privileges", needs=["seccomp", "x86_64"])
def accounts_of_the_whole_machine_cannot_be_used_up() -> str:
    return """
        context = ctypes.create_string_buffer(8)
        attempt('io_setup', lambda: syscall(206, 128, context))
        attempt('io_uring', lambda: syscall(425, 8, ctypes.create_string_buffer(120)))
    """


@group.attacks("privileges", needs=["seccomp", "x86_64"])
def accounts_of_the_user_cannot_be_used_up() -> str:
    """The trainer, and the other trajectories, count against the same ones."""
    return """
        import array, fcntl, socket
        one, other = socket.socketpair()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 100))]
        attempt('files in flight', lambda: one.sendmsg([b'x'], rights))
        attempt('sendmmsg', lambda: syscall(307, one.fileno(), ctypes.create_string_buffer(64), 1, 0))
        attempt('timer_create', lambda: syscall(222, 1, None, ctypes.create_string_buffer(8)))
        attempt('larger pipes', lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))
        attempt('inotify', lambda: syscall(294, 0))
        attempt('key', lambda: syscall(248, b'user', b'planted', b'x', 1, -4))
        attempt('queue', lambda: syscall(240, b'planted', os.O_CREAT | os.O_RDWR, 0o600, None))
        attempt('locked memory', lambda: syscall(319, b'planted', 4))
    """


@group.case("privileges", needs=["seccomp", "linux"])
async def programs_that_bound_their_time_still_do(sandbox: Sandbox) -> None:
    """Without timers of POSIX, which are denied."""
    result = await sandbox.run(["timeout", "0.2", "sleep", "60"])
    assert (result.exit_code, result.stderr) == (124, ""), result


@group.attacks("privileges", needs=["seccomp", "x86_64"])
def newer_forms_of_denied_calls_are_denied() -> str:
    """By the filter, whatever their arguments."""
    return """
        import errno
        def denied(number):
            try: syscall(number, -1, -1, -1, -1)
            except OSError as error: return error.errno in (errno.EPERM, errno.ENOSYS)
        calls = dict(quotactl_fd=443, process_mrelease=448, set_mempolicy_home_node=450, cachestat=451,
                     statmount=457, listmount=458, lsm_get_self_attr=459, open_tree_attr=467, listns=470)
        for name, number in calls.items(): attempt(name, lambda: expect(not denied(number)))
    """


@group.attacks("privileges", needs=["seccomp", "x86_64"])
def unknown_calls_do_not_exist() -> str:
    return """
        import errno
        def exists(number):
            try: syscall(number, -1, -1, -1, -1)
            except OSError as error: return error.errno != errno.ENOSYS
        for number in (*range(471, 512), 1000, 1 << 20, -1): attempt(number, lambda: expect(exists(number)))
    """


@group.attacks("privileges", needs=["seccomp", "x86_64"])
def priorities_of_the_supervisor_cannot_be_changed() -> str:
    """Those of process 1 and of the parent, which may run as the same user."""
    return """
        import resource
        for pid in {os.getppid(), 1} - {0, os.getpid()}:
            attempt(f'nice {pid}', lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
            attempt(f'idle {pid}', lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
            attempt(f'pin {pid}', lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)))
            attempt(f'limit {pid}', lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))
            attempt(f'disk {pid}', lambda: syscall(251, 1, pid, 3 << 13))
        attempt('group', lambda: os.setpriority(os.PRIO_PGRP, 0, 19))
        attempt('user', lambda: os.setpriority(os.PRIO_USER, 0, 19))
    """


@group.case("file_locks")
async def a_file_that_others_lock_too_cannot_be_locked(sandbox: Sandbox) -> None:
    """A file of Python's own, which host and sandbox may share."""
    import fcntl

    code = "import fcntl, os; file = open(os.__file__); fcntl.flock(file, fcntl.LOCK_EX); print(os.__file__)"
    async with prepared_inside(sandbox, code) as said:
        path = Path(said.strip() or "/nothing")
        with contextlib.suppress(FileNotFoundError), path.open() as file:  # noqa: ASYNC230  a small one
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AssertionError("a lock from inside holds outside") from None


@group.attacks("privileges", needs=["x86_64"])
def the_machine_cannot_be_reconfigured() -> str:
    """Each call is harmless if it succeeds."""
    return """
        import struct, fcntl
        def now(parts): return struct.pack('<QQ', *divmod(time.time_ns() * parts // 10 ** 9, parts))
        attempt('clock_settime', lambda: syscall(227, 0, now(10 ** 9)))
        attempt('settimeofday', lambda: syscall(164, now(10 ** 6), None))
        usual_tick = struct.pack('<I84xQ', 0x4000, 10_000).ljust(208, bytes(1))
        attempt('adjtimex', lambda: syscall(159, usual_tick))
        attempt('kexec_load', lambda: syscall(246, 0, 0, None, 0))
        for name, number in (('init_module', 175), ('finit_module', 313), ('delete_module', 176)):
            attempt(name, lambda: syscall(number, b'none', 0, b''))
        attempt('swapoff', lambda: syscall(168, b'/none'))
        attempt('acct', lambda: syscall(163, None))
        attempt('syslog', lambda: syscall(103, 3, ctypes.create_string_buffer(999), 999))
        attempt('iopl', lambda: syscall(172, 3))
        attempt('ioperm', lambda: syscall(173, 0x80, 1, 1))
        attempt('sethostname', lambda: syscall(170, b'planted', 7))
        attempt('setdomainname', lambda: syscall(171, b'planted', 7))
        attempt('vhangup', lambda: syscall(153))
        attempt('quotactl', lambda: syscall(179, 0x80000200, b'/dev/vda', 0, None))
        attempt('reboot', lambda: syscall(169, 0, 0, 0, None))
    """


@group.attacks("privileges", needs=["x86_64", "seccomp"])
def other_numbers_of_system_calls_lead_no_further() -> str:
    """Those of 32-bit programs by `int 0x80`, those of x32, and requests whose upper half is not zero."""
    return r"""
        import mmap
        def by_interrupt(number, first):
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(b'\x53\xbb' + first.to_bytes(4, 'little') + b'\xb8' + number.to_bytes(4, 'little')
                       + b'\xcd\x80\x5b\xc3')
            call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
            expect(call() >= 0)
        attempt('int 0x80 getpid', lambda: by_interrupt(20, 0))
        attempt('int 0x80 unshare', lambda: by_interrupt(310, 1 << 28))
        for number in (39, 272, 41):
            attempt(f'x32 {number}', lambda: syscall(number | 1 << 30, 1 << 28, 1, 0))
        for request in (0x5412, 0x100005412, 0xffffffff00005412 - (1 << 64), 0x541c, 0x10000541c):
            attempt(f'ioctl {request:x}', lambda: syscall(16, os.openpty()[1], request, b'x'))
    """


@group.attacks("privileges", needs=["max_processes", "linux"])
def limits_cannot_be_raised() -> str:
    return """
        import resource
        endless = resource.RLIM_INFINITY
        def put(who, kind, value):
            try: resource.prlimit(who, kind, (value, value))
            except ValueError as error: raise OSError from error
        for name in [name for name in dir(resource) if name.startswith('RLIMIT_')]:
            kind = getattr(resource, name)
            for who in (0, os.getppid(), 1):
                try: hard = resource.prlimit(who, kind)[1]
                except OSError: continue
                if hard == endless: continue
                for value in (hard + 1, endless): attempt(f'{name} of {who}', lambda: put(who, kind, value))
        attempt('no limit of processes', lambda: expect(resource.getrlimit(resource.RLIMIT_NPROC)[1] < 0))
    """


@group.case("privileges", needs=["linux"])
async def priorities_cannot_be_raised(sandbox: Sandbox) -> None:
    """In particular the kernel must not kill the trainer first when memory runs out."""
    ours = oom_score_adj()
    code = """
        attempt('nice', lambda: os.nice(-1))
        for policy in (os.SCHED_FIFO, os.SCHED_RR):
            attempt('realtime', lambda: os.sched_setscheduler(0, policy, os.sched_param(1)))
        def spared():
            os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'%d' % (ours - 1))
        attempt('oom', spared)
        attempt('mlockall', lambda: (bytearray(64 << 20), checked(libc.mlockall(3)), bytearray(64 << 20)))
    """
    await check_attacks_stopped(sandbox, code, ours=ours)


@group.case("terminal", needs=["linux", "pickle"])
async def the_trainers_terminal_cannot_be_opened(sandbox: Sandbox) -> None:
    """A process that can open it could type into it."""
    program = """
        async def main():
            os.close(os.open('/dev/tty', os.O_RDWR))
            code = 'import os; os.open("/dev/tty", os.O_RDWR)'
            async with sandbox:
                result = await sandbox.run([*sandbox.python_argv, '-c', code])
            print('shut' if '[Errno' in result.stderr else result, flush=True)
        asyncio.run(main())
    """
    async with trainer(sandbox, program, terminal=True) as process:
        await process.expect_line("shut")
