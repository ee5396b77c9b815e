"""Programs that end while a collector runs; `test_collector_exits.py` starts them by their names.

They print "ready" once a tool waits forever, and each session that a trajectory opens and closes.
"""

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading

from helpers.collector_worlds import CountedTool, WildEngine, collector_of, looks
from helpers.limit import limit

from torchrl_agentic.dispatch import event_loop


def say(text):
    """Print a line at once: `print` writes its end apart, where a line of another thread may come between."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


class Told(CountedTool):
    """Prints what is opened and closed."""

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        async with super().session(trajectory) as live:
            say("open")
            pid = os.getpid()
            try:
                yield live
            finally:
                if os.getpid() == pid:  # a fork finalizes its copy of this generator
                    say("closed")


async def act(key):
    """Wait forever in groups but the first."""
    if not key.startswith("t0/"):
        say("ready")
        await asyncio.Event().wait()


def made(**more):
    """Return a collector whose second batch never comes."""
    return collector_of(WildEngine(looks(1)), tools=[Told(act)], tasks=None, max_in_flight=4, **more)


def interrupted():
    """Be interrupted while waiting for the second batch, without `with`."""
    try:
        for _ in made():
            say("batch")
    except KeyboardInterrupt:
        say("interrupted")
    while event_loop.run(_count()):
        threading.Event().wait(0.01)


async def _count():
    return len(asyncio.all_tasks()) - 1


def interrupted_in_the_body():
    """Be interrupted in the body of the loop."""
    try:
        with made() as collector:
            for _ in collector:
                say("batch")
                threading.Event().wait()
    except KeyboardInterrupt:
        say("interrupted")


def interrupted_async():
    """Be interrupted in `asyncio.run`."""

    async def main():
        async for _ in made():
            say("batch")

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        say("interrupted")


def leaves():
    """End the program without a shutdown."""
    collector = made()
    next(iter(collector))
    say("left")


def leaves_async():
    """End `asyncio.run` while `async for` is suspended, without a shutdown."""

    async def main():
        async for _ in made():
            break

    asyncio.run(main())
    say("left")


def ends_meanwhile():
    """End `asyncio.run` while another thread waits for an update and a shutdown."""
    errors = []

    async def main():
        collector = made()
        async for _ in collector:
            break

        def work():
            for _ in range(1000):
                try:
                    collector.update_policy_weights_()
                except RuntimeError as error:
                    errors.append(error)
                    break
            collector.shutdown()

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.sleep(0.01)
        return thread

    thread = asyncio.run(main())
    thread.join(limit(20))
    say("left" if not thread.is_alive() else "hangs")


def garbage():
    """Drop a collector and wait for the end of its trajectories."""
    collector = made()
    next(iter(collector))
    del collector
    gc.collect()
    while event_loop.run(_count()):
        threading.Event().wait(0.01)
    say("left")


def forked():
    """Fork while trajectories run; the child cannot iterate, and the parent goes on."""
    collector = made()
    next(iter(collector))
    pid = os.fork()
    if not pid:
        collector.shutdown()
        os._exit(7)
    say(f"child {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    collector.shutdown()
    say("left")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    for program in sys.argv[1:]:
        globals()[program]()
