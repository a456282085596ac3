"""Weights of plain models, and how much is gathered at a time. Shares: tests/ranks."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from rsipo_lightning.cli import fit_main
from rsipo_lightning.config import RunConfig, TrainerSection
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.sharding import (
    _buckets,
    acting_weights,
    full_state,
    plain_copy,
    sharded,
    share,
)
from rsipo_lightning.strategy import check_zero3, connect, environment
from rsipo_lightning.testing import random_policy


def test_buckets_hold_no_more_than_their_limit() -> None:
    """But for a parameter that is larger alone."""
    named = [(str(n), (nn.Parameter(torch.zeros(n)),)) for n in (3, 4, 9, 2, 2, 8)]
    sizes = [[name for name, _ in bucket] for bucket in _buckets(named, 8)]
    assert sizes == [["3", "4"], ["9"], ["2", "2"], ["8"]]


def test_a_plain_model_is_its_own_whole() -> None:
    model = random_policy(64).model
    assert not sharded(model)
    assert all(x is y for (_, x), y in zip(acting_weights(model), model.parameters(), strict=True))
    assert full_state(model) is None
    assert all(share(p) is p for p in model.parameters())


def test_a_share_is_without_what_pads_it() -> None:
    """As DeepSpeed holds 5 elements on 8 of memory: the rest may be any number."""
    held = torch.arange(8.0).index_fill(0, torch.tensor([5, 6, 7]), torch.nan)
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_tensor, parameter.ds_numel = held, 5
    share(parameter).mul_(2)
    assert held[:5].tolist() == share(parameter).tolist() == [0, 2, 4, 6, 8]


def test_a_copy_has_the_shapes_the_dtype_and_the_tied_head() -> None:
    model = random_policy(64).model.to(torch.bfloat16)
    made = plain_copy(model, torch.device("cpu"))
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight
    shapes = [[(n, p.shape, p.dtype) for n, p in m.named_parameters()] for m in (model, made)]
    assert shapes[0] == shapes[1]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_parameters"])
def test_offload_is_for_zero3(key: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.{key}=true needs --trainer zero3"):
        TrainerSection(**{key: True})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_parameters"])
def test_offload_is_for_gpus(key: str) -> None:
    pytest.importorskip("deepspeed")
    trainer = TrainerSection(strategy="zero3", **{key: True})  # type: ignore[arg-type]
    check_zero3(RunConfig(trainer=trainer), "cuda")
    with pytest.raises(ConfigError, match=f"trainer.{key}=true moves memory of a GPU"):
        check_zero3(RunConfig(trainer=trainer), "cpu")


def test_ranks_are_as_many_as_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig({"trainer": "ddp"}, trainer=TrainerSection(strategy="ddp", devices=2))
    with pytest.raises(ConfigError, match="start it with rsipo-fit or torchrun"):
        connect(config, "cpu")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="started 3 ranks on this node, 3 in all"):
        connect(config, "cpu")


def test_one_rank_is_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig({"trainer": "ddp"}, trainer=TrainerSection(strategy="ddp", devices=2))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="started 1 ranks on this node, 1 in all"):
        connect(config, "cpu")


def test_ranks_of_our_own_are_not_those_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch job of one task that starts two ranks; torchrun's are known by Lightning."""
    for name in ("NTASKS", "NTASKS_PER_NODE", "NNODES"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name, value in (("JOB_NAME", "fit"), ("PROCID", "0"), ("LOCALID", "0"), ("NODEID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", plugins=environment(), logger=False
    )
    assert (trainer.global_rank, trainer.world_size) == (1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert environment() is None


def test_nodes_are_as_many_as_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TrainerSection(strategy="ddp", devices=2, nodes=2)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"nodes=2: the launcher .* 2 ranks on this node, 2 in"):
        connect(RunConfig({"trainer": "ddp"}, trainer=trainer), "cpu")


def test_several_nodes_need_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        fit_main(["--algo", "grpo", "--env", "search", "--trainer", "ddp", "trainer.nodes=2"]) == 2
    )
    assert "trainer.nodes=2: start the command on every node" in capsys.readouterr().err
