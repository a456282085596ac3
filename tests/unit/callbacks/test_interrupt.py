"""Ctrl-C as a real signal, in this process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsipo_lightning.callbacks.checkpoints import Checkpoints, latest
from rsipo_lightning.callbacks.interrupt import Interrupt


def press_at(update: int, times: int = 1) -> object:
    def during(now: int) -> None:
        if now == update:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return during


def test_the_first_finishes_the_update_and_leaves_a_checkpoint(
    make: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    module, interrupt = make.Toy(), Interrupt()
    callbacks = [make.Collector(during=press_at(1)), interrupt, Checkpoints(tmp_path, 100, 9)]
    with interrupt:
        make.fit(module, tmp_path, callbacks, 5)
    assert module.log_of_hooks[-2:] == ["step 1.0", "step 1.1"]  # every micro-batch
    assert latest(tmp_path).name == "update-000002.ckpt"
    assert interrupt.presses == 1
    assert "press Ctrl-C again to stop at once" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_kept_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 writes no checkpoint."""
    with Interrupt(kept=""):
        os.kill(os.getpid(), signal.SIGINT)
    assert "Stopping after this update; press" in capsys.readouterr().err


def test_the_second_stops_at_once_and_the_update_can_be_repeated(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    module, interrupt = make.Toy(), Interrupt()
    callbacks = [make.Collector(during=press_at(1, 2)), interrupt, Checkpoints(tmp_path, 100, 9)]
    with pytest.raises(KeyboardInterrupt), interrupt:
        make.fit(module, tmp_path, callbacks, 5)
    assert module.log_of_hooks[-1] == "rollout 1"
    assert latest(tmp_path).name == "update-000001.ckpt"
    assert signal.getsignal(signal.SIGINT) is before


def test_during_the_first_evaluation_no_update_is_made(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    class Evaluates(make.Collector):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: object, pl_module: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    module, interrupt = make.Toy(), Interrupt()
    with interrupt:
        make.fit(module, tmp_path, [Evaluates(), interrupt, Checkpoints(tmp_path, 1, 9)], 5)
    assert module.log_of_hooks == []
    assert latest(tmp_path).name == "update-000000.ckpt"
