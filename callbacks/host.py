"""What callbacks use of the LightningModule they are given; ``module.PolicyModule`` has it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import lightning.pytorch as pl

from rsipo_lightning.types import Iteration, Role, RolloutGroup, Task


class Decoder(Protocol):
    """The part of the codec that makes token ids readable."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Host(Protocol):
    """Nothing else of the module is touched by the callbacks that use ``host``."""

    iteration: Iteration
    version: int  # updates made
    codec: Decoder

    def play(
        self,
        tasks: Sequence[Task],
        role: Role,
        n: int,
        temperature: float,
        update: int,
        phase: str | None = None,
    ) -> list[RolloutGroup]:
        """Play each task n times with the weights as they are."""


def host(pl_module: pl.LightningModule) -> Host:
    """The module, typed; Lightning's hooks know it as a LightningModule only."""
    return cast(Host, pl_module)


def updates_made(trainer: pl.Trainer) -> int:
    """Iterations whose batches are all done: right in every hook, before an epoch's end and after.

    ``trainer.current_epoch`` goes up only after ``on_train_epoch_end``.
    """
    counters: Any = trainer.fit_loop.epoch_progress.current
    return int(counters.processed)
