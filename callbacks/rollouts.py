"""RolloutCollector: tasks in, groups of trajectories out; keeps the engine's weights those of the
policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from math import ceil, floor
from typing import Any

import lightning as L

from rsipo_lightning import keys
from rsipo_lightning.algorithms.base import TRAIN, Algorithm
from rsipo_lightning.callbacks.progress import progress_of
from rsipo_lightning.callbacks.rollout_stats import add_rollouts, check_broken
from rsipo_lightning.config import RunConfig
from rsipo_lightning.freshness import Sender
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.protocols import Share
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.types import Iteration, Role, RolloutGroup, Task, Trajectory


def task_batch(shares: Sequence[Share], seed: int, update: int, count: int) -> list[Task]:
    """Tasks of an update: for each share, consecutive places in a shuffle of its own for each pass.

    A function of the arguments alone, so that a resumed run goes on where it was. A share gives
    count * weight / (sum of weights) tasks, rounded up or down at random such that its mean is
    that. A pass ends where fewer than :func:`most` are left: no update sees a task twice, whose
    rollouts would be the same ones. No share may have fewer tasks than that. Each update takes so
    many places, used or not: where a share's number is a fraction, a pass leaves some tasks to the
    next ones.
    """
    rng = keyed_random(seed, "mixture", update)
    rounding = Fraction(rng.random())
    ends = accumulate((part * count for part in _parts(shares)), initial=Fraction(0))
    batch: list[Task] = []
    parts = pairwise(floor(end + rounding) for end in ends)
    for i, (share, limit, (begin, end)) in enumerate(
        zip(shares, most(shares, count), parts, strict=True)
    ):
        epoch, place = divmod(update, len(share.tasks) // limit)
        order, first = _order(len(share.tasks), seed, i, epoch), place * limit
        batch += [share.tasks[k] for k in order[first : first + end - begin]]
    if len(shares) > 1:  # transcripts and ranks get some of each
        rng.shuffle(batch)
    return batch


def others(
    shares: Sequence[Share], seed: int, update: int, batch: Sequence[Task]
) -> Iterator[Task]:
    """The tasks that are not in the batch of an update, each once, in an order of that update."""
    seen = {task.id for task in batch}
    places = [(share, i) for share in shares for i in range(len(share.tasks))]
    for share, i in keyed_random(seed, "others", update).sample(places, len(places)):
        if (task := share.tasks[i]).id not in seen:
            seen.add(task.id)
            yield task


def most(shares: Sequence[Share], count: int) -> list[int]:
    """How many tasks of each share an update of ``count`` tasks may draw."""
    return [ceil(part * count) for part in _parts(shares)]


def _parts(shares: Sequence[Share]) -> list[Fraction]:
    """Exact, so that they add up to 1."""
    weights = [Fraction(share.weight) for share in shares]
    return [weight / sum(weights) for weight in weights]


@lru_cache(maxsize=16)
def _order(length: int, seed: int, share: int, epoch: int) -> list[int]:
    order = list(range(length))
    keyed_random(seed, "tasks", epoch, *[share] * (share > 0)).shuffle(order)
    return order


class RolloutCollector(L.Callback):
    """First of the callbacks: opens the iteration and plays G rollouts of each of this rank's
    tasks.
    """

    def __init__(self, player: Player, shares: Sequence[Share], config: RunConfig) -> None:
        self.player, self.shares, self.config = player, shares, config
        self.sender = Sender(player, config)

    def on_train_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Only now are resumed weights in place under every strategy."""
        self.sender.send(pl_module.policy, pl_module.version)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Fill ``iteration.groups``."""
        started, self._cpu = time.perf_counter(), time.process_time()
        update, algorithm = pl_module.version, pl_module.algorithm
        own, more = self._tasks(update, trainer)
        played = self._play(own, update, trainer, algorithm)
        kept = [group for group in played if algorithm.accept(group)]
        for _ in range(algorithm.max_batches - 1):
            if len(kept) >= len(own) or not (tasks := list(islice(more, len(own)))):
                break
            groups = self._play(tasks, update, trainer, algorithm)
            played += groups
            kept += [group for group in groups if algorithm.accept(group)]
        groups = (kept or played)[: len(own)]  # of no use, but an update needs rows
        it = Iteration(update, [group.task for group in groups], Metrics())
        it.groups = groups
        pl_module.iteration = it
        add_rollouts(it.metrics, played)
        if algorithm.max_batches > 1:
            it.metrics.fraction("rollout/accepted_frac", len(kept), len(played))
        it.metrics.mean("time/rollout_s", time.perf_counter() - started)
        episodes = [t for group in played for t in group.trajectories]
        check_broken("rollouts", episodes, self.config.rollout.max_error_frac)

    def _tasks(self, update: int, trainer: L.Trainer) -> tuple[list[Task], Iterator[Task]]:
        """This rank's tasks of an update, and others that may be played in their place."""
        seed, count = self.config.seed, self.config.rollout.tasks
        batch = task_batch(self.shares, seed, update, count)
        rank, ranks = trainer.global_rank, trainer.world_size
        more = others(self.shares, seed, update, batch)
        return batch[rank::ranks], islice(more, rank, None, ranks)

    def _play(
        self, tasks: Sequence[Task], update: int, trainer: L.Trainer, algorithm: Algorithm[Any]
    ) -> list[RolloutGroup]:
        n = self.config.rollout.group
        jobs = [
            Job(task, Role.STUDENT, i, update, context=algorithm.context(task, TRAIN))
            for task in tasks
            for i in range(n)
        ]
        how = Sampling.of(self.config, self.config.rollout.temperature)
        played = shown(trainer, "rollout", self.player, jobs, how)
        return [
            RolloutGroup(task, tuple(played[k * n : (k + 1) * n])) for k, task in enumerate(tasks)
        ]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """The update is done: the engine gets the new weights."""
        metrics = pl_module.iteration.metrics
        metrics.mean("time/update_s", pl_module.close_update())
        for key, count in pl_module.forwards().items():
            metrics.total(key, count)
        metrics.total(keys.CPU, time.process_time() - self._cpu)
        pl_module.version += 1
        started = time.perf_counter()
        changed = self.sender.send(pl_module.policy, pl_module.version)
        if changed is not None:  # the same on every rank
            metrics.mean(keys.CHANGED, changed)
            metrics.mean("time/sync_s", time.perf_counter() - started)


def shown(
    trainer: L.Trainer, phase: str, player: Player, jobs: Sequence[Job], how: Sampling
) -> list[Trajectory]:
    """Play jobs and count the finished episodes on the run's display."""
    display = progress_of(trainer)
    if display is None:
        return player.play(jobs, how)
    display.phase(phase, len(jobs))
    return player.play(jobs, how, display.advance)
