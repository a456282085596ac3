"""Arithmetic that methods share."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rsipo_lightning.tokens import constant, rows, with_credit
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


def like(credit: Credit, value: float) -> Credit:
    """The same weights with another value."""
    return Credit(credit.weight, credit.value.new_full(credit.value.shape, value))
