"""The keys of a run. A default is written once, here or in the Config of the component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rsipo_lightning.checks import above, at_least, one_of, within
from rsipo_lightning.errors import ConfigError, did_you_mean

LOGGERS = ("tensorboard", "csv", "wandb")


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
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass
class TrainerSection:
    """How long and on what it is trained."""

    updates: int = 30  # optimizer iterations
    devices: int = 1  # ranks on this node
    accelerator: str = "auto"  # auto | cpu | gpu
    strategy: str = "auto"  # auto | ddp
    minibatches: int = 1  # optimizer steps of one update's rollouts
    micro_batches: int = 4  # forwards of one optimizer step and rank; never changes the step
    threads: int = 0  # torch threads; 0 leaves torch's choice

    def __post_init__(self) -> None:
        for name in ("updates", "minibatches", "micro_batches"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        within("trainer.devices", self.devices, 1, 1024)
        within("trainer.threads", self.threads, 0, 1024)
        one_of("trainer.strategy", self.strategy, ("auto", "ddp"))  # others are not tested
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu"))


@dataclass
class OptimSection:
    """AdamW."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0  # global gradient norm; 0 is off
    schedule: str = "constant"  # constant | linear (to 0 at the last update) | cosine
    warmup: int = 0  # optimizer steps of linear rise

    def __post_init__(self) -> None:
        above("optim.lr", self.lr, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={list(self.betas)}: must both be in [0, 1)")
        at_least("optim.weight_decay", self.weight_decay, 0)
        at_least("optim.clip", self.clip, 0)
        at_least("optim.warmup", self.warmup, 0)
        one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))


@dataclass
class RolloutSection:
    """What is sampled in one update."""

    tasks: int = 16  # per update, over all ranks
    group: int = 8  # G, rollouts of one task
    temperature: float = 1.0
    max_new_tokens: int = 512  # of one turn
    max_skill_tokens: int = 1024  # of one written skill
    analysis_template: str | None = None  # file: how a skill is asked for, else by env.prompt
    context: int = 4096  # tokens of one row
    live: int = 128  # episodes played at once, bounds the KV cache
    max_error_frac: float = 0.2  # more broken episodes than this stop the run

    def __post_init__(self) -> None:
        for name in ("tasks", "group", "max_new_tokens", "max_skill_tokens", "context", "live"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        above("rollout.temperature", self.temperature, 0)
        within("rollout.max_error_frac", self.max_error_frac, 0, 1)


@dataclass
class EvalSection:
    """Looks at tasks that are not trained on."""

    episodes: int = 500  # fresh test tasks before and after training; 0 is off
    every: int = 10  # updates between looks at the validation tasks; 0 is off
    val_episodes: int = 128
    temperature: float = 0.4  # 0 is greedy

    def __post_init__(self) -> None:
        for name in ("episodes", "every", "temperature"):
            at_least(f"eval.{name}", getattr(self, name), 0)
        at_least("eval.val_episodes", self.val_episodes, 1)


@dataclass
class CheckpointSection:
    """What a stopped run goes on from."""

    every: int = 1  # updates
    keep: int = 2  # newest ones; checkpoint 0 is written before update 1

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass
class LogSection:
    """What a run shows, and keeps to be read."""

    groups: int = 2  # groups per update whose transcripts are written in full
    best_skills: int = 5  # of each task type, written with every checkpoint; 0 is off
    # tensorboard | csv | wandb, or import paths of other Lightning loggers; metrics.csv is always
    # written
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])
    progress: bool = True

    def __post_init__(self) -> None:
        at_least("log.groups", self.groups, 0)
        at_least("log.best_skills", self.best_skills, 0)
        for name in self.loggers:
            if "." not in name and name not in LOGGERS:
                hint = did_you_mean(name, LOGGERS)
                raise ConfigError(f"log.loggers={name}: no such logger{hint}")
            if self.loggers.count(name) > 1:
                raise ConfigError(f"log.loggers={name}: stands twice")


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
        within("seed", self.seed, 0, 2**32 - 1)  # numpy takes no other
