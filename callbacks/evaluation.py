"""Success on tasks that training does not see: ``evaluate`` and the callback that calls it."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl

from rsipo_lightning.algorithms.base import PLAIN
from rsipo_lightning.callbacks.eval_result import EvalResult, Tally
from rsipo_lightning.callbacks.host import host, updates_made
from rsipo_lightning.callbacks.progress import announce
from rsipo_lightning.callbacks.rollout_stats import check_share
from rsipo_lightning.config import EvalSection
from rsipo_lightning.metrics import gather, rank_of_ranks
from rsipo_lightning.protocols import TaskSuite
from rsipo_lightning.rng import keyed_seed
from rsipo_lightning.run_folder import write_json
from rsipo_lightning.types import Role, RolloutGroup, Task

T = TypeVar("T")

ENOUGH = 100  # episodes, from which on the share of those that broke is looked at
KEY = 0  # "update" of every evaluation's sampling noise: what differs between two is the weights


class Play(Protocol):
    """``PolicyModule.play``."""

    def __call__(
        self, tasks: Sequence[Task], role: Role, n: int, temperature: float, update: int
    ) -> list[RolloutGroup]: ...


def choose(suite: TaskSuite, split: str, n: int) -> list[Task]:
    """At most n tasks of a split, each once; always the same ones, whatever the run's seed.

    Drawn, not the first n: files are often sorted by source.
    """
    tasks = suite.tasks(split)
    picked = random.Random(f"tasks of {split}").sample(range(len(tasks)), min(n, len(tasks)))
    unique = {task.id: task for task in (tasks[i] for i in sorted(picked))}
    return list(unique.values())


def choose_per_type(suite: TaskSuite, split: str, n: int) -> list[Task]:
    """At most n tasks of each type, each once, drawn by their ids.

    So the order of the rows, and what other types there are, change nothing.
    """
    unique = {task.id: task for task in suite.tasks(split)}
    picked: dict[str, int] = {}
    chosen = set()
    for ident in sorted(unique, key=lambda ident: keyed_seed("evaluation", ident)):
        kind = unique[ident].type
        picked[kind] = picked.get(kind, 0) + 1
        if picked[kind] <= n:
            chosen.add(ident)
    return [task for task in unique.values() if task.id in chosen]


def evaluate(
    suite: TaskSuite,
    tasks: Sequence[Task],
    play: Play,
    *,
    split: str,
    temperature: float,
    samples: int = 1,
    block: int | None = None,
    on_groups: Callable[[list[RolloutGroup]], None] | None = None,
    max_error_frac: float = 1.0,
) -> EvalResult:
    """Play each task ``samples`` times and sum by task type. Collective: ranks share the tasks.

    ``block`` tasks are played at a time (with those that repeat them), shown to ``on_groups`` and
    forgotten, so that memory does not grow with their number. EnvironmentFault as soon as more than
    a share of the episodes broke: what is left would flatter.
    """
    start = time.monotonic()
    rank, ranks = rank_of_ranks()
    clusters = _clusters(suite, tasks, lambda task: task)
    share = clusters[rank::ranks]
    most = max(-(-len(clusters) // ranks), 1)  # of a rank: all play as many blocks
    block = block or most
    mine: dict[str, Tally] = {}
    first = ""  # error
    for begin in range(0, most, block):
        now = [task for cluster in share[begin : begin + block] for task in cluster]
        groups = play(now, Role.EVAL, samples, temperature, KEY)
        if on_groups is not None:
            on_groups(groups)
        for same in _clusters(suite, groups, lambda group: group.task):
            kind = same[0].task.type
            mine[kind] = mine.get(kind, Tally()) + Tally.of(*same)
        broken = (t.error for group in groups for t in group.trajectories if not t.scored)
        first = first or next(broken, "")
        sums = sum(mine.values(), Tally())
        played, least = sums.n + sums.broken, ENOUGH if begin + block < most else 0
        check_share(split, sums.broken, played, first, max_error_frac, least)
    everyone: list[dict[str, Tally]] = gather(mine)
    seen = {name for part in everyone for name in part}
    order = [*suite.types, *sorted(seen.difference(suite.types))]
    types = {
        name: sum((part[name] for part in everyone if name in part), Tally())
        for name in order
        if name in seen
    }
    return EvalResult(suite.name, split, temperature, types, time.monotonic() - start)


def _clusters(suite: TaskSuite, items: Sequence[T], task_of: Callable[[T], Task]) -> list[list[T]]:
    """Items of tasks that repeat one another together, in the order of the first of each."""
    found: dict[tuple[str, str], list[T]] = {}
    for item in items:
        task = task_of(item)
        found.setdefault((task.type, suite.cluster(task)), []).append(item)
    return list(found.values())


class Evaluation(pl.Callback):
    """The same test tasks before and after training, validation tasks in between.

    Results go to ``eval.json`` of the run folder at once, so that a resumed run does not repeat
    them; those of other tasks or of another temperature are dropped there. Stands after
    RolloutCollector (which syncs the weights) and before MetricsLogger.
    ``on_groups(trainer, pl_module, groups)`` is where the transcripts go. ``phases`` are those of
    the algorithm: the first is the result, looks at a further one are called ``after_<phase>`` and
    logged as ``test_<phase>/*``.
    """

    def __init__(
        self,
        suite: TaskSuite,
        folder: Path,
        config: EvalSection,
        on_groups: Callable[[pl.Trainer, pl.LightningModule, list[RolloutGroup]], None]
        | None = None,
        max_error_frac: float = 1.0,
        phases: Sequence[str] = (PLAIN,),
    ) -> None:
        self.max_error_frac = max_error_frac
        self.suite = suite
        self.file = folder / "eval.json"
        self.config = config
        self.on_groups = on_groups
        self.suffixes = {phases[0]: ""} | {phase: f"_{phase}" for phase in phases[1:]}
        self.looks: dict[str, EvalResult] = {}  # by name: before, after, after_<phase>

    @property
    def before(self) -> EvalResult | None:
        return self.looks.get("before")

    @property
    def after(self) -> EvalResult | None:
        return self.looks.get("after")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.file.exists():
            stored = self._stored()
            for when, updates in (("before", 0), ("after", trainer.max_epochs)):
                for name in (when + suffix for suffix in self.suffixes.values()):
                    if stored.get(name, {}).get("updates") == updates:
                        self.looks[name] = EvalResult.from_json(stored[name])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if updates_made(trainer) == 0:
            self._test(trainer, pl_module, "before", 0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        updates = updates_made(trainer)
        if not (self.config.every and self.config.val_episodes) or updates % self.config.every:
            return
        metrics = host(pl_module).iteration.metrics
        for phase, suffix in self.suffixes.items():
            result = self._look(trainer, pl_module, "val", self.config.val_episodes, phase)
            for key, value in result.row("val" + suffix).items():
                metrics.mean(key, value)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish(trainer, pl_module)

    def finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The look at the end, once; a run that was stopped early has none.

        For a run that is resumed after its last update, where Lightning calls no hook of training.
        """
        if (updates := updates_made(trainer)) == trainer.max_epochs:
            self._test(trainer, pl_module, "after", updates)

    def _test(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, when: str, step: int
    ) -> None:
        """What is not known yet."""
        for phase, suffix in self.suffixes.items():
            name = when + suffix
            if name in self.looks or not self.config.episodes:
                continue
            result = self._look(trainer, pl_module, "test", self.config.episodes, phase)
            self.looks[name] = result
            for logger in trainer.loggers:
                logger.log_metrics(result.row("test" + suffix), step=step)
            if trainer.is_global_zero:
                self._store(name, result, step)

    def _look(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, split: str, n: int, phase: str
    ) -> EvalResult:
        announce(trainer, split)
        sink = self.on_groups
        return evaluate(
            self.suite,
            choose(self.suite, split, n),
            partial(host(pl_module).play, phase=phase),
            split=split,
            temperature=self.config.temperature,
            on_groups=None if sink is None else lambda groups: sink(trainer, pl_module, groups),
            max_error_frac=self.max_error_frac,
        )

    def _store(self, name: str, result: EvalResult, updates: int) -> None:
        stored = self._stored() if self.file.exists() else {}
        stored[name] = {"updates": updates, "asked": self._asked(), **result.to_json()}
        write_json(self.file, stored)

    def _stored(self) -> dict[str, Any]:
        """The looks of the file that can be compared with one of now."""
        stored: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        asked = self._asked()
        return {name: look for name, look in stored.items() if look.get("asked") == asked}

    def _asked(self) -> str:
        """A hash of the test tasks and the temperature."""
        tasks = choose(self.suite, "test", self.config.episodes)
        asked = [self.config.temperature, *([task.id, task.payload] for task in tasks)]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
