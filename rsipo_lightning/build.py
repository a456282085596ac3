"""RunConfig -> objects -> a run. The only file that knows every part."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from rsipo_lightning import registry
from rsipo_lightning.algorithms.base import Algorithm, active
from rsipo_lightning.callbacks.checkpoints import Checkpoints, latest
from rsipo_lightning.callbacks.evaluation import EvalResult, Evaluation, choose, evaluate, table
from rsipo_lightning.callbacks.interrupt import Interrupt
from rsipo_lightning.callbacks.logging import MetricsLogger
from rsipo_lightning.callbacks.progress import Progress
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.callbacks.rollouts import RolloutCollector
from rsipo_lightning.callbacks.skills import SkillCategory
from rsipo_lightning.callbacks.transcripts import Transcripts
from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import component
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import DataError
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy, load_model, load_tokenizer
from rsipo_lightning.protocols import TaskSuite
from rsipo_lightning.rollout import Player
from rsipo_lightning.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run ends with."""

    folder: Path
    before: EvalResult | None
    after: EvalResult | None
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that a run is made of; making it checks all that can be checked before work
    starts.
    """

    suite: TaskSuite
    codec: Codec
    policy: Policy
    player: Player
    algorithm: Algorithm[Any]


def parts(config: RunConfig) -> Parts:
    """Build, cheap checks first. Raises ConfigError, DataError, PluginError."""
    algorithm_class = registry.load("algorithms", component("algo", config.groups["algo"]))
    algorithm_class.check(config.algo, config.rollout)
    codec = Codec(load_tokenizer(config.model.path))
    suite: TaskSuite = registry.load("environments", component("env", config.groups["env"]))(
        config.env, config.seed
    )
    for split in ("train", "test") if config.eval.episodes else ("train",):
        if not len(suite.tasks(split)):
            raise DataError(f"{suite.name}: split '{split}' has no tasks")
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    policy = Policy(load_model(config.model.path, config.model.dtype))
    engine = registry.load("engines", component("engine", config.groups["engine"]))(
        policy, codec.tokenizer
    )
    player = Player(suite, engine, codec)
    return Parts(suite, codec, policy, player, algorithm_class(config.algo, config.seed, codec))


def fit(
    config: RunConfig, resume: str | Path | None = None, command: Sequence[str] = ()
) -> FitResult:
    """Train; ``resume`` is a run folder, whose config ``config`` must be. Writes the run folder
    only once all is built.
    """
    began = time.perf_counter(), time.process_time()
    checkpoint = latest(Path(resume)) if resume else None
    made = parts(config)
    folder = (
        RunFolder.open(Path(resume))
        if resume
        else RunFolder.create(config, command, made.suite.describe())
    )
    console = Console()
    reference = _reference(made)
    module = PolicyModule(made.policy, made.algorithm, config, made.player, reference)
    interrupt = Interrupt()
    transcripts = Transcripts(folder.path, config.log.groups)
    evaluation = Evaluation(
        made.suite, folder.path, config.eval, on_groups=transcripts.write_evaluation
    )
    metrics_csv = folder.metrics_csv()
    display = [Progress(config.trainer.updates, console)] if config.log.progress else []
    callbacks: list[L.Callback] = [
        *display,
        RolloutCollector(made.player, made.suite.tasks("train"), config),
        ReplayGains(made.player, config),
        SkillCategory(),
        transcripts,
        evaluation,
        MetricsLogger([metrics_csv, *display]),
        interrupt,
        Checkpoints(folder.path, config.checkpoint.every, config.checkpoint.keep),
    ]
    t = config.trainer
    trainer = L.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        strategy=t.strategy,
        max_epochs=t.updates,
        accumulate_grad_batches=t.micro_batches,
        gradient_clip_val=config.optim.clip or None,
        logger=[TensorBoardLogger(str(folder.path), name="", version="")],
        callbacks=callbacks,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder.path),
    )
    try:
        with interrupt:
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
            evaluation.finish(trainer, module)
    finally:
        made.player.engine.close()
        made.suite.close()
    result = FitResult(folder.path, evaluation.before, evaluation.after, interrupt.presses > 0)
    if trainer.is_global_zero:
        made.policy.model.save_pretrained(folder.path / "policy")
        made.codec.tokenizer.save_pretrained(folder.path / "policy")
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        folder.finish({"updates": module.version}, wall, cpu)
        if evaluation.after or evaluation.before:
            console.print(table(evaluation.before, evaluation.after))
        console.print(
            f"{module.version} updates, {wall:.0f} s ({cpu:.0f} CPU s). Run folder: {folder.path}",
            soft_wrap=True,
        )
    return result


def _reference(made: Parts) -> Policy | None:
    """A frozen copy of the policy as it starts, if any term needs one."""
    if not any(stream.reference for stream in active(made.algorithm.streams).values()):
        return None
    return copy.deepcopy(made.policy).eval().requires_grad_(False)


def test(config: RunConfig, split: str, episodes: int | None) -> EvalResult:
    """Success of ``model.path`` on a split, each task once."""
    made = parts(config)
    module = PolicyModule(made.policy, made.algorithm, config, made.player)
    tasks = choose(made.suite, split, episodes or len(made.suite.tasks(split)))
    return evaluate(
        made.suite, tasks, module.play, split=split, temperature=config.eval.temperature
    )
