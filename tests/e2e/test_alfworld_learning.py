"""The tiny policy learns to keep house: on generated games, from the start that is shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsipo_lightning.composing import compose

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "rsipo"])
def test_success_rises_within_the_budget(algo: str, tmp_path: Path) -> None:
    """A few of the updates that the README measures, on games that need no data."""
    command = [sys.executable, "-m", "rsipo_lightning", "--env", "alfworld", "--algo", algo]
    keys = ["--model", "tiny_alfworld", "trainer.updates=10", "eval.episodes=96"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("ALFWORLD_DATA", None)
    run = tmp_path / "run"
    subprocess.run([*command, *keys, f"run.dir={run}"], check=True, cwd=tmp_path, env=environ)
    record = json.loads((run / "run.json").read_text())
    before, after = (record["result"][look]["overall"] for look in ("before", "after"))
    assert before["n"] == after["n"] == 96
    assert after["success_frac"] - before["success_frac"] >= 0.1
    assert after["valid_action_frac"] > 0.9
    assert record["cpu_s"] < 150


def test_the_default_plays_as_the_lessons_did() -> None:
    for algo in ("grpo", "rsipo"):
        config = compose(algo=algo, env="alfworld")
        assert config.groups["model"] == config.model.path == "tiny_alfworld"
        env = config.env
        assert (env.max_steps, env.history, env.context) == (30, 2, "window")
        assert (env.prompt, env.admissible) == ("compact", "always")
        assert (config.rollout.tasks, config.rollout.group) == (4, 8)
        assert config.eval.episodes >= 100
    assert compose(algo="grpo", env="alfworld_30").model.path == "tiny_alfworld"
    assert compose(algo="grpo", env="search_hard").model.path == "tiny"
