"""benchmarks/speed.py in small: it measures what it says. The times mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_parts_in_small(tmp_path: Path) -> None:
    """Without TRL, which it says; the token counts are those of the work."""
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--quick"]
    done = subprocess.run(
        [*command, "--trl", "nowhere/python"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "TRL is left out: there is no nowhere/python; make bench makes it" in done.stdout
    found = json.loads((tmp_path / "runs" / "speed.json").read_text())
    (side,) = found["side"].values()
    (run,) = side["ours"]
    (update,) = run["updates"]  # the one that warmed up is left out
    work = side["work"]
    assert update["tokens"] == work["tasks"] * work["group"] * work["turns"] * work["action"]
    assert update["total_s"] > update["generation_s"] > 0
    assert run["peak_mib"] > run["start_mib"] > 0
    turns = found["growth"]["turns"]
    assert [turns[n]["updates"][0]["tokens"] for n in ("2", "4")] == [32, 64]
    assert found["live"].keys() == {"2", "4"}
    full, own = found["head"].values()
    assert full["cpu_s"] > 0 < own["cpu_s"]
    assert found["algorithms"]["search"].keys() == {"grpo", "rsipo"}


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--only", "sides"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--only sides: choose from side, growth" in done.stderr
