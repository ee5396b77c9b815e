"""Solve word problems over several turns, with a sandbox service that runs the code.

    python examples/gsm8k_sandbox.py --url http://localhost:8080

Replay a recorded conversation about GSM8K and compare its results; then let a model, by default the tiny one
of the package, solve problems. Without --url, start a service here. Write all trajectories to a file of JSON
lines.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from torchrl_agentic import PythonTool, Recorder, SandboxFusionTool, ToolCompose, evaluate, read_records
from torchrl_agentic.cli.rollout_file import RolloutConfig, load_conversations, load_questions
from torchrl_agentic.evaluation import load_model
from torchrl_agentic.rollout import replay
from torchrl_agentic.testing import TINY
from torchrl_agentic.testing.servers.embedded import serving

HERE = Path(__file__).parent
SERVICE = "torchrl_agentic.serve.sandbox_app:sandbox_app"


def main() -> None:
    """Replay a conversation, ask a model, and print the number of right answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="URL of a Sandbox Fusion service; by default one is started here")
    parser.add_argument("--model", default=str(TINY), help="a Hugging Face folder or name")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument(
        "--rate-limit", type=int, default=10, help="concurrent calls of all processes that use the service"
    )
    parser.add_argument("--out", type=Path, default=Path("rollouts/gsm8k.jsonl"))
    options = parser.parse_args()
    config = RolloutConfig(conversations=["gsm8k_code_interpreter.json"])
    problems = RolloutConfig.model_validate(
        {
            "questions": ["questions.jsonl"],
            "model": {"path": options.model},
            "system_prompt": "You solve problems with a Python tool.",
        }
    )
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(serving(SERVICE))
        recorder = stack.enter_context(Recorder(options.out))

        recorded = load_conversations(config, HERE)
        tool = SandboxFusionTool(url, rate_limit=options.rate_limit)
        differences = replay(recorded, [tool], parser="hermes", recorder=recorder)
        turns = sum(len(one.turns) for one in recorded)
        print(f"replayed {turns} turns of GSM8K; {len(differences)} results differ from the recorded ones")

        # The tiny model was trained with a tool of this description that shows the last value of the code.
        python = SandboxFusionTool(
            url,
            name="python",
            description=PythonTool.description,
            jupyter=True,
            memory_limit_mb=-1,
            rate_limit=options.rate_limit,
            strict=None,
        )
        python.input_schema = PythonTool.input_schema
        model, tokenizer = load_model(options.model)
        questions = load_questions(problems, HERE)[: options.questions]
        result = evaluate(
            questions,
            ToolCompose([python], recorder=recorder),
            model,
            tokenizer,
            max_turns=5,
            max_new_tokens=96,
            temperature=0.0,
        )
        right = sum(sample.score or 0.0 for sample in result.samples)
        print(f"{right:.0f} of {len(questions)} problems solved with the code in {url}")
    print(f"{sum(1 for _ in read_records(options.out))} trajectories in {options.out}")


if __name__ == "__main__":
    main()
