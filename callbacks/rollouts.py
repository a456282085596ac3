"""RolloutCollector: tasks in, groups of trajectories out; keeps the engine's weights those of the
policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor

import lightning as L

from rsipo_lightning.callbacks.progress import progress_of
from rsipo_lightning.callbacks.rollout_stats import add_rollouts, check_broken
from rsipo_lightning.config import RunConfig
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

    def on_train_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Only now are resumed weights in place under every strategy."""
        self._sync(pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Fill ``iteration.groups``."""
        started = time.perf_counter()
        rollout, update = self.config.rollout, pl_module.version
        tasks = task_batch(self.shares, self.config.seed, update, rollout.tasks)[
            trainer.global_rank :: trainer.world_size
        ]
        it = Iteration(update, tasks, Metrics())
        pl_module.iteration = it
        jobs = [Job(task, Role.STUDENT, i, update) for task in tasks for i in range(rollout.group)]
        played = shown(
            trainer, "rollout", self.player, jobs, Sampling.of(self.config, rollout.temperature)
        )
        it.groups = [
            RolloutGroup(task, tuple(played[k * rollout.group : (k + 1) * rollout.group]))
            for k, task in enumerate(tasks)
        ]
        add_rollouts(it.metrics, it.groups)
        it.metrics.mean("time/rollout_s", time.perf_counter() - started)
        check_broken("rollouts", played, rollout.max_error_frac)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """The update is done: the engine gets the new weights."""
        pl_module.iteration.metrics.mean("time/update_s", pl_module.close_update())
        pl_module.version += 1
        self._sync(pl_module)

    def _sync(self, module: PolicyModule) -> None:
        self.player.engine.sync_weights(module.policy.model.named_parameters(), module.version)


def shown(
    trainer: L.Trainer, phase: str, player: Player, jobs: Sequence[Job], how: Sampling
) -> list[Trajectory]:
    """Play jobs and count the finished episodes on the run's display."""
    display = progress_of(trainer)
    if display is None:
        return player.play(jobs, how)
    display.phase(phase, len(jobs))
    return player.play(jobs, how, display.advance)
