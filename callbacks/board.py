"""TensorBoard: text tabs and the layout that makes its first page useful."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from rsipo_lightning import keys

# {tab: {chart: ["Multiline", [tags as regular expressions]]}}
LAYOUT: Final[dict[str, dict[str, list[Any]]]] = {
    "Success": {
        "rollouts and held-out tasks": [
            "Multiline",
            [keys.SUCCESS, keys.VAL_SUCCESS, keys.TEST_SUCCESS],
        ],
        "rollouts by task type": ["Multiline", [r"rollout/[^/]+/[^/]+/success_frac"]],
        "held-out by task type": ["Multiline", [r"(val|test)/[^/]+/[^/]+/success_frac"]],
        "form": ["Multiline", [keys.VALID_ACTION, keys.TRUNCATED, keys.ERROR]],
        "turns": ["Multiline", [keys.TURNS]],
    },
    "RSIPO": {
        "replay gain": ["Multiline", [keys.GAIN, r"skill/[^/]+/gain_mean"]],
        "trust": ["Multiline", [keys.TRUST, r"trust/[^/]+/omega_mean"]],
        "shrinkage": ["Multiline", [r"trust/(kept|tau2|noise|type_gain)_mean"]],
        "teacher against student": ["Multiline", [keys.TEACHER_BETTER, keys.TEACHER_WORSE]],
        "success with and without skill": [
            "Multiline",
            [keys.TREATED_SUCCESS, keys.CONTROL_SUCCESS],
        ],
        "skill categories": ["Multiline", [keys.category(name) for name in keys.CATEGORIES]],
        "valid skills": ["Multiline", [keys.SKILL_VALID]],
    },
    "Losses": {
        "losses": ["Multiline", [r"loss/.*", keys.VAL_LOSS]],
        "distance to the reference": ["Multiline", [r"policy/kl_mean"]],
        "gate of the teacher": ["Multiline", [r"policy/teacher_gate_.*"]],
        "gradient norm": ["Multiline", [r"optim/grad_norm"]],
        "learning rate": ["Multiline", [r"optim/lr"]],
    },
    "Engine & time": {
        "seconds": ["Multiline", [r"time/.*_s"]],
        "engine against trainer": ["Multiline", [r"policy/mismatch_kl_mean"]],
        "tokens of an action": ["Multiline", [keys.ACTION_TOKENS]],
        "policy version": ["Multiline", [keys.VERSION]],
    },
}


class Board(TensorBoardLogger):
    """Event files in the run folder itself; no hparams.yaml, since config.yaml says it all."""

    def __init__(self, folder: Path, first_update: int) -> None:
        # What a killed run wrote of this update and later ones is made again.
        super().__init__(
            str(folder), name="", version="", purge_step=first_update, default_hp_metric=False
        )

    def save(self) -> None:
        """Nothing: events are written as they come."""


@contextmanager
def writer_errors_once() -> Iterator[None]:
    """No traceback of the thread that writes the events: ``flush`` raises its error again."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def add_text(trainer: pl.Trainer, tag: str, text: str, step: int) -> None:
    """Show text, already escaped (see markup.py), wherever TensorBoard listens."""
    for writer in writers(trainer):
        writer.add_text(tag, text, step)


def add_layout(trainer: pl.Trainer) -> None:
    """Write ``LAYOUT`` for the custom-scalars tab."""
    for writer in writers(trainer):
        writer.add_custom_scalars(LAYOUT)


def flush(trainer: pl.Trainer) -> None:
    """Let a TensorBoard that is open see what was written; by itself it waits two minutes."""
    for writer in writers(trainer):
        writer.flush()


def writers(trainer: pl.Trainer) -> Iterator[Any]:
    """The SummaryWriter of each TensorBoard logger; none on other ranks than the first."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                yield logger.experiment
