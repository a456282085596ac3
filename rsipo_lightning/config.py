"""The keys of a run. A default is written once, here or in the Config of the component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rsipo_lightning.checks import above, at_least, one_of, within
from rsipo_lightning.endpoint import EndpointConfig
from rsipo_lightning.errors import ConfigError, did_you_mean

# values of model.path that name a policy of the package
SHIPPED = ("tiny", "tiny_hard", "tiny_alfworld")
# others that stand for random weights: the tiny policy, and one with tokens for ALFWorld's numbers
UNTRAINED = ("untrained", "untrained_alfworld")
LOGGERS = ("tensorboard", "csv", "wandb")


@dataclass
class RunSection:
    """Where the run is written."""

    root: str = "runs"  # parent of <env>/<algo>/<time>-s<seed>/
    dir: str | None = None  # fixes the folder instead; must not exist


@dataclass
class LoraSection:
    """An adapter that is trained in place of the weights (LoRA)."""

    # 0: all weights are trained. An adapter needs a larger optim.lr than they do, or nothing is
    # learned: papers use rank 64, alpha 128 and 2e-4 (methods.md 5)
    rank: int = 0
    alpha: float | None = None  # what it adds is scaled by alpha / rank; twice the rank if not set
    # names of linear layers, e.g. [q_proj, v_proj]; empty: all but the output embeddings
    targets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        within("model.lora.rank", self.rank, 0, 4096)
        if self.alpha is not None:
            above("model.lora.alpha", self.alpha, 0)
        if not self.rank and (self.alpha is not None or self.targets):
            raise ConfigError("model.lora.alpha and targets need model.lora.rank=N")

    @property
    def scale(self) -> float:
        """Of B A."""
        return 2.0 if self.alpha is None else self.alpha / max(self.rank, 1)


@dataclass
class ModelSection:
    """The policy."""

    # one of SHIPPED or UNTRAINED, a folder, or a hub name: any Hugging Face causal LM
    path: str = "tiny"
    dtype: str = "float32"  # float32 | bfloat16; log-probs are float32 always
    # layers are computed again in the backward pass instead of kept: less memory, a third more time
    gradient_checkpointing: bool = False
    lora: LoraSection = field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass
class ComputeSection:
    """On what is trained."""

    accelerator: str = "auto"  # auto | cpu | gpu
    micro_batches: int = 4  # forwards of one optimizer step and rank; never changes the step
    threads: int = 0  # torch threads; 0 leaves torch's choice

    def __post_init__(self) -> None:
        at_least("trainer.micro_batches", self.micro_batches, 1)
        within("trainer.threads", self.threads, 0, 1024)
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu"))


@dataclass
class TrainerSection(ComputeSection):
    """How long is trained, and on how many devices."""

    updates: int = 30  # optimizer iterations
    devices: int = 1  # ranks on each node
    nodes: int = 1
    strategy: str = "auto"  # auto | ddp | zero3
    minibatches: int = 1  # optimizer steps of one update's rollouts
    # zero3 on GPUs: what is kept in the memory of the CPU, and the step is made there
    offload_optimizer: bool = False
    offload_parameters: bool = False
    gpu_gib: float = 0.0  # memory of a GPU, for the estimate; 0: what the smallest one has
    force_memory: bool = False  # start although the estimate says that it cannot fit

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("updates", "minibatches"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        within("trainer.devices", self.devices, 1, 1024)
        within("trainer.nodes", self.nodes, 1, 1024)
        within("trainer.gpu_gib", self.gpu_gib, 0, 1024)
        one_of("trainer.strategy", self.strategy, ("auto", "ddp", "zero3"))  # others: not tested
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) and not self.zero3:
                raise ConfigError(f"trainer.{name}=true needs --trainer zero3")

    @property
    def ranks(self) -> int:
        """Processes of the run, over all nodes."""
        return self.devices * self.nodes

    @property
    def zero3(self) -> bool:
        """Whether ranks hold shares of the policy."""
        return self.strategy == "zero3"


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
    # where the engine's log-probs are not the trainer's, a token's terms are weighted by how much
    # likelier the trainer finds it, at most this much; exactly 1 within 1e-4 nats, as with the
    # engine hf in float32. 0 is off
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        at_least("rollout.importance_cap", self.importance_cap, 0)
        if 0 < self.importance_cap < 1:
            raise ConfigError(
                f"rollout.importance_cap={self.importance_cap}: must be 0 (off) or at least 1"
            )
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
    export_every: int = 0  # updates between policies written to policy/; 0: at the end only

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.export_every", self.export_every, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass
class DisplaySection:
    """What a run shows."""

    progress: bool = True


@dataclass
class LogSection(DisplaySection):
    """What a run shows, and keeps to be read."""

    groups: int = 2  # groups per update whose transcripts are written in full
    best_skills: int = 5  # of each task type, written with every checkpoint; 0 is off
    # tensorboard | csv | wandb, or import paths of other Lightning loggers; metrics.csv is always
    # written
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])

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
class SftSection:
    """Stage 1: episodes, a hindsight skill for each, and fine-tuning on these skills.

    ``rollout.tasks`` x ``rollout.group`` episodes are played; a row has ``rollout.context`` tokens
    at most.
    """

    actor: str = "expert"  # expert: the environment's scripted one | policy
    labels: str = "scripted"  # scripted: the environment's | endpoint | file: only labels_file
    labels_file: str | None = None  # labels that exist already, e.g. labels.jsonl of an earlier run
    actions: float = 0.0  # weight of the expert's action tokens beside 1 for the skills; 0 is off
    epochs: int = 3
    batch: int = 8  # rows of one optimizer step
    val_frac: float = 0.1  # of the tasks: held out, to look at before and after
    skill_temperature: float = 1.0  # of the skills that are counted before and after
    lessons: int = 0  # updates on lessons of the tiny policies instead of all this
    # what the lessons teach: a key of demonstrations.MIXTURES or household.HOUSE_MIXTURES
    mixture: str = "tiny"
    report: int = 100  # after lessons: tasks of each type that are played; 0 is off
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    def __post_init__(self) -> None:
        one_of("sft.actor", self.actor, ("expert", "policy"))
        one_of("sft.labels", self.labels, ("scripted", "endpoint", "file"))
        for name in ("epochs", "batch"):
            at_least(f"sft.{name}", getattr(self, name), 1)
        for name in ("actions", "skill_temperature", "lessons", "report"):
            at_least(f"sft.{name}", getattr(self, name), 0)
        if not 0 <= self.val_frac < 1:
            raise ConfigError(f"sft.val_frac={self.val_frac}: must be at least 0 and below 1")
        self.endpoint.check("sft.endpoint")
        if self.labels == "file" and not self.labels_file:
            raise ConfigError("sft.labels=file needs sft.labels_file=FILE")
        if self.labels == "scripted" and self.labels_file:
            raise ConfigError("sft.labels_file is given: set sft.labels=file or endpoint to use it")
        if self.labels != "endpoint" and self.endpoint.url:
            raise ConfigError("sft.endpoint.url is given: set sft.labels=endpoint to use it")
        if self.lessons and (self.actor, self.labels, self.actions) != ("expert", "scripted", 0):
            raise ConfigError(
                "sft.lessons are instead of episodes: leave out actor, labels, actions"
            )
        if self.actions and self.actor != "expert":
            raise ConfigError("sft.actions trains on what an expert did: it needs sft.actor=expert")


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

    @property
    def method(self) -> str:
        """What the run's folder lies in."""
        return self.groups["algo"]


@dataclass
class SftConfig:
    """A run of stage 1, ``rsipo-sft``; ``env`` and ``engine`` as in RunConfig."""

    groups: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    trainer: ComputeSection = field(default_factory=ComputeSection)
    optim: OptimSection = field(default_factory=OptimSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    log: DisplaySection = field(default_factory=DisplaySection)
    sft: SftSection = field(default_factory=SftSection)
    env: Any = None
    engine: Any = None

    def __post_init__(self) -> None:
        within("seed", self.seed, 0, 2**32 - 1)

    @property
    def method(self) -> str:
        """What the run's folder lies in."""
        return f"sft-{self.groups['sft']}"

    def training(self, updates: int) -> RunConfig:
        """What the trainer module reads, for a known number of updates."""
        return RunConfig(
            groups=self.groups,
            seed=self.seed,
            run=self.run,
            model=self.model,
            trainer=TrainerSection(**vars(self.trainer), updates=updates),
            optim=self.optim,
            rollout=self.rollout,
            env=self.env,
            engine=self.engine,
        )
