"""``rsipo-fit --engine vllm`` as a user runs it: one process, a resume, two ranks under ZeRO-3."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM: make test-vllm"),
]
ROOT = Path(__file__).parents[2]
RUN = ["--algo", "rsipo", "--env", "search", "--engine", "vllm", "log.progress=false"]
RUN += ["rollout.tasks=4", "rollout.group=4", "eval.episodes=4", "eval.every=0"]
RUN += ["trainer.micro_batches=2", "engine.cache_gib=0.25", "trainer.updates=2"]


def fit(*argv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rsipo_lightning", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def metrics(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without ``time/*``."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Two updates in one process."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    fit(*RUN, f"run.dir={folder}")
    return metrics(folder)


def test_every_tensor_arrives_and_log_probs_are_the_trainers(
    straight: list[dict[str, str]],
) -> None:
    assert [row["update"] for row in straight] == ["1", "2"]
    for row in straight:
        assert float(row["engine/changed_count"]) == 38
        assert float(row["policy/mismatch_max"]) < 1e-4


def test_one_update_a_resume_and_another_are_two(
    straight: list[dict[str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    fit(*RUN, "trainer.updates=1", f"run.dir={folder}")
    fit("--resume", str(folder), "trainer.updates=2")
    assert metrics(folder) == straight


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_two_zero3_ranks_make_the_run_of_one_process(
    straight: list[dict[str, str]], tmp_path: Path
) -> None:
    """A vLLM in each rank, its weights gathered from both."""
    folder = tmp_path / "run"
    fit(*RUN, "--trainer", "zero3", "trainer.accelerator=cpu", f"run.dir={folder}")
    for here, there in zip(straight, metrics(folder), strict=True):
        for key in here.keys() | there.keys():
            if key == "policy/mismatch_max":  # rounding itself
                assert float(there[key]) < 1e-4
                continue
            value = pytest.approx(float(here.get(key) or "nan"), rel=1e-4, abs=1e-5, nan_ok=True)
            assert float(there.get(key) or "nan") == value, key


@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
def test_an_adapter_arrives_merged(tmp_path: Path) -> None:
    """Every weight beside it, and no other one, is another in the engine after an update."""
    folder = tmp_path / "run"
    fit(*RUN, "model.lora.rank=4", "optim.lr=1e-3", f"run.dir={folder}")
    for row in metrics(folder):
        assert float(row["engine/changed_count"]) == 21  # 3 layers of 7 linear ones
        assert float(row["policy/mismatch_max"]) < 1e-4
