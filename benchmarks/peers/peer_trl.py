"""TRL's `AsyncRolloutWorker` over the HTTP server of the engine: `peer_trl.py MEASURE OUT URL`.

The worker begins new trajectories without end, so the data set goes on behind the load; the run ends when the
trajectories of the load have come. Updates are those of TRL's trainer: pause the server, resume, new version.
"""

from __future__ import annotations

import queue
import sys
import time
import urllib.request
from typing import Any

import trl.experimental.async_grpo.async_rollout_worker as worker_module
from accelerate import PartialState
from datasets import Dataset
from load import MAX_TOKENS, MAX_TURNS, question, tokenizer, work
from measure import Run
from trl.chat_template_utils import qwen3_template

# The worker asks for an installed vLLM and never imports it: it speaks HTTP.
worker_module.is_vllm_available = lambda: True


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Return a constant."""
    return [1.0] * len(completions)


def post(url: str) -> None:
    """Post a command to the server."""
    with urllib.request.urlopen(urllib.request.Request(url, data=b""), timeout=30):
        pass


def update(run: Run, worker: Any) -> None:
    """Update the weights as TRL's trainer does, which keeps running requests; or abort them."""
    mode = "keep" if run.measure == "updates" else "abort"
    post(f"{run.url}/pause?mode={mode}")
    post(f"{run.url}/resume")
    worker.update_model_version(worker.model_version + 1)


def main() -> None:
    """Run one measure."""
    model_tokenizer = tokenizer()
    model_tokenizer.response_template = qwen3_template
    run = Run(sys.argv[1:4], model_tokenizer)
    load = run.load
    rows = [{"prompt": question(number), "number": number} for number in range(load.tasks(refills=True))]
    worker = worker_module.AsyncRolloutWorker(
        model_name="tiny",
        dataset=Dataset.from_list(rows),
        reward_funcs=[reward],
        processing_class=model_tokenizer,
        eos_token_ids=[model_tokenizer.eos_token_id],
        tools=[work],
        num_generations=1,
        max_inflight_tasks=load.count,
        max_tokens=MAX_TOKENS,
        max_tool_calling_iterations=MAX_TURNS,
        vllm_server_url=run.url,
    )
    PartialState()
    worker.start()
    run.begin()
    updated = time.monotonic()
    kept: dict[int, list[int]] = {}
    while not run.is_complete and run.elapsed_s < run.limit_s and not run.hold():
        if run.measure in ("updates", "aborts") and time.monotonic() - updated >= 1.0:
            updated = time.monotonic()
            update(run, worker)
        try:
            sample = worker.rollout_buffer.get(timeout=0.1)
        except queue.Empty:
            try:
                worker.check_health(60.0)
            except RuntimeError as error:
                run.end(failure=str(error.__cause__ or error)[:500])
            continue
        number = int(sample.prompt[0]["content"][1:])
        sampled = sample.input_ids[sample.completion_mask.astype(bool)].tolist()
        kept[number] = [*kept.get(number, []), *sampled]  # a trajectory may come in several rows
        run.deliver(number, kept[number])
    run.end()


if __name__ == "__main__":
    main()
