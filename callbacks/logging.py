"""``MetricsLogger``: the one place where an iteration's values are reduced and sent away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import lightning.pytorch as pl

from rsipo_lightning import keys
from rsipo_lightning.callbacks import board
from rsipo_lightning.callbacks.host import host, updates_made


class RowWriter(Protocol):
    """Takes one row per update: ``MetricsCsv``, ``Progress``."""

    def truncate_after(self, update: int) -> None:
        """The run starts or goes on after that update: later rows will be made again."""

    def write(self, update: int, row: dict[str, float]) -> None:
        """The figures of an update that is finished."""


class MetricsLogger(pl.Callback):
    """Reduces ``iteration.metrics`` over the ranks, once, and sends the row to loggers and writers.

    Stands after every callback that adds values. The x-axis is the update, counted from 1.
    """

    def __init__(self, writers: Sequence[RowWriter] = ()) -> None:
        self.writers = writers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        board.add_layout(trainer)
        if trainer.is_global_zero:
            for writer in self.writers:
                writer.truncate_after(updates_made(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = host(pl_module)
        update = module.iteration.update + 1
        row = module.iteration.metrics.reduce()
        row[keys.VERSION] = float(module.version)
        for logger in trainer.loggers:
            logger.log_metrics(row, step=update)
        board.flush(trainer)
        if trainer.is_global_zero:
            for writer in self.writers:
                writer.write(update, row)
