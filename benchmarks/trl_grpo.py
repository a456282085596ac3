"""TRL's side of ``speed.py``: GRPOTrainer on a workload, in an environment that has TRL.

Its best configuration on a CPU that we found: generation by transformers (vLLM and continuous
batching are for GPUs), no gradient checkpointing (TRL's default, which runs the forward twice), and
for several turns a ``rollout_func`` that keeps the KV cache from turn to turn; TRL's own loop of
tool calls encodes the whole conversation again in each turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", OMP_NUM_THREADS="1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import ASSISTANT, USER, Workload, digest, held_mib, peak_mib, reward

MICRO_BATCHES = 4  # as the other side


class Timed(GRPOTrainer):
    """GRPOTrainer that notes the CPU time of its generation and which prompts it had."""

    generation = 0.0
    start_mib = 0.0
    seen: str = ""
    tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        self.start_mib = self.start_mib or held_mib()
        began = time.process_time()
        done = super()._generate(prompts)
        self.generation = time.process_time() - began
        self.seen = digest([tuple(ids) for ids in done[0]])
        masks = done[2] or [[1] * len(ids) for ids in done[1]]
        self.tokens = sum(map(sum, masks))
        return done


class Clock(TrainerCallback):
    """An update lasts from the end of one step to the end of the next."""

    trainer: Timed

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self.last = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, before = time.process_time(), self.last
        self.last = now
        if before:  # the first step warms up
            self.updates.append(
                {
                    "total_s": now - before,
                    "generation_s": self.trainer.generation,
                    "tokens": self.trainer.tokens,
                }
            )


def rollouts(work: Workload, texts: dict[str, int]) -> Any:
    """A rollout function as its user would write it: generate, and go on from the cache."""

    def play(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        ids = tokenizer(prompts, return_tensors="pt").input_ids
        how = GenerationConfig(
            max_new_tokens=work.action,
            do_sample=True,
            top_k=0,
            eos_token_id=trainer.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id,
            disable_compile=True,
        )
        cache = DynamicCache(config=model.config)
        mask: list[int] = []
        for turn in range(work.turns):
            if turn:
                seen = [
                    USER + work.answer(texts[p], work.turns - turn) + ASSISTANT for p in prompts
                ]
                ids = torch.cat([ids, tokenizer(seen, return_tensors="pt").input_ids], dim=1)
                mask += [0] * work.observation
            with torch.no_grad():
                ids = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=how,
                    past_key_values=cache,
                )
            mask += [1] * work.action
        return {
            "prompt_ids": ids[:, : work.prompt].tolist(),
            "completion_ids": ids[:, work.prompt :].tolist(),
            "logprobs": None,
            "env_mask": [mask] * len(prompts),
        }

    return play


def measure(work: Workload, policy: str, updates: int, folder: Path) -> dict[str, Any]:
    """CPU seconds of ``updates`` updates behind one that warms up; peak memory."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    # TRL wants an end token; the model has no row for this one, so nothing ends early
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    texts = {USER + work.question(n) + ASSISTANT: n for n in range(work.tasks)}
    clock = Clock()
    trainer = Timed(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": list(texts)}),
        rollout_func=rollouts(work, texts) if work.turns > 1 else None,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(folder),
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=max(1, work.episodes // MICRO_BATCHES),
            gradient_accumulation_steps=min(MICRO_BATCHES, work.episodes),
            num_generations=work.group,
            max_completion_length=work.row - work.prompt,
            max_steps=1 + updates,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    clock.trainer = trainer
    trainer.train()
    return {
        "updates": clock.updates,
        "start_mib": trainer.start_mib,
        "peak_mib": peak_mib(),
        "prompts": trainer.seen,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
    }


def main() -> None:
    """``trl_grpo.py SPEC.json OUT.json``, see ``speed.py``."""
    warnings.filterwarnings("ignore")
    spec, out = map(Path, sys.argv[1:])
    asked = json.loads(spec.read_text())
    work = Workload(**asked["work"])
    done = measure(work, asked["policy"], asked["updates"], spec.parent / "trl")
    out.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
