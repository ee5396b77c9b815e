"""Loads libraries once, then forks a supervisor into new namespaces for each trajectory.

It runs in an outer sandbox, has one thread, and never runs code of the model. A request is one message of a
SOCK_SEQPACKET socket, with open files: the trajectory's connection to the host, and optionally the two files
of its control group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
from collections.abc import Iterable
from typing import Any

from torchrl_agentic.sandbox.inside import namespaces, processes, supervisor, worker

READY = b"ready"


def preload(names: Iterable[str], *, strict: bool) -> None:
    """Import modules that trajectories may need.

    Args:
        names: Names of the modules.
        strict: Raise an error if one is not installed.

    Raises:
        ImportError: If there is no such module.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            if strict:
                raise


def main(settings: dict[str, Any], program: bytes, fd: int) -> None:
    """Serve spawn requests until the host closes the connection.

    Args:
        settings: See `Supervisor`.
        program: Seccomp filter of code; b"" for none.
        fd: Descriptor of the socket.
    """
    preload(settings["preload"], strict=settings["strict"])
    worker.warm_up()
    requests = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gc.collect()
    gc.freeze()  # so that garbage collection in a child does not copy the pages of existing objects
    requests.send(READY)
    while True:
        data, handed, _, _ = socket.recv_fds(requests, 16, supervisor.FILES)
        if not data:
            os._exit(0)
        pid = -1
        with contextlib.suppress(OSError):  # no resources for another one: the host sees the connection end
            pid = namespaces.fork_into_namespaces(settings["namespaces"])
        if pid == 0:
            gc.enable()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            processes.run_as_child(supervisor.below_zygote, settings, program, handed)
        for one in handed:
            os.close(one)
