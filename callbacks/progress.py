"""``Progress``: one line that says which update runs, what it is doing, and how well it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from rsipo_lightning import keys

SHOWN: Final = {
    keys.SUCCESS: "success {:.2f}",
    keys.GAIN: "gain {:+.3f}",
    keys.TRUST: "trust {:.2f}",
    keys.VAL_SUCCESS: "val {:.2f}",
    keys.IMITATE: "loss {:.3f}",
    keys.VAL_LOSS: "val loss {:.3f}",
}


class Progress(pl.Callback):
    """Bars on a terminal, one plain line per update elsewhere. Stands first among the callbacks.

    It is also a row writer of ``MetricsLogger``: that is how the figures get on the display.
    """

    def __init__(self, updates: int, console: Console | None = None) -> None:
        self.updates = updates
        self.console = console or Console()
        self._since = time.monotonic()
        self._bars: Bars | None = None
        self._run: TaskID | None = None
        self._phase: TaskID | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        """Say what starts now; with a total the second bar counts what ``advance`` reports."""
        if self._bars is not None and self._phase is not None:
            self._bars.reset(self._phase, total=total, description=name)
            self._bars.update(self._phase, total=total)

    def advance(self, n: int = 1) -> None:
        """Count n more of the phase's total."""
        if self._bars is not None and self._phase is not None:
            self._bars.advance(self._phase, n)

    def truncate_after(self, update: int) -> None:
        """Show how far a resumed run had come."""
        if self._bars is not None and self._run is not None:
            self._bars.update(self._run, completed=update)

    def write(self, update: int, row: Mapping[str, float]) -> None:
        """Show the figures of an update that is finished."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        figures = "  ".join(form.format(row[key]) for key, form in SHOWN.items() if key in row)
        if self._bars is not None and self._run is not None:
            self._bars.update(self._run, completed=update, figures=figures)
        else:
            line = f"update {update}/{self.updates}  {figures}  {seconds:.1f} s"
            self.console.print(line, highlight=False, soft_wrap=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.monotonic()
        if trainer.is_global_zero and self.console.is_terminal:
            self._start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.phase("update", trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.advance()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _start(self) -> None:
        self._bars = Bars(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            refresh_per_second=2,  # drawing takes time from the only core of a small machine
        )
        self._run = self._bars.add_task("updates", total=self.updates, figures="")
        self._phase = self._bars.add_task("start", total=None, figures="")
        self._bars.start()

    def _stop(self) -> None:
        if self._bars is not None:
            if self._phase is not None:
                self._bars.remove_task(self._phase)  # only the run's line stays on the screen
            self._bars.stop()
            self._bars = None


def progress_of(trainer: pl.Trainer) -> Progress | None:
    """The display of this trainer, if it has one (``log.progress``)."""
    return next((c for c in trainer.callbacks if isinstance(c, Progress)), None)  # type: ignore[attr-defined]


def announce(trainer: pl.Trainer, phase: str, total: int | None = None) -> None:
    """What a callback calls when a long phase starts: ``announce(trainer, "replay", 64)``."""
    display = progress_of(trainer)
    if display is not None:
        display.phase(phase, total)


@contextmanager
def counting(
    what: str, total: int, console: Console, every_s: float = 60.0
) -> Iterator[Callable[[int], None]]:
    """Show how much of one long job is done and how long the rest takes.

    Gives a function that takes how many more are done. A bar on a terminal that goes away at the
    end; elsewhere a plain line at most every ``every_s`` seconds.
    """
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=console, transient=True, refresh_per_second=2) as bars:
            bar = bars.add_task(what, total=total)
            yield lambda n: bars.advance(bar, n)
        return
    began = shown = time.monotonic()
    done = 0

    def count(n: int) -> None:
        nonlocal done, shown
        done += n
        now = time.monotonic()
        if done and now - shown >= every_s:
            shown = now
            left = (now - began) / done * (total - done)
            line = f"{done} of {total} {what} in {now - began:.0f} s, about {left:.0f} s left"
            console.print(line, highlight=False, soft_wrap=True)

    yield count
