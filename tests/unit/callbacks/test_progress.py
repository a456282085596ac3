"""The display: plain lines in a file, bars on a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from rsipo_lightning.callbacks.logging import MetricsLogger
from rsipo_lightning.callbacks.progress import Progress, announce, counting
from rsipo_lightning.callbacks.rollout_stats import add_rollouts
from rsipo_lightning.types import Iteration


def run(make: SimpleNamespace, folder: Path, console: Console) -> Progress:
    display = Progress(2, console)

    def fill(it: Iteration) -> None:
        add_rollouts(it.metrics, [make.group(make.task(), [True, False])])
        it.metrics.mean("replay/gain_mean", 0.125)

    make.fit(make.Toy(), folder, [display, make.Collector(fill), MetricsLogger([display])], 2)
    return display


def test_one_plain_line_per_update_in_a_file(make: SimpleNamespace, tmp_path: Path) -> None:
    out = io.StringIO()
    run(make, tmp_path, Console(file=out, width=20))
    lines = out.getvalue().splitlines()
    assert [line.rsplit("  ", 1)[0] for line in lines] == [
        "update 1/2  success 0.50  gain +0.125",
        "update 2/2  success 0.50  gain +0.125",
    ]


def test_bars_with_phase_and_figures_on_a_terminal(make: SimpleNamespace, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    run(make, tmp_path, console)
    shown = out.getvalue()
    assert "2/2" in shown
    assert "success 0.50  gain +0.125" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is back


def test_phases_of_other_callbacks_are_shown(make: SimpleNamespace) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    display = Progress(3, console)
    trainer = SimpleNamespace(is_global_zero=True, callbacks=[display])
    display.on_train_start(trainer, None)  # type: ignore[arg-type]
    announce(trainer, "replay", 64)  # type: ignore[arg-type]
    display.advance(10)
    assert display._bars is not None
    display._bars.refresh()
    display.on_fit_end(trainer, None)  # type: ignore[arg-type]
    assert "replay" in out.getvalue()
    assert "10/64" in out.getvalue()


def test_no_display_no_phase() -> None:
    announce(SimpleNamespace(callbacks=[]), "replay")  # type: ignore[arg-type]


def test_a_long_job_counts_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with counting("episodes", 40, console) as count:
        count(30)
        count(9)
    assert "39/40" in out.getvalue()


def test_a_long_job_says_in_a_file_how_long_the_rest_takes() -> None:
    out = io.StringIO()
    with counting("episodes", 40, Console(file=out, width=20), every_s=0) as count:
        count(0)
        count(10)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("10 of 40 episodes in ")
    out = io.StringIO()
    with counting("episodes", 40, Console(file=out)) as count:
        count(40)
    assert out.getvalue() == ""  # a short one says nothing
