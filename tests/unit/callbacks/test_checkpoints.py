"""Checkpoints on a toy run: what is resumed equals what was never interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rsipo_lightning.callbacks.checkpoints import Checkpoints, latest, saved
from rsipo_lightning.errors import CheckpointError, EnvironmentFault

UPDATES = 5


class Fault:
    """Raises once, in the middle of the rollouts of one update."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, update: int) -> None:
        if update == self.at:
            raise EnvironmentFault("the retriever is gone")


@pytest.fixture(scope="module")
def uninterrupted(make: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = make.Toy()
    make.fit(module, tmp_path_factory.mktemp("whole"), [make.Collector()], UPDATES)
    return module


def names(folder: Path) -> list[str]:
    return [path.name for path in saved(folder / "checkpoints")]


def assert_same(resumed: Any, whole: Any) -> None:
    assert (resumed.version, resumed.seen) == (whole.version, whole.seen)
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_writes_every_n_and_the_last_and_keeps_the_newest(
    make: SimpleNamespace, tmp_path: Path
) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, every=2, keep=3)], 5)
    files = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert files == ["update-000002.ckpt", "update-000004.ckpt", "update-000005.ckpt"]
    assert latest(tmp_path).name == "update-000005.ckpt"


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 100])
def test_a_fault_in_the_rollouts_leaves_a_checkpoint_that_repeats_the_update(
    make: SimpleNamespace, tmp_path: Path, uninterrupted: Any, at: int, every: int
) -> None:
    collector = make.Collector(during=Fault(at))
    with pytest.raises(EnvironmentFault):
        make.fit(make.Toy(), tmp_path, [collector, Checkpoints(tmp_path, every, 9)], UPDATES)
    path = latest(tmp_path)
    assert path.name == f"update-{at:06d}.ckpt"

    hooks: list[str] = []
    resumed = make.Toy(hooks)
    callbacks = [make.Collector(), Checkpoints(tmp_path, every, 9)]
    trainer = make.fit(resumed, tmp_path, callbacks, UPDATES, ckpt_path=path)
    assert hooks == [
        line
        for update in range(at, UPDATES)
        for line in (
            f"rollout {update}",
            f"credit {update}",
            f"step {update}.0",
            f"step {update}.1",
        )
    ]
    assert trainer.global_step == UPDATES
    assert_same(resumed, uninterrupted)
    assert latest(tmp_path).name == f"update-{UPDATES:06d}.ckpt"


@pytest.mark.parametrize("updates", [0, 1, 4])
def test_any_checkpoint_of_a_run_resumes_to_the_same_end(
    make: SimpleNamespace, tmp_path: Path, uninterrupted: Any, updates: int
) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 9)], 4)
    resumed = make.Toy()
    path = tmp_path / "checkpoints" / f"update-{updates:06d}.ckpt"
    make.fit(resumed, tmp_path, [make.Collector()], UPDATES, ckpt_path=path)
    assert_same(resumed, uninterrupted)


def test_a_run_that_is_over_is_not_trained_further(make: SimpleNamespace, tmp_path: Path) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 2)], 2)
    hooks: list[str] = []
    make.fit(make.Toy(hooks), tmp_path, [make.Collector()], 2, ckpt_path=latest(tmp_path))
    assert hooks == []


def test_no_checkpoint_of_a_half_done_update(make: SimpleNamespace, tmp_path: Path) -> None:
    class Breaks(make.Toy):  # type: ignore[misc, name-defined]
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.current_epoch == 2:
                raise RuntimeError("out of memory")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="out of memory"):
        make.fit(Breaks(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 100, 9)], UPDATES)
    assert names(tmp_path) == ["update-000000.ckpt"]


def test_holds_plain_containers_and_tensors_only(make: SimpleNamespace, tmp_path: Path) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 1)], 1)
    state = torch.load(latest(tmp_path), weights_only=True)
    assert state["toy"] == {"version": 1, "seen": 1}


def test_latest_passes_over_what_is_not_complete(make: SimpleNamespace, tmp_path: Path) -> None:
    make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 2)], 2)
    folder = tmp_path / "checkpoints"
    good = (folder / "update-000002.ckpt").read_bytes()
    (folder / "update-000003.ckpt").write_bytes(good[: len(good) // 2])  # the machine died
    (folder / "update-000004.ckpt.part").write_bytes(good)  # the run was killed while writing
    assert latest(tmp_path).name == "update-000002.ckpt"

    callbacks = [make.Collector(), Checkpoints(tmp_path, 1, 2)]
    make.fit(make.Toy(), tmp_path, callbacks, 4, ckpt_path=latest(tmp_path))
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["update-000003.ckpt", "update-000004.ckpt"]


def test_no_checkpoint_at_all_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*checkpoints"):
        latest(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(make: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*update-000000\.ckpt"):
        make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 2)], 1)


def test_the_old_one_goes_only_when_the_new_one_is_complete(
    make: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning.pytorch as pl

    real = pl.Trainer.save_checkpoint

    def full_disk(trainer: pl.Trainer, path: Path, *args: Any) -> None:
        if "update-000002" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(trainer, path, *args)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        make.fit(make.Toy(), tmp_path, [make.Collector(), Checkpoints(tmp_path, 1, 1)], 3)
    assert names(tmp_path) == ["update-000001.ckpt"]
