"""A disk that is full: exit code 75 with the older checkpoints, or 2 and nothing left.

The limit on the size of files stands for it: writing fails in the same places, for any user.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rsipo_lightning.callbacks.checkpoints import saved
from rsipo_lightning.cli import fit_main, sft_main
from rsipo_lightning.environments.retriever import BM25Retriever
from rsipo_lightning.sft.training import Updates

SMALL = (
    "trainer.updates=2",
    "rollout.tasks=2",
    "rollout.group=4",
    "eval.episodes=0",
    "eval.every=0",
    "log.progress=false",
)
MIB = 2**20

# A writer's thread says nothing of its own.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def limit(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def stops(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run until the disk is full; give the one line that was said."""

    def call(code: int, *argv: str) -> str:
        assert fit_main(["--env", "search", *SMALL, *argv]) == code
        limit(resource.RLIM_INFINITY)
        (line,) = capsys.readouterr().err.splitlines()
        assert "File too large" in line
        return line

    return call


def full_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, size: int) -> None:
    """The disk has room for files of ``size`` only once this method is called."""
    real = getattr(owner, name)

    def fills(*args: Any, **kwargs: Any) -> Any:
        limit(size)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fills)


def test_at_the_start_nothing_is_left(tmp_path: Path, stops: Any) -> None:
    (tmp_path / "mine").mkdir()
    limit(MIB)
    line = stops(2, "--algo", "grpo", f"run.root={tmp_path / 'mine' / 'a' / 'b'}")
    assert "cannot write " in line
    assert "--resume" not in line
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_checkpoint_leaves_the_older_ones(tmp_path: Path, stops: Any) -> None:
    """The first is 3 MiB; with the state of AdamW it is 9."""
    folder = tmp_path / "run"
    limit(5 * MIB)
    line = stops(75, "--algo", "rsipo", f"run.dir={folder}")
    assert f"cannot write {folder}/checkpoints/update-000001.ckpt" in line
    assert f"go on with: rsipo-fit --resume {folder}" in line
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["update-000000.ckpt"]
    torch.load(folder / "checkpoints" / "update-000000.ckpt", weights_only=True)
    assert fit_main(["--resume", str(folder)]) == 0


@pytest.mark.parametrize(
    ("algo", "keys"),
    [
        ("rsipo", ["log.loggers=[]"]),  # skills.jsonl
        ("grpo", ["log.loggers=[]", "log.groups=0"]),  # metrics.csv
        ("grpo", ["log.groups=0"]),  # TensorBoard's events, written in a thread
        ("grpo", ["log.loggers=[csv]", "log.groups=0"]),
    ],
)
def test_a_file_that_grows(
    algo: str, keys: list[str], tmp_path: Path, stops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    full_once(monkeypatch, BM25Retriever, "search", size=1)  # in the rollouts of update 1
    line = stops(75, "--algo", algo, f"run.dir={folder}", *keys)
    assert f"cannot write to {folder}: " in line
    assert f"go on with: rsipo-fit --resume {folder}" in line
    assert [path.name for path in saved(folder / "checkpoints")][-1] == "update-000000.ckpt"


def test_events_of_stage_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_once(monkeypatch, Updates, "on_train_epoch_end", size=1)
    small = ["rollout.tasks=4", "rollout.group=1", "log.progress=false"]
    assert sft_main(["--env", "search", f"run.dir={tmp_path / 'run'}", *small]) == 75
    limit(resource.RLIM_INFINITY)
    (line,) = capsys.readouterr().err.splitlines()
    assert "File too large; make room; start again with: rsipo-sft" in line


def test_the_policy_at_the_end(tmp_path: Path, stops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half a model is left, and a resume writes it."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        full_once(patch, PreTrainedModel, "save_pretrained", MIB)
        line = stops(75, "--algo", "grpo", f"run.dir={folder}")
    assert f"cannot write {folder}/policy: " in line
    assert not list(folder.glob("policy*"))
    assert fit_main(["--resume", str(folder)]) == 0
    assert (folder / "policy" / "model.safetensors").is_file()
