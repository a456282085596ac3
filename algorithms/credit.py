"""Arithmetic that methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import torch
from torch import Tensor

from rsipo_lightning.metrics import Metrics
from rsipo_lightning.tokens import constant, rows, with_credit, with_skill
from rsipo_lightning.types import Credit, RolloutGroup, Sample


def group_advantages(
    scores: Sequence[float], steps: Sequence[int], *, norm: str = "mean_std", stats: str = "trajs"
) -> list[float]:
    """Group-relative advantages, one per trajectory (methods.md 1.5).

    norm "mean_std": (score - mean) / (std + 1e-6) with the unbiased std; "mean": score - mean.
    stats "trajs": each trajectory counts once; "steps": once per environment step, as in released
    code (parity only,
    lessons case 1). A single trajectory has mean 0 and std 1; a group of equal scores has advantage
    0.

    >>> [round(a, 3) for a in group_advantages([1, 1, 0, 0], [5, 8, 50, 50])]
    [0.866, 0.866, -0.866, -0.866]
    >>> [round(a, 2) for a in group_advantages([1, 1, 0, 0], [5, 8, 50, 50], stats="steps")]
    [2.76, 2.76, -0.36, -0.36]
    """
    pool = (
        list(scores)
        if stats == "trajs"
        else [s for s, t in zip(scores, steps, strict=True) for _ in range(t)]
    )
    mean, std = (fmean(pool), stdev(pool)) if len(pool) > 1 else (0.0, 1.0)
    return [(s - mean) / (std + 1e-6 if norm == "mean_std" else 1.0) for s in scores]


def actor_rows(
    group: RolloutGroup, advantages: Sequence[float], *, reduction: str, streams: Sequence[str]
) -> list[list[Sample]]:
    """Rows of each scored trajectory, with its advantage on stream "actor" and value 1 on the other
    streams.

    reduction "token_mean": weight 1 for each token; "seq_mean": 1 / tokens of the trajectory, so
    that each trajectory counts once. Neither depends on how many rows a trajectory has.
    """
    done = []
    for trajectory, advantage in zip(group.scored, advantages, strict=True):
        parts = rows(trajectory)
        tokens = sum(s.n for s in parts)
        weight = 1.0 if reduction == "token_mean" else 1.0 / max(tokens, 1)
        done.append(
            [
                with_credit(
                    s,
                    **{x: constant(s, weight, advantage if x == "actor" else 1.0) for x in streams},
                )
                for s in parts
            ]
        )
    return done


def shown(sample: Sample, section: Sequence[int]) -> Sample:
    """A row with a view "teacher" of itself, which shows this section at its anchor."""
    return replace(sample, views={**sample.views, "teacher": with_skill(sample, section)})


def taught(sample: Sample, section: Sequence[int], value: float = 1.0) -> Sample:
    """As ``shown``; stream "teacher" has the actor's weights and this value."""
    weight, advantage = sample.credits["actor"]
    credit = Credit(weight, torch.full_like(advantage, value))
    return with_credit(shown(sample, section), teacher=credit)


def gap(sample: Sample, view: str = "teacher") -> Tensor:
    """[N] d = l_T - l_old, 0 where the view scored nothing."""
    return (sample.scores[view] - sample.scores["old"]).nan_to_num(nan=0.0)


def reweighted(
    sample: Sample, weigh: Callable[[Tensor], Tensor], bound: float, lam: float, metrics: Metrics
) -> Sample:
    """A' = (1 - lam) A + lam w A with w = clip(weigh(sign(A) d), 1 - bound, 1 + bound), d = l_T -
    l_old (5.8, 5.10). All detached; a token without a score keeps A.
    """
    weight, advantage = sample.credits["actor"]
    free = weigh(advantage.sign() * gap(sample))
    w = free.clamp(1 - bound, 1 + bound)
    factor = (1 - lam) + lam * w
    metrics.mean("reward/reweighting_mean", float((factor - 1).abs().mean()), sample.n)
    metrics.mean("reward/reweighting_clipped_frac", float((w != free).float().mean()), sample.n)
    return with_credit(sample, actor=Credit(weight, factor * advantage))


def fading(start: float, updates: int, update: int) -> float:
    """From ``start`` to 0 in a line over ``updates``; 0 updates: it stays.

    >>> [fading(0.5, 100, update) for update in (0, 50, 100, 150)]
    [0.5, 0.25, 0.0, 0.0]
    """
    return start * max(1 - update / updates, 0.0) if updates else start
