"""Every registered algorithm on every environment, through the real command, in one process."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rsipo_lightning import registry
from rsipo_lightning.cli import fit_main

TINY = (
    "rollout.tasks=2",
    "rollout.group=4",
    "eval.episodes=4",
    "eval.every=0",
    "log.progress=false",
)


SHORT = {"alfworld": ("env.max_steps=3",)}  # episodes of 50 steps would take minutes


@pytest.mark.slow
@pytest.mark.parametrize("env", registry.names("environments"))
@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_trains_and_goes_on(algo: str, env: str, tmp_path: Path) -> None:
    """Two updates, a resume and a third; each writes its numbers."""
    folder = tmp_path / "run"
    argv = ["--algo", algo, "--env", env, *TINY, *SHORT.get(env, ()), f"run.dir={folder}"]
    assert fit_main([*argv, "trainer.updates=2"]) == 0
    assert fit_main(["--resume", str(folder), "trainer.updates=3"]) == 0
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["update"] for row in rows] == ["1", "2", "3"]
    assert all(
        float(row["policy/mismatch_max"] or 0) < 5e-5
        for row in rows
        if "policy/mismatch_max" in row
    )
