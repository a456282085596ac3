"""The promise of the README: the tiny policy learns on a laptop, on tasks it has not seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "rsipo"])
def test_success_rises_by_25_points_within_the_budget(algo: str, tmp_path: Path) -> None:
    """What `make fit` runs: 500 fresh tasks at T = 1 before and after, CPU seconds and memory."""
    command = [sys.executable, "-m", "rsipo_lightning", "--algo", algo, "--env", "search"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [*command, f"run.dir={tmp_path / 'run'}"]
    subprocess.run(run, check=True, cwd=tmp_path, env=environ)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    before, after = (record["result"][look]["overall"] for look in ("before", "after"))
    assert before["n"] == after["n"] >= 500
    assert record["result"]["after"]["temperature"] == 1.0
    assert after["success_frac"] - before["success_frac"] >= 0.25
    assert after["valid_action_frac"] > 0.9
    assert record["cpu_s"] < 360
    assert record["result"]["peak_rss_mib"] < 3 * 1024
