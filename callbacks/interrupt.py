"""``Interrupt``: Ctrl-C ends the run after this update, a second one at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import lightning.pytorch as pl


class Interrupt(pl.Callback):
    """Both a callback (it stops the trainer) and a context (it owns SIGINT while inside)::

        interrupt = Interrupt()
        with interrupt:
            trainer.fit(...)  # among its callbacks: interrupt, then checkpoints
        if interrupt.presses: ...  # stopped by hand, with a checkpoint

    The second Ctrl-C leaves the context as KeyboardInterrupt. ``kept``: what the first one says.
    """

    def __init__(self, kept: str = ", with a checkpoint") -> None:
        self.presses = 0
        self._kept = kept
        self._before: Any = None

    def __enter__(self) -> Self:
        # Python lets the main thread only set handlers; elsewhere Ctrl-C does what it did before.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__  # Lightning had made a SystemExit(1) of it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_if_pressed(trainer)  # during the first evaluation

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_if_pressed(trainer)

    def _stop_if_pressed(self, trainer: pl.Trainer) -> None:
        # A terminal signals all ranks, but not at the same moment: all stop where one was told to.
        # Not set by the handler itself: in the middle of an epoch it would cut off micro-batches.
        if trainer.strategy.reduce_boolean_decision(self.presses > 0, all=False):
            trainer.should_stop = True

    def _pressed(self, signum: int, frame: FrameType | None) -> None:
        self.presses += 1
        if self.presses > 1:
            raise KeyboardInterrupt
        print(
            f"\nStopping after this update{self._kept}; press Ctrl-C again to stop at once.",
            file=sys.stderr,
            flush=True,
        )
