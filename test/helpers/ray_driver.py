"""A program over workers on a Ray cluster: `ray_driver.py ADDRESS FOLDER HOW`; it ends in the way HOW says.

Its tool notes the process that it runs in, and one of its two calls never returns.
"""

import asyncio
import gc
import os
import sys
import uuid
from pathlib import Path

import cloudpickle
import ray
from helpers.collector_worlds import WildEngine, looks, numbered_tasks, tokenizer

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, RayWorkers


@tool
async def look(key: str) -> str:
    """Note the process; the call of the second trajectory never returns.

    Args:
        key: A key.
    """
    name = "stuck" if key.startswith("t1") else "done"
    Path(os.environ["NOTES"], f"{os.getpid()}.{name}").touch()
    if name == "stuck":
        await asyncio.Event().wait()
    return "found"


def main(address: str, folder: str, how: str) -> None:
    """Collect the first batch; then end, or wait for the end from outside."""
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    here = {"PYTHONPATH": os.pathsep.join(sys.path), "NOTES": folder}
    ray.init(address=address, log_to_driver=False, namespace=uuid.uuid4().hex, runtime_env={"env_vars": here})
    collector = AgentCollector(
        ToolCompose([look], per_call_timeout=None),
        engine=WildEngine(looks(1)),
        tokenizer=tokenizer(),
        tasks=numbered_tasks(2),
        groups_per_batch=1,
        max_staleness=None,
        workers=RayWorkers(2, cpus_per_worker=1),
    )
    batches = iter(collector)
    next(batches)
    while not list(Path(folder).glob("*.stuck")):
        pass
    print("begun", flush=True)
    if how == "exit":
        sys.exit(0)
    if how == "garbage":
        del batches, collector
        gc.collect()
        sys.stdin.read()
        return
    next(batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
