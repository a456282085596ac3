"""benchmarks/gpu_check.py on a CPU: what can be seen without a GPU is that all its steps run."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def check(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    done = check()
    assert done.returncode == 2
    assert "torch sees no GPU here; nothing measured" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_the_dry_run_measures_all_steps(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = check("--cpu", "--engines", "hf", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["results"]
    assert max(results["gradient"]["distance"].values()) < 1e-5
    assert results["training"]["tokens_per_s"] > 0
    assert results["rollout:hf"]["mismatch_mean"] < 0.01
