"""An environment of fixed lengths for ``speed.py``, and the policy that plays it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from workload import ASK, ASSISTANT, OTHER, PAD, SYSTEM, TEMPLATE, USER, Workload, reward, word

from rsipo_lightning.errors import EnvironmentFault
from rsipo_lightning.protocols import EnvironmentConfig, StepResult, TaskSuite
from rsipo_lightning.types import Stop, Task

TOKENIZED = 8192  # entries of the tokenizer; a larger vocabulary has ids without text


@dataclass
class FixedConfig(EnvironmentConfig):
    """Lengths in tokens."""

    prompt_tokens: int = 64
    observation_tokens: int = 40
    tasks: int = 4  # of each split: an update plays all of them


class Episode:
    """Says the same whatever the policy does."""

    def __init__(self, work: Workload) -> None:
        self.work, self.task, self.left = work, 0, 0

    def reset(self, task: Task) -> str:
        self.task, self.left = task.payload["number"], self.work.turns
        return self.work.question(self.task)

    def step(self, response: str) -> StepResult:
        if not self.left:
            raise EnvironmentFault("fixed: step() after the end; call reset(task) first")
        self.left -= 1
        if self.left:
            return StepResult("", self.work.answer(self.task, self.left))
        value = reward(response)
        return StepResult("", "", reward=value, success=value > 0.5, stop=Stop.MAX_TURNS)

    def close(self) -> None:
        self.left = 0


class Fixed(TaskSuite):
    """As many tasks as an update plays, with the texts of a Workload."""

    Config, name, types = FixedConfig, "fixed", ("fixed",)
    # never said, but looked for, as in real environments
    stop = ("</search>", "</answer>")

    def __init__(self, config: FixedConfig, seed: int) -> None:
        self.config = config
        self.work = Workload(
            tasks=config.tasks,
            turns=config.max_steps,
            prompt=config.prompt_tokens,
            observation=config.observation_tokens,
        )

    def tasks(self, split: str) -> list[Task]:
        first = {"train": 0, "val": 10**6, "test": 2 * 10**6}[split]
        numbers = range(first, first + self.config.tasks)
        return [Task(f"t{n}", self.name, "fixed", {"number": n}) for n in numbers]

    def make(self) -> Episode:
        return Episode(self.work)


def register(site: Path) -> None:
    """The entry point that an installed package would bring, in a folder for ``sys.path``."""
    info = site / "rsipo_fixed-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rsipo-fixed\nVersion: 0.1\n")
    points = "[rsipo_lightning.environments]\nfixed = fixed:Fixed\n"
    (info / "entry_points.txt").write_text(points)


def tokenizer() -> PreTrainedTokenizerBase:
    """Bytes and words; no end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(alphabet)},
        merges=[],
        unk_token=None,
        eos_token=None,
        pad_token=PAD,
        chat_template=TEMPLATE,
    )
    pieces = [USER, ASSISTANT, SYSTEM, ASK, *map(word, range(TOKENIZED - OTHER))]
    made.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return made


def write_policy(folder: Path, vocabulary: int, seed: int = 0) -> None:
    """A Qwen2 of 4 layers and width 256 with random weights: 5.0 M parameters with 8,192 tokens."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=608,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=TOKENIZED - 1 if vocabulary < TOKENIZED else 256,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def arguments(work: Workload, policy: Path) -> list[str]:
    """Keys of ``rsipo-fit`` for this work: plain GRPO, nothing drawn or kept beside it."""
    keys = {
        "env.max_steps": work.turns,
        "env.prompt_tokens": work.prompt,
        "env.observation_tokens": work.observation,
        "env.tasks": work.tasks,
        "rollout.tasks": work.tasks,
        "rollout.group": work.group,
        "rollout.max_new_tokens": work.action,
        "rollout.context": work.row + 64,
        "model.path": policy,
        "algo.kl": 0,
        "algo.entropy": 0,
    }
    choice = ["--algo", "grpo", "--env", "fixed", "--model", "hf"]
    return [*choice, *(f"{key}={value}" for key, value in keys.items())]


def plain(work: Workload) -> dict[str, int]:
    """For JSON."""
    return {**asdict(work), "row": work.row, "policy_tokens": work.policy_tokens}
