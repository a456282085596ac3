"""LoRA through the real commands, on one device."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rsipo_lightning import registry
from rsipo_lightning.algorithms.base import active
from rsipo_lightning.cli import eval_main, fit_main, sft_main
from rsipo_lightning.policy import TINY
from rsipo_lightning.testing import make_algorithm

pytest.importorskip("peft")
LORA = ("model.lora.rank=4", "model.lora.targets=[q_proj,v_proj]", "optim.lr=3e-3")
SMALL = ("rollout.tasks=2", "rollout.group=4", "eval.episodes=0", "eval.every=0")
SMALL += ("log.progress=false", "trainer.micro_batches=2")


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "policy" / "adapter" / "adapter_model.safetensors")


def merged(run: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(run / "policy").state_dict()


def base() -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(TINY).state_dict()


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def check_merged(run: Path) -> set[str]:
    """The folder is the base, bit for bit, plus 2 B A where there is an adapter; names of those
    weights that are not the base's.
    """
    start, own, factors = base(), merged(run), adapter(run)
    for name in start:
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        weight = start[name]
        if f"{key}A.weight" in factors:
            weight = weight + 2.0 * (factors[f"{key}B.weight"] @ factors[f"{key}A.weight"])
        assert torch.equal(own[name], weight), name
    return {name for name in start if not torch.equal(start[name], own[name])}


@pytest.mark.slow
@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_every_algorithm_trains_the_adapter_alone(algo: str, tmp_path: Path) -> None:
    """The first update starts at the reference, so no KL is seen; the second has left it."""
    run = tmp_path / "run"
    argv = ["--algo", algo, "--env", "search", *SMALL, *LORA, "trainer.updates=2"]
    kl = ["algo.kl=0.01"] if "kl" in vars(make_algorithm(algo).config) else []
    assert fit_main([*argv, *kl, f"run.dir={run}"]) == 0
    changed = check_merged(run)
    trains = bool(active(make_algorithm(algo).streams))
    assert len(changed) == (2 * 3 if trains else 0)  # q and v of three layers
    rows = metrics(run)
    if kl:
        far = [float(row["policy/kl_mean"]) for row in rows]
        assert far[0] == 0.0
        assert far[1] > 0.0
    assert all(float(row.get("policy/mismatch_max") or 0) < 5e-5 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["rsipo", "step_opsd"])
def test_three_updates_a_resume_and_three_more_are_six(algo: str, tmp_path: Path) -> None:
    """Bit for bit; checkpoints hold the adapter, its copy that teaches and no base weight."""
    argv = ["--algo", algo, "--env", "search", *SMALL, *LORA, "checkpoint.every=3"]
    if algo == "step_opsd":
        argv += ["algo.refresh=2", "algo.kl=0.05"]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert fit_main([*argv, "trainer.updates=6", f"run.dir={straight}"]) == 0
    assert fit_main([*argv, "trainer.updates=3", f"run.dir={cut}"]) == 0
    held: dict[str, Any] = torch.load(cut / "checkpoints" / "update-000003.ckpt")
    assert len(held["state_dict"]) == 2 * 2 * 3
    assert all("lora_" in name for name in held["state_dict"])
    assert [len(t) for t in held["rsipo"]["teacher"]] == [12] * (algo == "step_opsd")
    assert fit_main(["--resume", str(cut), "trainer.updates=6"]) == 0
    assert metrics(cut) == metrics(straight)
    one, other = adapter(cut), adapter(straight)
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    assert check_merged(cut)


def test_a_run_goes_on_with_the_adapter_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = ["--algo", "vanilla", "--env", "search", *SMALL, *LORA, "trainer.updates=1"]
    assert fit_main([*argv, f"run.dir={run}"]) == 0
    for key in ("model.lora.rank=8", "model.lora.alpha=3", "model.lora.targets=[q_proj]"):
        assert fit_main(["--resume", str(run), "trainer.updates=2", key]) == 2
        assert "goes on with the adapter it has: leave out" in capsys.readouterr().err


def test_the_merged_policy_is_evaluated(tmp_path: Path) -> None:
    """Under the run's config, which asks for an adapter."""
    run = tmp_path / "run"
    argv = ["--algo", "grpo", "--env", "search", *SMALL, *LORA, "trainer.updates=1"]
    assert fit_main([*argv, f"run.dir={run}"]) == 0
    assert eval_main([str(run), "--episodes", "2"]) == 0


@pytest.mark.slow
def test_stage_1_trains_an_adapter(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--env", "search", "rollout.tasks=4", "rollout.group=2", "sft.epochs=1", "sft.batch=4"]
    assert sft_main([*argv, *LORA, "log.progress=false", f"run.dir={run}"]) == 0
    assert len(check_merged(run)) == 6
    rows = metrics(run)
    assert not any("mismatch" in key or "importance" in key for key in rows[0])
    assert all(math.isfinite(float(row["loss/total"])) for row in rows)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["model.lora.rank=4", "model.lora.targets=[q_prj]"], "no linear layer 'q_prj'"),
        (["model.lora.alpha=4"], "need model.lora.rank=N"),
        (["model.lora.rank=-1"], "model.lora.rank=-1: must lie between 0"),
    ],
)
def test_bad_keys_are_refused(
    keys: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--algo", "grpo", "--env", "search", *keys, f"run.dir={tmp_path / 'run'}"]
    assert fit_main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_bfloat16_weights_that_stay_may_be_trained_beside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--algo", "rsipo", "--env", "search", *SMALL, *LORA, "model.dtype=bfloat16"]
    assert fit_main([*argv, "trainer.updates=1", f"run.dir={run}"]) == 0
    assert {x.dtype for x in adapter(run).values()} == {torch.float32}
    assert {x.dtype for x in merged(run).values()} == {torch.bfloat16}
