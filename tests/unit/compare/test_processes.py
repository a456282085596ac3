"""Runs as processes, here of a script in the place of Python."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rsipo_lightning.compare.main import _alone
from rsipo_lightning.compare.plan import Arm, Run, Setup, State, plan
from rsipo_lightning.compare.processes import _start, _why
from rsipo_lightning.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\necho update 3/60\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    arm = Arm("grpo", "grpo")
    return plan(Setup({"env": "search"}, (), tmp_path / "out"), [arm], [0], None)[arm][0]


def test_a_run_that_outlives_its_comparison_holds_the_folder(run: Run) -> None:
    """The comparison is killed, its run goes on: no other one may touch the run's folder."""
    out = run.setup.out
    with _alone(out) as file:
        process = _start(run, State.NEW, [file.fileno()])
    with pytest.raises(ConfigError, match="or a run that one has left behind"), _alone(out):
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with _alone(out):
        pass


def test_a_run_that_was_killed_is_said_to_be(run: Run) -> None:
    """Its last line says something else."""
    run.log.parent.mkdir(parents=True)
    run.log.write_text("update 3/60\n\n")
    assert _why(-9, run.log) == "killed by signal 9"
    assert _why(1, run.log) == "update 3/60"
