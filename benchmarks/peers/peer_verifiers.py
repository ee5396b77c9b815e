"""verifiers' `ToolEnv` over the HTTP server of the engine: `peer_verifiers.py MEASURE OUT URL`.

Release 0.3.1 is the last one whose environments run in the process of the trainer. It has a time limit of a
trajectory, which ends it as it is, and none of a call; here the default, which is no limit.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset
from load import MAX_TOKENS, MAX_TURNS, question, tokenizer, work
from measure import Run


def reward() -> float:
    """Return a constant."""
    return 1.0


def post(url: str) -> None:
    """Post a command to the server."""
    with urllib.request.urlopen(urllib.request.Request(url, data=b""), timeout=30):
        pass


async def update(run: Run) -> None:
    """Update the weights every second, on a server that keeps running requests or aborts them."""
    mode = "keep" if run.measure == "updates" else "abort"
    while True:
        await asyncio.sleep(1.0)
        await asyncio.to_thread(post, f"{run.url}/pause?mode={mode}")
        await asyncio.to_thread(post, f"{run.url}/resume")


def ids_of(run: Run, number: int, messages: list[Any]) -> list[int]:
    """Return the ids of a conversation, which are those of the script if its texts are."""
    said = [message for message in messages if message["role"] == "assistant"]
    ids: list[int] = []
    for turn, message in enumerate(said):
        text = message["content"] or ""
        is_equal = text == run.script.text(number, turn)
        ids += run.script.ids(number, turn) if is_equal else run.script.tokenizer(text)["input_ids"]
    return ids


async def main() -> None:
    """Run one measure."""
    run = Run(sys.argv[1:4], tokenizer())
    load = run.load
    rows = [{"prompt": question(number), "example_id": number, "answer": ""} for number in range(load.count)]
    env = vf.ToolEnv(
        tools=[work],
        max_turns=MAX_TURNS,
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[reward]),
    )
    client = vf.ClientConfig(api_base_url=f"{run.url}/v1", api_key_var="NONE")
    done = asyncio.Event()

    def progress(every: list[Any], new: list[Any], *_: Any) -> None:
        for found in new:
            number = int(found["example_id"])
            run.deliver(number, ids_of(run, number, found["completion"]))

    async def generate() -> None:
        inputs = env.get_dataset()
        await env.generate(
            inputs,
            client,
            "tiny",
            sampling_args={"max_tokens": MAX_TOKENS},
            independent_scoring=True,
            on_start=lambda *_: None,
            on_progress=progress,
            on_log=lambda *_: None,
        )
        done.set()

    run.begin()
    other = asyncio.create_task(update(run)) if run.measure in ("updates", "aborts") else None
    generating = asyncio.create_task(generate())
    while not generating.done() and run.elapsed_s < run.limit_s:
        await asyncio.wait([generating], timeout=0.2)
        if await asyncio.to_thread(run.hold):
            break
    if generating.done():
        generating.result()
    del other
    run.end()


if __name__ == "__main__":
    asyncio.run(main())
