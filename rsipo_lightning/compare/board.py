"""What a person sees while the runs are going: a row per arm, a column per seed."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rsipo_lightning import keys
from rsipo_lightning.compare.plan import Run, State


class Board:
    """A live table on a terminal, a line per event elsewhere."""

    def __init__(self, states: Mapping[Run, State], console: Console | None = None) -> None:
        self.console = console or Console()
        self.cells = {run: state.value for run, state in states.items()}
        self.running: set[Run] = set()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self.table, refresh_per_second=1)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, run: Run) -> None:
        """A process was started."""
        self.running.add(run)
        self._event(run, "started")

    def finished(self, run: Run) -> None:
        """A run has all its updates."""
        self._event(run, "done")

    def failed(self, run: Run, why: str) -> None:
        """A run ended with an error; the others go on."""
        self._event(run, "failed", f"failed: {why} ({run.log})")

    def stopping(self, runs: int) -> None:
        """The runs were told to stop; they first finish their update."""
        text = f"stopping {runs} runs after their update, with checkpoints; again: at once"
        self.console.print(text, highlight=False)

    def table(self) -> Table:
        """Update and last success of what runs, the state of the rest."""
        for run in list(self.running):  # drawn by a thread
            self.cells[run] = _progress(run)
        seeds = list(dict.fromkeys(run.seed for run in self.cells))
        table = Table()
        for name in ("arm", *(f"seed {seed}" for seed in seeds)):
            table.add_column(name, no_wrap=True)
        rows: dict[str, dict[int, str]] = {}
        for run, cell in self.cells.items():
            rows.setdefault(run.arm.name, {})[run.seed] = cell
        for name, cells in rows.items():
            table.add_row(name, *(cells.get(seed, "") for seed in seeds))
        return table

    def _event(self, run: Run, cell: str, line: str = "") -> None:
        self.cells[run] = cell
        if cell != "started":
            self.running.discard(run)
        if self._live is None or line:
            text = f"{run.arm.name} seed {run.seed}: {line or cell}"
            self.console.print(escape(text), highlight=False, soft_wrap=True)


def _progress(run: Run) -> str:
    """``12/60 0.53``: the update, and the success of its rollouts."""
    rows: list[dict[str, str]] = []
    if (path := run.folder / "metrics.csv").exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    if not rows:
        return "starts"
    success = rows[-1].get(keys.SUCCESS)
    figure = f" {float(success):.2f}" if success else ""
    return f"{rows[-1]['update']}/{run.config.trainer.updates}{figure}"
