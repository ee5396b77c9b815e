"""The task with TRL: `python train_trl.py`."""

from arithmetic_task import (
    GROUP,
    MAX_CALLS_IN_TURN,
    MAX_TOKENS,
    MODEL,
    PROMPTS,
    STEPS,
    SYSTEM,
    is_right,
    python,
    questions,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def reward(completions, answer, **columns):
    return [
        float(is_right(one[-1].get("content") or "", right))
        for one, right in zip(completions, answer, strict=True)
    ]


def make():
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.response_template = qwen3_template  # the model's own template is not among those that TRL knows
    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["query"]}],
            "answer": row["answer"],
        }
        for row in questions()
    ]
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=reward,
        tools=[python],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir="/tmp/comparison-trl",
            per_device_train_batch_size=GROUP * PROMPTS,
            num_generations=GROUP,
            max_steps=STEPS,
            max_completion_length=MAX_TOKENS,
            max_tool_calling_iterations=MAX_CALLS_IN_TURN,
            temperature=1.0,
            learning_rate=1e-6,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )


if __name__ == "__main__":
    make().train()
