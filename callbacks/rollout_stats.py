"""What rollouts and replays look like in numbers. Pure: groups in, values into a ``Metrics``."""

from __future__ import annotations

from collections.abc import Sequence

from rsipo_lightning import keys
from rsipo_lightning.errors import EnvironmentFault
from rsipo_lightning.metrics import Metrics, gather
from rsipo_lightning.types import ReplayResult, RolloutGroup, Stop, Trajectory


def add_rollouts(metrics: Metrics, groups: Sequence[RolloutGroup]) -> None:
    """``rollout/*`` and ``reward/*``. Broken episodes: number, steps and stop only."""
    measures = {name for group in groups for t in group.scored for name in t.measures}
    for group in groups:
        for trajectory in group.trajectories:
            metrics.mean(keys.ERROR, not trajectory.scored)
            metrics.total(keys.EPISODES, 1)
            metrics.total(keys.ENV_STEPS, trajectory.steps)
            for reason in Stop:
                metrics.mean(keys.stop(reason.value), trajectory.stop is reason)
        for trajectory in group.scored:
            _add_episode(metrics, trajectory)
            for name in measures:  # 0 for an episode that was cut off before it was measured
                metrics.mean(keys.measure("rollout", name), trajectory.measures.get(name, 0.0))
        if group.scored:
            scores = {trajectory.score for trajectory in group.scored}
            metrics.mean(keys.ZERO_STD, len(scores) == 1)


def _add_episode(metrics: Metrics, trajectory: Trajectory) -> None:
    task = trajectory.task
    metrics.mean(keys.SUCCESS, trajectory.success)
    metrics.mean(keys.by_type("rollout", task.env, task.type), trajectory.success)
    metrics.mean(keys.SCORE, trajectory.score)
    metrics.mean(keys.TURNS, trajectory.steps)
    for turn in trajectory.turns:
        metrics.mean(keys.VALID_ACTION, turn.valid)
        metrics.mean(keys.TRUNCATED, turn.completion.truncated)
        metrics.mean(keys.ACTION_TOKENS, len(turn.completion.ids))


def add_replays(metrics: Metrics, replays: Sequence[ReplayResult]) -> None:
    """``replay/*``. Better and worse compare success rates, not utilities (methods.md 11.3)."""
    for result in replays:
        for trajectory in result.treated:
            metrics.mean(keys.REPLAY_ERROR, not trajectory.scored)
            metrics.total(keys.REPLAY_EPISODES, 1)
            metrics.total(keys.REPLAY_ENV_STEPS, trajectory.steps)
        if result.gain is not None:
            metrics.mean(keys.GAIN, result.gain)
        treated, control = success_rate(result.treated), success_rate(result.control)
        if treated is None or control is None:
            continue
        metrics.mean(keys.TREATED_SUCCESS, treated)
        metrics.mean(keys.CONTROL_SUCCESS, control)
        metrics.mean(keys.TEACHER_BETTER, treated > control)
        metrics.mean(keys.TEACHER_WORSE, treated < control)


def check_broken(what: str, trajectories: Sequence[Trajectory], max_frac: float) -> None:
    """EnvironmentFault if more than ``max_frac`` of the episodes broke: that is no longer data.

    Collective, and over all ranks, so that all of them stop.
    """
    errors = [t.error for t in trajectories if not t.scored]
    check_share(what, len(errors), len(trajectories), errors[0] if errors else "", max_frac)


def check_share(
    what: str, broken: int, played: int, first: str, max_frac: float, least: int = 0
) -> None:
    """The same from counts and the first error; fewer than ``least`` episodes say nothing yet."""
    everywhere = gather((broken, played, first))
    broken, played = (sum(part[i] for part in everywhere) for i in (0, 1))
    if played >= least and broken > max_frac * played:
        first = next(part[2] for part in everywhere if part[0])
        raise EnvironmentFault(
            f"{what}: {broken} of {played} episodes broke, more than "
            f"rollout.max_error_frac={max_frac:g}; the first one: {first}"
        )


def success_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of successes among the episodes that did not break; None if all did."""
    scored = [trajectory for trajectory in trajectories if trajectory.scored]
    return sum(t.success for t in scored) / len(scored) if scored else None
