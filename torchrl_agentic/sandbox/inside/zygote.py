"""Loads libraries once, then forks a supervisor into new namespaces for each trajectory that is asked for.

It runs in one outer sandbox, has one thread, and never runs code of the model. A request is one message over
a socket that keeps them apart: an open socket, the trajectory's connection to the host, and perhaps the two
files of its control group.
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
    """Import what trajectories may need. strict: whether what is not installed is an error.

    Raises:
        ImportError: there is no such module.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            if strict:
                raise


def main(settings: dict[str, Any], program: bytes, fd: int) -> None:
    """Serve spawn requests until the host hangs up."""
    preload(settings["preload"], strict=settings["strict"])
    worker.warm_up()
    requests = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gc.collect()
    gc.freeze()  # so that a collection in a child does not touch, and thereby copy, what is there now
    requests.send(READY)
    while True:
        data, handed, _, _ = socket.recv_fds(requests, 16, supervisor.FILES)
        if not data:
            os._exit(0)
        pid = -1
        with contextlib.suppress(OSError):  # no room for another one: its host sees the connection end
            pid = namespaces.fork_into_namespaces(settings["namespaces"])
        if pid == 0:
            gc.enable()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            processes.live_as(supervisor.below_zygote, settings, program, handed)
        for one in handed:
            os.close(one)
