"""Episodes that are played once and labelled, and the rows that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rsipo_lightning.build import Actors
from rsipo_lightning.callbacks.replays import ReplayGains
from rsipo_lightning.callbacks.rollout_stats import check_broken
from rsipo_lightning.callbacks.rollouts import task_batch
from rsipo_lightning.config import RunConfig, SftConfig
from rsipo_lightning.errors import DataError
from rsipo_lightning.imitation import Row, episode_rows, sample, skill_row
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.sft.labels import Ask, Label
from rsipo_lightning.types import Role, Sample, Skill, SkillRequest, Trajectory

STAGE1 = -1  # "update" of the sampling noise: RL's updates count from 0


def play(config: SftConfig, made: Actors, progress: Callable[[int], None]) -> list[Trajectory]:
    """``rollout.group`` episodes of each of ``rollout.tasks`` training tasks, broken ones too.

    EnvironmentFault if too many broke.
    """
    r, seed = config.rollout, config.seed
    tasks = task_batch(made.suite.mixture(), seed, 0, r.tasks)
    jobs = [Job(task, Role.STUDENT, i, STAGE1) for task in tasks for i in range(r.group)]
    player = made.player
    if config.sft.actor == "expert":
        player = ExpertPlayer(
            made.suite,
            made.codec,
            lambda job: made.suite.expert(
                job.task, keyed_random(seed, "expert", job.task.id, job.index)
            ),
        )
    played = player.play(jobs, Sampling.of(config.training(1), r.temperature), progress)
    check_broken("episodes", played, r.max_error_frac)
    return played


def held_out(trajectories: Sequence[Trajectory], frac: float, seed: int) -> set[str]:
    """Tasks that are not trained on: a share of all, at least one unless the share is 0."""
    tasks = list(dict.fromkeys(t.task.id for t in trajectories))
    count = max(1, round(frac * len(tasks))) if frac else 0
    return set(keyed_random(seed, "held out").sample(tasks, count))


@dataclass
class Rows:
    """Training and held-out samples, and what was left out and why."""

    train: list[Sample] = field(default_factory=list)
    held: list[Sample] = field(default_factory=list)  # skills only
    left_out: Counter[str] = field(default_factory=Counter)


def rows(
    config: SftConfig,
    made: Actors,
    ask: Ask,
    labelled: Iterable[tuple[Trajectory, Label]],
    held: set[str],
) -> Rows:
    """A row for each label and, if asked, rows of the expert's actions.

    A row is never cut: one that is longer than ``rollout.context`` is left out and counted.
    DataError if no row is left to train on.
    """
    done, limit = Rows(), config.rollout.context

    def add(made_rows: Iterable[Row], samples: list[Sample]) -> None:
        for row in made_rows:
            if len(row.ids) > limit:
                done.left_out["row longer than rollout.context"] += 1
            else:
                samples.append(sample(row))

    for trajectory, label in labelled:
        trains = trajectory.task.id not in held
        if label.problem:
            done.left_out[label.reason] += 1
        else:
            row = skill_row(made.codec, ask(trajectory), label.summary, label.skill)
            add([row], done.train if trains else done.held)
        if config.sft.actions and trains:
            if trajectory.success:
                add(episode_rows(trajectory, config.sft.actions), done.train)
            else:
                done.left_out["actions of an expert that failed"] += 1
    if not done.train:
        why = ", ".join(f"{n} x {reason}" for reason, n in done.left_out.items())
        raise DataError(f"no row is left to train on ({why})")
    return done


def written(
    config: RunConfig, made: Actors, episodes: Sequence[Trajectory], temperature: float
) -> list[Skill]:
    """What the policy writes about each episode whose analysis fits ``rollout.context``."""
    writer, live = ReplayGains(made.player, config), config.rollout.live
    return [
        skill
        for i in range(0, len(episodes), live)
        for skill in writer.write(
            [SkillRequest(t, temperature) for t in episodes[i : i + live]], STAGE1
        )
    ]
