"""``log.loggers``: the loggers of Lightning that get every row of metrics.

A name of ``config.LOGGERS``, or the import path of any other class that takes ``save_dir``, e.g.
``lightning.pytorch.loggers.MLFlowLogger``. Text tabs and chart layouts are for TensorBoard alone.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from rsipo_lightning.callbacks.board import Board
from rsipo_lightning.composing import plain
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.run_folder import RunFolder


def check_loggers(names: Sequence[str]) -> None:
    """ConfigError for a logger that cannot be had here; makes none of them."""
    for name in names:
        if name == "wandb" and find_spec("wandb") is None:
            raise ConfigError("log.loggers=wandb: the package is missing; pip install wandb")
        if name not in _MAKE:
            _class(name)


def make_loggers(config: RunConfig, folder: RunFolder, first_update: int) -> list[Logger]:
    """The loggers of a run whose next update is ``first_update``; all but TensorBoard get the
    config as hyperparameters. ConfigError if one cannot start.
    """
    made: list[Logger] = []
    for name in config.log.loggers:
        try:
            if name in _MAKE:
                logger = _MAKE[name](folder, first_update)
            else:
                logger = _class(name)(save_dir=str(folder.path))
            if name != "tensorboard":
                logger.log_hyperparams(plain(config))
        except Exception as error:  # services raise their own: no key, no package, no network
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"log.loggers={name}: cannot start: {reason}") from error
        made.append(logger)
    return made


def _tensorboard(folder: RunFolder, first_update: int) -> Logger:
    return Board(folder.path, first_update)


def _csv(folder: RunFolder, first_update: int) -> Logger:
    # A folder for each start: Lightning's writer deletes what an earlier one has written.
    version = f"from-{first_update:06d}"
    return CSVLogger(folder.path, "csv", version, flush_logs_every_n_steps=1)


def _wandb(folder: RunFolder, first_update: int) -> Logger:
    import wandb

    wandb.finish()  # the run of an earlier fit in this process, else this one would go into it
    # The same id after a resume: the run goes on there as well.
    key = f"{folder.path.name} {folder.record()['started']}"
    ident = hashlib.sha256(key.encode()).hexdigest()[:12]
    project = os.environ.get("WANDB_PROJECT", "rsipo-lightning")
    return WandbLogger(folder.path.name, folder.path, id=ident, project=project)


_MAKE: dict[str, Callable[[RunFolder, int], Logger]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "wandb": _wandb,
}


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"log.loggers={path}: cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Logger)):
        raise ConfigError(f"log.loggers={path}: not a lightning.pytorch.loggers.Logger")
    if "save_dir" not in inspect.signature(found).parameters:
        raise ConfigError(f"log.loggers={path}: takes no save_dir, where a run's files would go")
    return found
