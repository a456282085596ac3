"""The keys of a run. A default is written once, here or in the Config of the component; YAML says only what differs.

This module imports no torch: ``--help``, ``--list`` and ``--print-config`` answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunSection:
    root: str = "runs"  # parent of <env>/<algo>/<time>-s<seed>/
    dir: str | None = None  # fixes the folder instead; must not exist


@dataclass
class ModelSection:
    path: str = "tiny"  # "tiny" (shipped with the package), a folder, or a hub name: any Hugging Face causal LM
    dtype: str = "float32"  # float32 | bfloat16; log-probs are float32 always


@dataclass
class TrainerSection:
    updates: int = 30  # optimizer iterations
    devices: int = 1  # ranks on this node
    accelerator: str = "auto"
    strategy: str = "auto"  # what Lightning's Trainer is given
    minibatches: int = 1  # optimizer steps of one update's rollouts
    micro_batches: int = 4  # forwards of one optimizer step and rank; never changes the step
    threads: int = 0  # torch threads; 0 leaves torch's choice


@dataclass
class OptimSection:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0  # global gradient norm; 0 is off


@dataclass
class RolloutSection:
    tasks: int = 16  # per update, over all ranks
    group: int = 8  # G, rollouts of one task
    temperature: float = 1.0
    max_new_tokens: int = 512  # of one turn
    max_skill_tokens: int = 1024  # of one written skill
    context: int = 4096  # tokens of one row
    live: int = 128  # episodes played at once, bounds the KV cache
    max_error_frac: float = 0.2  # more broken episodes than this stop the run


@dataclass
class EvalSection:
    episodes: int = 500  # fresh test tasks before and after training; 0 is off
    every: int = 10  # updates between looks at the validation tasks; 0 is off
    val_episodes: int = 128
    temperature: float = 0.4


@dataclass
class CheckpointSection:
    every: int = 1  # updates
    keep: int = 2  # newest ones; checkpoint 0 is written before update 1


@dataclass
class LogSection:
    groups: int = 2  # groups per update whose transcripts are written in full
    progress: bool = True


@dataclass
class RunConfig:
    """A whole run. ``algo``, ``env`` and ``engine`` are instances of the chosen component's Config."""

    groups: dict[str, str] = field(default_factory=dict)  # {"algo": "rsipo", "env": "search", ...}: what was chosen
    seed: int = 0
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    optim: OptimSection = field(default_factory=OptimSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    algo: Any = None
    env: Any = None
    engine: Any = None
