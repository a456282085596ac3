"""Rows through the trainer that RL uses; the loss on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from rsipo_lightning import keys
from rsipo_lightning.build import Actors, accelerator
from rsipo_lightning.callbacks import board
from rsipo_lightning.callbacks.board import Board, writer_errors_once
from rsipo_lightning.callbacks.interrupt import Interrupt
from rsipo_lightning.callbacks.logging import RowWriter
from rsipo_lightning.callbacks.progress import Progress
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import RsipoError
from rsipo_lightning.freshness import Sender
from rsipo_lightning.imitation import Batches, Imitate
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.metrics_csv import MetricsCsv
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy
from rsipo_lightning.tokens import collate
from rsipo_lightning.types import Iteration, Sample

ROWS = 50  # of metrics.csv, about


@torch.no_grad()
def mean_nll(policy: Policy, samples: Sequence[Sample], size: int) -> float:
    """Weighted mean over the tokens of all samples, in nats; ``size`` rows in a forward."""
    total = weights = 0.0
    order = sorted(samples, key=lambda s: len(s.ids))
    for i in range(0, len(order), size):
        batch = collate(order[i : i + size], policy.device)
        weight = batch.credits["imitate"].weight
        logp = policy(batch.ids, batch.mask, batch.temperature)[0]
        total -= float((weight * logp).sum())
        weights += float(weight.sum())
    return total / weights


class Updates(L.Callback):
    """Opens and closes the iterations of a run that plays no episodes, and logs them.

    A row of the log is the mean of the updates since the last one. The held-out loss is measured
    every ``epoch`` updates.
    """

    def __init__(
        self,
        writers: Sequence[RowWriter],
        every: int,
        held: Sequence[Sample] = (),
        epoch: int = 0,
        size: int = 1,
    ) -> None:
        self.writers, self.every = writers, every
        self.held, self.epoch, self.size = held, epoch, size
        self._means = Metrics()

    def on_train_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        board.add_layout(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        pl_module.iteration = Iteration(pl_module.version, [], Metrics())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        pl_module.close_update()
        pl_module.version += 1
        update = pl_module.version
        for key, value in pl_module.iteration.metrics.reduce().items():
            self._means.mean(key, value)
        look = self.held and update % self.epoch == 0
        if look:
            self._means.mean(keys.VAL_LOSS, mean_nll(pl_module.policy, self.held, self.size))
        if look or update % self.every == 0 or update == trainer.max_epochs:
            self._write(trainer, update, self._means.reduce())
            self._means = Metrics()

    def _write(self, trainer: L.Trainer, update: int, row: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=update)
        board.flush(trainer)
        for writer in self.writers:
            writer.write(update, row)


def train(
    config: RunConfig,
    made: Actors,
    batches: Batches,
    folder: Path,
    console: Console | None,
    held: Sequence[Sample] = (),
    epoch: int = 0,
) -> None:
    """``config.trainer.updates`` updates on these batches; the policy is on its device afterwards.

    ``epoch``: updates between looks at the ``held`` samples. Raises DivergedError, and
    KeyboardInterrupt after a Ctrl-C.
    """
    t = config.trainer
    module = PolicyModule(made.policy, Imitate(batches), config, made.player)
    display = [Progress(t.updates, console)] if console else []
    writers: list[RowWriter] = [MetricsCsv(folder / "metrics.csv"), *display]
    size = max(1, len(batches.batch(0)) // t.micro_batches)
    interrupt = Interrupt(kept="")
    trainer = L.Trainer(
        accelerator=accelerator(config),
        devices=1,
        max_epochs=t.updates,
        accumulate_grad_batches=t.micro_batches,
        gradient_clip_val=config.optim.clip or None,
        logger=Board(folder, 1),
        callbacks=[
            *display,
            Updates(writers, max(1, t.updates // ROWS), held, epoch, size),
            interrupt,
        ],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    made.player.engine.rest()
    try:
        with interrupt, writer_errors_once():
            trainer.fit(module)
    except SIGTERMException as error:  # a SystemExit of code 0, as if all had been done
        raise RsipoError("stopped by SIGTERM") from error
    if interrupt.presses:
        raise KeyboardInterrupt
    made.policy.to(accelerator(config))  # Lightning has put it back on the CPU
    Sender(made.player, config).send(made.policy, module.version)
