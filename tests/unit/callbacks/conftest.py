"""Small builders, and a toy module with the layout of the real one: an epoch is an iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

from rsipo_lightning.metrics import Metrics
from rsipo_lightning.protocols import Environment, EnvironmentConfig, TaskSuite
from rsipo_lightning.types import (
    Completion,
    Iteration,
    ReplayResult,
    Role,
    RolloutGroup,
    Skill,
    Stop,
    Task,
    Trajectory,
    Turn,
    WrittenSkill,
)


def task(id: str = "t1", type: str = "two_hop") -> Task:
    return Task(id=id, env="search", type=type, payload={})


def completion(text: str = "<answer>x</answer>", n: int = 2, truncated: bool = False) -> Completion:
    return Completion(tuple(range(n)), (-0.5,) * n, text, truncated, policy_version=0)


def turn(
    text: str = "<answer>x</answer>", n: int = 2, valid: bool = True, truncated: bool = False
) -> Turn:
    return Turn((7, 8, 9), 1, completion(text, n, truncated), text, "seen", 0.0, valid)


def trajectory(
    of: Task | None = None,
    success: bool = True,
    turns: Sequence[Turn] | None = None,
    score: float | None = None,
    stop: Stop = Stop.DONE,
    index: int = 0,
    skill: Skill | None = None,
    measures: Mapping[str, float] | None = None,
) -> Trajectory:
    return Trajectory(
        task=of or task(),
        index=index,
        turns=tuple(turns if turns is not None else [turn()]),
        success=success,
        score=float(success) if score is None else score,
        stop=stop,
        max_steps=4,
        skill=skill,
        error="boom" if stop is Stop.ERROR else "",
        measures=measures or {},
    )


def group(of: Task | None = None, outcomes: Sequence[bool] = (True, False)) -> RolloutGroup:
    of = of or task()
    return RolloutGroup(of, tuple(trajectory(of, s, index=i) for i, s in enumerate(outcomes)))


def skill(
    of: Task | None = None,
    text: str = "1. search first",
    category: str = "procedural",
    invalid: str = "",
) -> WrittenSkill:
    raw = completion(f'{{"skill": "{text}"}}')
    evidence = trajectory(of)
    return WrittenSkill(
        evidence.task,
        "" if invalid else text,
        category,
        invalid,
        trajectory=evidence,
        prompt_ids=(1, 2),
        completion=raw,
    )


def replay(of: Skill, treated: Sequence[bool], control: Sequence[bool], gain: float | None) -> Any:
    with_skill = tuple(trajectory(of.task, s, index=i, skill=of) for i, s in enumerate(treated))
    without = tuple(trajectory(of.task, s, index=i) for i, s in enumerate(control))
    return ReplayResult(of, with_skill, without, gain, 0.01)


class Decoder:
    def decode(self, ids: Sequence[int]) -> str:
        return f"<b>prompt</b> of {len(ids)} tokens"


class Suite(TaskSuite):
    """20 test and 8 validation tasks of two types; only ``play`` of the toy module plays them."""

    name = "search"
    config = EnvironmentConfig()
    types = ("one_hop", "two_hop")

    def tasks(self, split: str) -> list[Task]:
        n = {"test": 20, "val": 8}[split]
        return [task(f"{split}-{i}", self.types[i % 2]) for i in range(n)]

    def make(self) -> Environment:
        raise NotImplementedError


class Numbers(Dataset[torch.Tensor]):
    """Lazy, like micro-batches: what is read was made in on_train_epoch_start."""

    def __init__(self, module: Toy) -> None:
        self.module = module

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.module.batches[index]


class Toy(pl.LightningModule):
    """Rollouts depend on the weights, updates on the rollouts; momentum and a counter are state."""

    def __init__(self, log: list[str] | None = None) -> None:
        super().__init__()
        self.policy = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.policy.weight, 0.5)
        torch.nn.init.constant_(self.policy.bias, 0.0)
        self.codec = Decoder()
        self.version = 0
        self.seen = 0  # stands for the running statistics of an algorithm
        self.batches: list[torch.Tensor] = []
        self.log_of_hooks = [] if log is None else log
        self.played: list[tuple[list[str], Role, int, float, int]] = []
        self.phases: list[str] = []
        self.iteration = Iteration(0, [], Metrics())

    def play(
        self,
        tasks: Sequence[Task],
        role: Role,
        n: int,
        temperature: float,
        update: int,
        phase: str = "plain",
    ) -> list[RolloutGroup]:
        self.phases.append(phase)
        self.played.append(([t.id for t in tasks], role, n, temperature, update))
        # before training the two_hop tasks fail, later all succeed
        return [group(t, [t.type == "one_hop" or self.version > 0] * n) for t in tasks]

    def on_train_epoch_start(self) -> None:
        self.log_of_hooks.append(f"credit {self.current_epoch}")
        self.seen += 1
        # a function of the update and of the weights, like rollouts
        noise = torch.Generator().manual_seed(self.current_epoch)
        scale = self.policy.weight.detach().mean()
        self.batches = [torch.randn(3, generator=noise) + scale + self.seen for _ in range(2)]

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.log_of_hooks.append(f"step {self.current_epoch}.{index}")
        return (self.policy(batch) - 1).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.version += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["toy"] = {"version": self.version, "seen": self.seen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.version, self.seen = checkpoint["toy"]["version"], checkpoint["toy"]["seen"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(self), batch_size=None)


class Collector(pl.Callback):
    """Stands for RolloutCollector and ReplayGains; ``during`` runs in the middle of rollouts."""

    def __init__(
        self,
        fill: Callable[[Iteration], None] | None = None,
        during: Callable[[int], None] | None = None,
    ) -> None:
        self.fill = fill
        self.during = during

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.iteration = Iteration(trainer.current_epoch, [], Metrics())
        pl_module.log_of_hooks.append(f"rollout {trainer.current_epoch}")
        if self.during is not None:
            self.during(trainer.current_epoch)
        if self.fill is not None:
            self.fill(pl_module.iteration)


def fit(
    module: Toy, folder: Path, callbacks: Sequence[pl.Callback], updates: int, **fit: Any
) -> pl.Trainer:
    trainer = pl.Trainer(
        max_epochs=updates,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=1,
        logger=TensorBoardLogger(folder, name="", version="", default_hp_metric=False),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, weights_only=True, **fit)
    return trainer


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The builders above, by name: test files import no siblings."""
    return SimpleNamespace(
        task=task,
        turn=turn,
        trajectory=trajectory,
        group=group,
        skill=skill,
        replay=replay,
        completion=completion,
        Toy=Toy,
        Suite=Suite,
        Decoder=Decoder,
        Collector=Collector,
        fit=fit,
    )
