"""``rsipo-fit`` on two ranks, as a user runs it."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rsipo_lightning.cli import fit_main

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ZERO3 = ["--trainer", "zero3", "trainer.accelerator=cpu"]
SMALL = ["rollout.tasks=4", "rollout.group=4", "eval.episodes=8", "eval.every=0"]
RUN = ["--algo", "rsipo", "--env", "search", "trainer.micro_batches=2", *SMALL]
MINUTE = 60.0
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")


def fit(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rsipo_lightning", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )


def metrics(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without ``time/*``, the only columns that may differ between equal runs."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def same(one: Path, other: Path) -> None:
    """The updates of ``one``, up to rounding. ``engine/*`` is measured where weights are sent."""
    for here, there in zip(metrics(one), metrics(other), strict=False):
        for key in here.keys() | there.keys():  # "" or no column: not measured in this update
            if key.startswith("engine/"):
                continue
            value = pytest.approx(float(here.get(key) or "nan"), rel=1e-4, abs=1e-5, nan_ok=True)
            assert float(there.get(key) or "nan") == value, key


def policy(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "policy")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six updates on two ranks."""
    folder = tmp_path_factory.mktemp("zero3") / "straight"
    done = fit(*RUN, *ZERO3, "trainer.updates=6", "checkpoint.every=3", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@needs_deepspeed
def test_two_zero3_ranks_make_the_run_of_one_process(straight: Path, tmp_path: Path) -> None:
    """Rollouts, gains, trust, losses and gradient norms."""
    assert fit_main([*RUN, "trainer.updates=2", f"run.dir={tmp_path / 'one'}"]) == 0
    same(tmp_path / "one", straight)


@needs_deepspeed
def test_frozen_copies_are_shared_too(tmp_path: Path) -> None:
    """Reference and the copy that teaches, with a resume in between: the run of one process."""
    keys = ["--algo", "step_opsd", "--env", "search", "trainer.micro_batches=2", *SMALL]
    keys += ["algo.refresh=2", "algo.kl=0.05", "algo.lam=0.5", "eval.episodes=0"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert fit_main([*keys, "trainer.updates=2", f"run.dir={one}"]) == 0
    assert fit(*keys, *ZERO3, "trainer.updates=1", f"run.dir={two}").returncode == 0
    assert fit("--resume", str(two), "trainer.updates=2").returncode == 0
    same(one, two)


@needs_deepspeed
def test_three_updates_a_resume_and_three_more_are_six(straight: Path, tmp_path: Path) -> None:
    """Bit for bit, with policies written in between."""
    folder = tmp_path / "run"
    first = fit(*RUN, *ZERO3, "trainer.updates=3", "checkpoint.export_every=2", f"run.dir={folder}")
    assert first.returncode == 0, first.stderr
    assert policy(folder)
    assert fit("--resume", str(folder), "trainer.updates=6").returncode == 0
    assert metrics(folder) == metrics(straight)
    one, other = (policy(run).state_dict() for run in (folder, straight))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_deepspeed
def test_an_adapter_is_trained_and_goes_on_on_two_ranks(tmp_path: Path) -> None:
    """Reference, the adapter's copy that teaches and the engine's merged weights: the run of one
    process; 3 updates, a resume and 3 more are 6, bit for bit.
    """
    keys = ["--algo", "step_opsd", "--env", "search", "trainer.micro_batches=2", *SMALL]
    keys += ["algo.refresh=2", "algo.kl=0.05", "algo.lam=0.5", "model.lora.rank=4", "optim.lr=3e-3"]
    keys += ["eval.episodes=0", "checkpoint.every=3"]
    one, straight, cut = (tmp_path / name for name in ("one", "straight", "cut"))
    assert fit_main([*keys, "trainer.updates=3", f"run.dir={one}"]) == 0
    for folder, updates in ((straight, 6), (cut, 3)):
        done = fit(*keys, *ZERO3, f"trainer.updates={updates}", f"run.dir={folder}")
        assert done.returncode == 0, done.stderr
    same(one, straight)
    assert fit("--resume", str(cut), "trainer.updates=6").returncode == 0
    assert metrics(cut) == metrics(straight)
    files = [folder / "policy" / "model.safetensors" for folder in (cut, straight)]
    assert files[0].read_bytes() == files[1].read_bytes()
    files = [
        folder / "policy" / "adapter" / "adapter_model.safetensors" for folder in (cut, straight)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert policy(cut)
    assert load_file(files[0])


@needs_deepspeed
def test_the_policy_is_whole_and_its_head_is_tied(straight: Path) -> None:
    model, start = (
        policy(straight),
        AutoModelForCausalLM.from_pretrained(ROOT / "rsipo_lightning/models/tiny"),
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trained, before = model.state_dict(), start.state_dict()
    assert {name: x.shape for name, x in trained.items()} == {
        name: x.shape for name, x in before.items()
    }
    assert all(not torch.equal(trained[name], before[name]) for name, _ in model.named_parameters())


@needs_deepspeed
def test_a_resume_on_other_ranks_is_refused(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for keys, says in (
        (["trainer.devices=1"], "holds the shares of 2 ranks, this run has 1"),
        (["trainer.strategy=ddp"], "was written with trainer.strategy=zero3"),
    ):
        done = fit("--resume", str(folder), "trainer.updates=7", *keys)
        assert done.returncode == 2
        assert re.fullmatch(rf"rsipo-fit: error: .*{says}.*\n", done.stderr)
    assert metrics(folder) == metrics(straight)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.parametrize("trainer", ["ddp", pytest.param("zero3", marks=needs_deepspeed)])
def test_a_killed_rank_ends_the_run_with_its_reason(trainer: str, tmp_path: Path) -> None:
    """Within a minute, resumable, and nothing is left running."""
    folder = tmp_path / "run"
    argv = [*RUN, "--trainer", trainer, "trainer.accelerator=cpu", "trainer.updates=999"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "rsipo_lightning", *argv, f"run.dir={folder}", "log.progress=false"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 600
        while not (folder / "metrics.csv").exists():
            assert launcher.poll() is None, launcher.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.2)
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        error = launcher.communicate(timeout=MINUTE)[1]
    finally:
        launcher.kill()
    assert launcher.returncode == 75
    assert error.count("rank 1 was killed by SIGKILL; checkpoint: ") == 1
    assert f"go on with: rsipo-fit --resume {folder}" in error
    assert "Traceback" not in error
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


BREAKS = """
import sys
from rsipo_lightning import ranks
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.cli import fit_main
before = ReplayGains.on_train_epoch_start
def broken(self, trainer, module):
    if ranks.rank() == 1 and module.version == 1:
        raise ZeroDivisionError("in rank 1 alone")
    before(self, trainer, module)
ReplayGains.on_train_epoch_start = broken
ranks.command = lambda argv: [sys.executable, __file__, *argv]
sys.exit(fit_main(sys.argv[1:]))
"""


@pytest.mark.parametrize("trainer", ["ddp", pytest.param("zero3", marks=needs_deepspeed)])
def test_an_exception_of_one_rank_is_shown_once(trainer: str, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(BREAKS)
    argv = [*RUN, "--trainer", trainer, "trainer.accelerator=cpu", "log.progress=false"]
    done = subprocess.run(
        [sys.executable, str(script), *argv, f"run.dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: in rank 1 alone") == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.startswith("rank 1:")
