"""The keys of a run. A default is written once, here or in the Config of the component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rsipo_lightning.checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FRACTION,
    Rule,
    require,
    require_choice,
)
from rsipo_lightning.errors import ConfigError


@dataclass
class RunSection:
    """Where the run is written."""

    root: str = "runs"  # parent of <env>/<algo>/<time>-s<seed>/
    dir: str | None = None  # fixes the folder instead; must not exist


@dataclass
class ModelSection:
    """The policy."""

    # "tiny" (shipped with the package), a folder, or a hub name: any Hugging Face causal LM
    path: str = "tiny"
    dtype: str = "float32"  # float32 | bfloat16; log-probs are float32 always

    def __post_init__(self) -> None:
        require_choice("model", self, dtype=("float32", "bfloat16"))


@dataclass
class TrainerSection:
    """What Lightning's Trainer is given."""

    updates: int = 30  # optimizer iterations
    devices: int = 1  # ranks on this node
    accelerator: str = "auto"
    strategy: str = "auto"
    micro_batches: int = 4  # forwards per update and rank; never changes the update
    threads: int = 0  # torch threads; 0 leaves torch's choice

    def __post_init__(self) -> None:
        require(
            "trainer",
            self,
            updates=AT_LEAST_1,
            devices=AT_LEAST_1,
            micro_batches=AT_LEAST_1,
            threads=AT_LEAST_0,
        )


@dataclass
class OptimSection:
    """AdamW."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0  # global gradient norm; 0 is off

    def __post_init__(self) -> None:
        betas = Rule("must both be in [0, 1)", lambda pair: all(0 <= b < 1 for b in pair))
        require("optim", self, lr=ABOVE_0, betas=betas, weight_decay=AT_LEAST_0, clip=AT_LEAST_0)


@dataclass
class RolloutSection:
    """What is sampled in one update."""

    tasks: int = 16  # per update, over all ranks
    group: int = 8  # G, rollouts of one task
    temperature: float = 1.0
    max_new_tokens: int = 512  # of one turn
    max_skill_tokens: int = 1024  # of one written skill
    context: int = 4096  # tokens of one row
    max_error_frac: float = 0.2  # more broken episodes than this stop the run

    def __post_init__(self) -> None:
        require(
            "rollout",
            self,
            tasks=AT_LEAST_1,
            group=AT_LEAST_1,
            temperature=ABOVE_0,
            max_new_tokens=AT_LEAST_1,
            max_skill_tokens=AT_LEAST_1,
            context=AT_LEAST_1,
            max_error_frac=FRACTION,
        )


@dataclass
class EvalSection:
    """Looks at tasks that are not trained on."""

    episodes: int = 500  # fresh test tasks before and after training; 0 is off
    every: int = 10  # updates between looks at the validation tasks; 0 is off
    val_episodes: int = 128
    temperature: float = 0.4

    def __post_init__(self) -> None:
        require(
            "eval",
            self,
            episodes=AT_LEAST_0,
            every=AT_LEAST_0,
            val_episodes=AT_LEAST_1,
            temperature=AT_LEAST_0,
        )


@dataclass
class CheckpointSection:
    """What a stopped run goes on from."""

    every: int = 1  # updates
    keep: int = 2  # newest ones; checkpoint 0 is written before update 1

    def __post_init__(self) -> None:
        require("checkpoint", self, every=AT_LEAST_1, keep=AT_LEAST_1)


@dataclass
class LogSection:
    """What a run shows and keeps to read."""

    groups: int = 2  # groups per update whose transcripts are written in full
    progress: bool = True

    def __post_init__(self) -> None:
        require("log", self, groups=AT_LEAST_0)


@dataclass
class RunConfig:
    """A whole run. ``algo``, ``env`` and ``engine``: instances of the chosen component's Config."""

    # {"algo": "rsipo", "env": "search", ...}: what was chosen
    groups: dict[str, str] = field(default_factory=dict)
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

    def __post_init__(self) -> None:
        # numpy takes no other seed
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must be between 0 and 4294967295")
