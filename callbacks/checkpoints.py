"""``Checkpoints``: whole updates only, complete files only.

A checkpoint is the state between two updates. Where rollouts or replays raise, Lightning's counters
say that an epoch has begun, and a resumed run would skip that epoch's hooks; at the end of an epoch
they say that it is not yet over. So they are always written as they stand between two epochs.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from rsipo_lightning import ranks
from rsipo_lightning.callbacks.best_skills import BestSkills
from rsipo_lightning.callbacks.host import updates_made
from rsipo_lightning.config import TrainerSection
from rsipo_lightning.errors import CheckpointError, ConfigError
from rsipo_lightning.policy import Policy

FOLDER = "checkpoints"


class Checkpoints(Checkpoint):
    """Writes ``checkpoints/update-000030.ckpt``, by the number of updates made.

    With ``skills`` the best ones stand beside it, in ``update-000030.skills.json``.
    Before the first update, every ``every`` updates, after the last one, where a run is stopped,
    and where rollouts or replays raise. Lightning calls it after all other callbacks, and its
    ``on_train_epoch_end`` after the module's. ``export`` writes the policy, every ``export_every``
    updates (0: never).
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        keep: int,
        skills: BestSkills | None = None,
        export: Callable[[], None] | None = None,
        export_every: int = 0,
    ) -> None:
        self.folder = folder / FOLDER
        self.every = every
        self.keep = max(1, keep)
        self.skills = skills
        self.export, self.export_every = export, export_every
        self._between = False  # nothing of an update has been done since the last one was finished

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            for part in self.folder.glob("*.part"):
                _remove(part)
        if trainer.ckpt_path is None:  # a new run; before its first evaluation, which may fail
            self._between = True
            self.save(trainer, 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._between = True  # only now is a checkpoint restored under every strategy

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Rollouts and replays are behind us; the module's hook, which follows, changes the state
        # of the algorithm (running statistics), and the batches change gradients and weights.
        self._between = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        updates = updates_made(trainer)
        self._between = True
        last = trainer.should_stop or updates == trainer.max_epochs
        if last or updates % self.every == 0:
            self.save(trainer, updates)
        if self.export and self.export_every and updates % self.export_every == 0:
            self.export()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # With several ranks the others may not come here, and saving is collective.
        if self._between and trainer.world_size == 1:
            updates = updates_made(trainer)
            if not self._path(updates).exists():
                self.save(trainer, updates)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        _between_epochs(checkpoint["loops"]["fit_loop"])

    def save(self, trainer: pl.Trainer, updates: int) -> None:
        """Write one under a name that ``latest`` does not know, rename it, remove old ones."""
        path = self._path(updates)
        part = path.with_name(path.name + ".part")
        try:
            trainer.save_checkpoint(part)  # returns on all ranks when all have written
            if trainer.is_global_zero:
                if path.exists():  # left by a run that was killed later than it is resumed
                    _remove(path)
                if self.skills is not None:  # first: a checkpoint is never without its skills
                    self.skills.export(_skills_of(path))
                os.replace(part, path)
                self._prune()
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or error}; older checkpoints are untouched, "
                "make room or give the rights"
            ) from error
        finally:
            if trainer.is_global_zero:  # what was written before the disk was full
                with suppress(OSError):
                    _remove(part)

    def _prune(self) -> None:
        kept = saved(self.folder)[-self.keep :]
        stale = {*saved(self.folder), *self.folder.glob("update-*.skills.json")}
        for path in stale.difference(kept, map(_skills_of, kept)):
            _remove(path)

    def _path(self, updates: int) -> Path:
        return self.folder / f"update-{updates:06d}.ckpt"


def latest(run: Path) -> Path:
    """The newest complete checkpoint of a run folder; CheckpointError if there is none."""
    found = saved(run / FOLDER)
    if not found:
        raise CheckpointError(f"no complete checkpoint in {run / FOLDER}; start a new run instead")
    return found[-1]


def check_ranks(checkpoint: Path, trainer: TrainerSection) -> None:
    """CheckpointError if a checkpoint is of another strategy, or of ZeRO-3 on other ranks."""
    shares = len(list(checkpoint.glob("checkpoint/*_optim_states.pt")))  # 0: a file
    if bool(shares) != trainer.zero3:
        kind = "zero3" if shares else "auto or ddp"
        raise CheckpointError(
            f"{checkpoint} was written with trainer.strategy={kind}; go on with that"
        )
    if shares and shares != (now := ranks.count(trainer.ranks)):
        raise CheckpointError(
            f"{checkpoint} holds the shares of {shares} ranks, this run has {now}; go on with as "
            "many (trainer.devices x trainer.nodes)"
        )


def updates_of(checkpoint: Path) -> int:
    """Updates made before a checkpoint was written, from its name."""
    return int(checkpoint.stem.removeprefix("update-"))


def check_weights(checkpoint: Path, policy: Policy) -> None:
    """ConfigError if a checkpoint is of a model of other shapes. Shards are not looked at."""
    if checkpoint.is_dir():
        return
    held = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
    own = {f"policy.{name}": tensor.shape for name, tensor in policy.kept_state().items()}
    if own != {name: tensor.shape for name, tensor in held.items()}:
        raise ConfigError(
            f"{checkpoint} is of another model than model.path now names; leave it as it was"
        )


def saved(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    numbered = [
        (int(match[1]), path)
        for path in folder.glob("update-*.ckpt")
        if (match := re.fullmatch(r"update-(\d+)\.ckpt", path.name)) and _complete(path)
    ]
    return [path for _, path in sorted(numbered)]


def _skills_of(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".skills.json")


def _complete(path: Path) -> bool:
    # A name without .part is complete unless the machine died while the disk was still writing:
    # a file of torch.save is a zip with its directory at the end. Sharded strategies write folders.
    return any(path.iterdir()) if path.is_dir() else zipfile.is_zipfile(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _between_epochs(fit: dict[str, Any]) -> None:
    """Counters of Lightning's fit loop as they are when one epoch is over and none has begun."""
    epochs = fit["epoch_progress"]["current"]["processed"]
    for counters in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
        counters.update(dict.fromkeys(counters, epochs))
    batches = fit["epoch_loop.batch_progress"]
    total, current = batches["total"], batches["current"]
    total.update(dict.fromkeys(total, total["completed"]))
    current.update(dict.fromkeys(current, 0))
    batches["is_last_batch"] = False
