"""The verdict on each system call of code in a sandbox, with its reason: allowed, checked, or denied.

All sandboxes on Linux build their filters from this table, see `seccomp`. A call that is missing, because it
is newer than the table, gets the error of a kernel that does not have it. Numbers are those of x86-64 and
aarch64, `-` if there is no such call. Source: `syscall_64.tbl` and `asm-generic/unistd.h` of the kernel, up
to Linux 6.18.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["allowed", "checked", "denied"]
MACHINES = ("x86_64", "aarch64")
"""Processors whose numbers the table has, as `platform.machine` names them."""


@dataclass(frozen=True, slots=True)
class Calls:
    """System calls with the same verdict.

    Attributes:
        subject: What the calls are about.
        verdict: What the filter does with them; see `seccomp` for how it checks arguments.
        why: Reason of the verdict.
        numbers: Their names, each with its numbers: `"pipe 22/-, pipe2 293/59"`.
    """

    subject: str
    verdict: Verdict
    why: str
    numbers: str

    def of(self, machine: str) -> Mapping[str, int]:
        """Return the numbers by name, for the calls that exist on a processor of this kind."""
        column = MACHINES.index(machine)
        pairs = (entry.split() for entry in self.numbers.split(","))
        found = {name: numbers.split("/")[column] for name, numbers in pairs}
        return {name: int(number) for name, number in found.items() if number != "-"}


TABLE = (
    Calls(
        "files",
        "allowed",
        "Namespaces, mounts and Landlock decide which; quotas and limits decide how much.",
        """
        read 0/63, write 1/64, open 2/-, openat 257/56, openat2 437/437, creat 85/-, close 3/57, close_range
        436/436, stat 4/-, fstat 5/80, lstat 6/-, newfstatat 262/79, statx 332/291, lseek 8/62, pread64
        17/67, pwrite64 18/68, readv 19/65, writev 20/66, preadv 295/69, pwritev 296/70, preadv2 327/286,
        pwritev2 328/287, access 21/-, faccessat 269/48, faccessat2 439/439, dup 32/23, dup2 33/-, dup3
        292/24, sendfile 40/71, copy_file_range 326/285, splice 275/76, tee 276/77, flock 73/32, fsync
        74/82, fdatasync 75/83, sync 162/81, syncfs 306/267, sync_file_range 277/84, ftruncate 77/46,
        fallocate 285/47, fadvise64 221/223, readahead 187/213, getdents 78/-, getdents64 217/61, getcwd
        79/17, chdir 80/49, fchdir 81/50, rename 82/-, renameat 264/38, renameat2 316/276, mkdir 83/-,
        mkdirat 258/34, rmdir 84/-, link 86/-, linkat 265/37, unlink 87/-, unlinkat 263/35, symlink 88/-,
        symlinkat 266/36, readlink 89/-, readlinkat 267/78, chmod 90/-, fchmod 91/52, fchmodat 268/53,
        fchmodat2 452/452, chown 92/-, fchown 93/55, lchown 94/-, fchownat 260/54, umask 95/166, mknod
        133/-, mknodat 259/33, utime 132/-, utimes 235/-, utimensat 280/88, futimesat 261/-, statfs 137/43,
        fstatfs 138/44, ustat 136/-, setxattr 188/5, lsetxattr 189/6, fsetxattr 190/7, setxattrat 463/463,
        getxattr 191/8, lgetxattr 192/9, fgetxattr 193/10, getxattrat 464/464, listxattr 194/11, llistxattr
        195/12, flistxattr 196/13, listxattrat 465/465, removexattr 197/14, lremovexattr 198/15,
        fremovexattr 199/16, removexattrat 466/466, file_getattr 468/468, file_setattr 469/469
        """,
    ),
    Calls(
        "pipes and waiting",
        "allowed",
        "They belong to the process that opens them.",
        """
        pipe 22/-, pipe2 293/59, poll 7/-, ppoll 271/73, select 23/-, pselect6 270/72, epoll_create 213/-,
        epoll_create1 291/20, epoll_ctl 233/21, epoll_wait 232/-, epoll_pwait 281/22, epoll_pwait2 441/441,
        eventfd 284/-, eventfd2 290/19, signalfd 282/-, signalfd4 289/74, timerfd_create 283/85,
        timerfd_settime 286/86, timerfd_gettime 287/87
        """,
    ),
    Calls(
        "memory of its own",
        "allowed",
        "The limits of a process and its control group count it.",
        """
        mprotect 10/226, munmap 11/215, brk 12/214, mremap 25/216, msync 26/227, mincore 27/232, madvise
        28/233, mlock 149/228, mlock2 325/284, mlockall 151/230, munlock 150/229, munlockall 152/231,
        pkey_mprotect 329/288, pkey_alloc 330/289, pkey_free 331/290, map_shadow_stack 453/453, mseal
        462/462, membarrier 324/283
        """,
    ),
    Calls(
        "processes and threads",
        "allowed",
        "The limit of processes counts them; PID namespace or supervisor keep them among themselves.",
        """
        fork 57/-, vfork 58/-, execve 59/221, execveat 322/281, exit 60/93, exit_group 231/94, wait4 61/260,
        waitid 247/95, getpid 39/172, gettid 186/178, getppid 110/173, getpgrp 111/-, getpgid 121/155,
        setpgid 109/154, getsid 124/156, setsid 112/157, set_tid_address 218/96, set_robust_list 273/99,
        get_robust_list 274/100, futex 202/98, futex_waitv 449/449, futex_wake 454/454, futex_wait 455/455,
        futex_requeue 456/456, rseq 334/293, sched_yield 24/124, restart_syscall 219/128, arch_prctl 158/-,
        prctl 157/167, getcpu 309/168
        """,
    ),
    Calls(
        "signals",
        "allowed",
        "PID namespaces and Landlock's scopes, or the supervisor, keep them inside.",
        """
        kill 62/129, tkill 200/130, tgkill 234/131, rt_sigqueueinfo 129/138, rt_tgsigqueueinfo 297/240,
        rt_sigaction 13/134, rt_sigprocmask 14/135, rt_sigreturn 15/139, rt_sigpending 127/136,
        rt_sigtimedwait 128/137, rt_sigsuspend 130/133, sigaltstack 131/132, pause 34/-
        """,
    ),
    Calls(
        "time",
        "allowed",
        "Clocks can be read, and timers end with their process.",
        """
        time 201/-, gettimeofday 96/169, clock_gettime 228/113, clock_getres 229/114, clock_nanosleep
        230/115, nanosleep 35/101, alarm 37/-, getitimer 36/102, setitimer 38/103,
        timer_settime 223/110, timer_gettime 224/108, timer_getoverrun 225/109, timer_delete 226/111, times
        100/153
        """,
    ),
    Calls(
        "timers of POSIX",
        "checked",
        "They use up an account of the user that all trajectories share. The call returns ENOSYS, and "
        "programs such as timeout fall back to alarm.",
        """
        timer_create 222/107
        """,
    ),
    Calls(
        "user, group and system information",
        "allowed",
        "Without capabilities they give no rights.",
        """
        getuid 102/174, geteuid 107/175, getresuid 118/148, setuid 105/146, setreuid 113/145, setresuid
        117/147, setfsuid 122/151, getgid 104/176, getegid 108/177, getresgid 120/150, setgid 106/144,
        setregid 114/143, setresgid 119/149, setfsgid 123/152, getgroups 115/158, setgroups 116/159, capget
        125/90, capset 126/91, uname 63/160, sysinfo 99/179, getrusage 98/165, getrandom 318/278
        """,
    ),
    Calls(
        "open sockets",
        "allowed",
        "Opening a socket is checked.",
        """
        connect 42/203, accept 43/202, accept4 288/242, sendto 44/206, recvfrom 45/207, recvmsg 47/212,
        recvmmsg 299/243, shutdown 48/210, bind 49/200, listen 50/201, getsockname 51/204, getpeername
        52/205, setsockopt 54/208, getsockopt 55/209
        """,
    ),
    Calls(
        "messages with open files",
        "checked",
        "Only with a network that was granted, which needs them: files in flight over sockets count against "
        "one account of the user, which trainer and trajectories share.",
        """
        sendmsg 46/211, sendmmsg 307/269
        """,
    ),
    Calls(
        "own limits and priorities",
        "allowed",
        "They can only be read, or lowered.",
        """
        getrlimit 97/163, setrlimit 160/164, getpriority 140/141, sched_getparam 143/121, sched_getscheduler
        145/120, sched_getaffinity 204/123, sched_getattr 315/275, sched_get_priority_max 146/125,
        sched_get_priority_min 147/126, sched_rr_get_interval 148/127, ioprio_get 252/31
        """,
    ),
    Calls(
        "confining itself further",
        "allowed",
        "It only removes rights.",
        """
        landlock_create_ruleset 444/444, landlock_add_rule 445/445, landlock_restrict_self 446/446
        """,
    ),
    Calls(
        "new processes",
        "checked",
        "Without new namespaces.",
        """
        clone 56/220
        """,
    ),
    Calls(
        "new processes, with flags in memory",
        "checked",
        "A filter cannot read the flags. The call returns ENOSYS, and the C library falls back to clone.",
        """
        clone3 435/435
        """,
    ),
    Calls(
        "entering namespaces",
        "checked",
        "Only in sandboxes whose clones are given the files of their namespaces.",
        """
        setns 308/268
        """,
    ),
    Calls(
        "opening sockets",
        "checked",
        "Only families of a network that was granted.",
        """
        socket 41/198
        """,
    ),
    Calls(
        "pairs of sockets",
        "checked",
        "Unix sockets only; no datagram sockets where socket names are shared with others, because they "
        "can send to any name.",
        """
        socketpair 53/199
        """,
    ),
    Calls(
        "control of devices",
        "checked",
        "No typing into a terminal; where signals are not scoped, no choice of who gets one.",
        """
        ioctl 16/29
        """,
    ),
    Calls(
        "control of open files",
        "checked",
        "No watching of folders, no leases, which block other programs that open a file, and no larger "
        "pipes, whose pages count against an account of the user; where signals are not scoped, no choice of "
        "who gets one.",
        """
        fcntl 72/25
        """,
    ),
    Calls(
        "mapping memory",
        "checked",
        "No huge pages that the administrator reserved: no limit counts them.",
        """
        mmap 9/222
        """,
    ),
    Calls(
        "limits and priorities",
        "checked",
        "Not those of the supervisor, which runs as the same user; without namespaces only those of the "
        "calling process, as 0.",
        """
        prlimit64 302/261, sched_setparam 142/118, sched_setscheduler 144/119, sched_setaffinity 203/122,
        sched_setattr 314/274, setpriority 141/140, ioprio_set 251/30
        """,
    ),
    Calls(
        "filters of its own",
        "checked",
        "No listener, which would be asked instead of the supervisor.",
        """
        seccomp 317/277
        """,
    ),
    Calls(
        "truncating files by path",
        "checked",
        "Not before version 3 of Landlock, which does not cover it.",
        """
        truncate 76/45
        """,
    ),
    Calls(
        "signals by descriptor",
        "checked",
        "Not where signals are not scoped.",
        """
        pidfd_send_signal 424/424
        """,
    ),
    Calls(
        "memory and files of other processes",
        "denied",
        "Only debuggers need them.",
        """
        ptrace 101/117, process_vm_readv 310/270, process_vm_writev 311/271, kcmp 312/272, pidfd_open
        434/434, pidfd_getfd 438/438, process_madvise 440/440, process_mrelease 448/448
        """,
    ),
    Calls(
        "mounts and namespaces",
        "denied",
        "They show host paths, or lead out of the sandbox.",
        """
        mount 165/40, umount2 166/39, pivot_root 155/41, chroot 161/51, unshare 272/97, open_tree 428/428,
        open_tree_attr 467/467, move_mount 429/429, fsopen 430/430, fsconfig 431/431, fsmount 432/432,
        fspick 433/433, mount_setattr 442/442, statmount 457/457, listmount 458/458, listns 470/470,
        name_to_handle_at 303/264, open_by_handle_at 304/265
        """,
    ),
    Calls(
        "memory that no process owns",
        "denied",
        "It outlives the process or is not counted: System V and POSIX queues, segments and semaphores, "
        "anonymous files, pages given to pipes.",
        """
        shmget 29/194, shmat 30/196, shmctl 31/195, shmdt 67/197, semget 64/190, semop 65/193, semctl
        66/191, semtimedop 220/192, msgget 68/186, msgsnd 69/189, msgrcv 70/188, msgctl 71/187, mq_open
        240/180, mq_unlink 241/181, mq_timedsend 242/182, mq_timedreceive 243/183, mq_notify 244/184,
        mq_getsetattr 245/185, memfd_create 319/279, memfd_secret 447/447, vmsplice 278/75, remap_file_pages
        216/234
        """,
    ),
    Calls(
        "watching files",
        "denied",
        "It reveals the files that others open, and uses up a quota that all processes of a user share.",
        """
        inotify_init 253/-, inotify_init1 294/26, inotify_add_watch 254/27, inotify_rm_watch 255/28,
        fanotify_init 300/262, fanotify_mark 301/263, cachestat 451/451
        """,
    ),
    Calls(
        "asynchronous I/O",
        "denied",
        "Its requests use up a quota of the whole machine; io_uring bypasses filters.",
        """
        io_setup 206/0, io_destroy 207/1, io_getevents 208/4, io_pgetevents 333/292, io_submit 209/2,
        io_cancel 210/3, io_uring_setup 425/425, io_uring_enter 426/426, io_uring_register 427/427
        """,
    ),
    Calls(
        "keys, programs in the kernel, tracing",
        "denied",
        "Large parts of the kernel that attacks often start from.",
        """
        keyctl 250/219, add_key 248/217, request_key 249/218, bpf 321/280, perf_event_open 298/241,
        userfaultfd 323/282, lookup_dcookie 212/18, uprobe 336/-, uretprobe 335/-, lsm_get_self_attr
        459/459, lsm_set_self_attr 460/460, lsm_list_modules 461/461
        """,
    ),
    Calls(
        "the machine",
        "denied",
        "They are for its administrator.",
        """
        kexec_load 246/104, kexec_file_load 320/294, init_module 175/105, finit_module 313/273,
        delete_module 176/106, reboot 169/142, swapon 167/224, swapoff 168/225, acct 163/89, quotactl
        179/60, quotactl_fd 443/443, syslog 103/116, settimeofday 164/170, clock_settime 227/112,
        clock_adjtime 305/266, adjtimex 159/171, sethostname 170/161, setdomainname 171/162, iopl 172/-,
        ioperm 173/-, vhangup 153/58, personality 135/92, modify_ldt 154/-
        """,
    ),
    Calls(
        "placing memory on nodes",
        "denied",
        "It reveals the layout of memory, and can move that of others.",
        """
        mbind 237/235, set_mempolicy 238/237, get_mempolicy 239/236, set_mempolicy_home_node 450/450,
        move_pages 279/239, migrate_pages 256/238
        """,
    ),
    Calls(
        "calls of old kernels",
        "denied",
        "Nothing uses them.",
        """
        uselib 134/-, sysfs 139/-, _sysctl 156/-, create_module 174/-, get_kernel_syms 177/-, query_module
        178/-, nfsservctl 180/42, getpmsg 181/-, putpmsg 182/-, afs_syscall 183/-, tuxcall 184/-, security
        185/-, set_thread_area 205/-, get_thread_area 211/-, epoll_ctl_old 214/-, epoll_wait_old 215/-,
        vserver 236/-
        """,
    ),
)


@functools.cache
def numbers(machine: str) -> Mapping[str, int]:
    """Return the numbers of all calls by name for a kind of processor; empty if it is unknown."""
    if machine not in MACHINES:
        return {}
    return {name: number for calls in TABLE for name, number in calls.of(machine).items()}
