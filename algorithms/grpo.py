"""GRPO: group-relative policy optimisation (methods.md 1.5, 1.6, 5.3).

rollouts -> advantage of each trajectory within its group -> clipped surrogate + k3 to the reference
- entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rsipo_lightning.algorithms.base import Algorithm, AlgorithmConfig, Stream, Sums, active
from rsipo_lightning.algorithms.credit import actor_rows, group_advantages
from rsipo_lightning.algorithms.losses import k3_to_reference, negative_entropy, surrogate
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.types import Iteration, RolloutGroup, Sample, Trajectory


@dataclass
class GRPOConfig(AlgorithmConfig):
    """Keys of the group-relative part; the other methods build on it."""

    clip: float = 0.2  # eps of the ratio, both sides
    clip_high: float | None = None  # eps of the upper side, where it is another
    dual_clip: float = 3.0  # c, bound of the loss for negative advantages; 0 is off
    kl: float = 0.01  # beta_KL of k3 to the reference policy
    entropy: float = 0.001  # c_ent
    adv_norm: str = "mean_std"  # mean_std | mean
    adv_stats: str = "trajs"  # trajs | steps (as in released code)
    reduction: str = "token_mean"  # token_mean | seq_mean

    def __post_init__(self) -> None:
        one_of("algo.adv_norm", self.adv_norm, ("mean_std", "mean"))
        one_of("algo.adv_stats", self.adv_stats, ("trajs", "steps"))
        one_of("algo.reduction", self.reduction, ("token_mean", "seq_mean"))
        within("algo.clip", self.clip, 0, 1)
        within("algo.clip_high", self.upper, 0, math.inf)
        for key in ("dual_clip", "kl", "entropy"):
            within(f"algo.{key}", getattr(self, key), 0, math.inf)

    @property
    def upper(self) -> float:
        """Eps of the upper side."""
        return self.clip if self.clip_high is None else self.clip_high


G = TypeVar("G", bound=GRPOConfig)


class GRPO(Algorithm[G]):
    """Group-relative policy optimisation."""

    Config = GRPOConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L_RLVR = L_pg + beta_KL <k3> - c_ent <H>."""
        c = self.config
        return {
            "actor": Stream(surrogate(c.clip, c.upper, c.dual_clip)),
            "kl": Stream(k3_to_reference, c.kl, reference=True),
            "entropy": Stream(negative_entropy, c.entropy, sampled=False),
        }

    def advantages(self, scored: Sequence[Trajectory]) -> list[float]:
        """A_i of each scored trajectory of a group."""
        scores, steps = [t.score for t in scored], [t.steps for t in scored]
        c = self.config
        return group_advantages(scores, steps, norm=c.adv_norm, stats=c.adv_stats)

    def actor(self, group: RolloutGroup) -> list[list[Sample]]:
        """Rows of each scored trajectory of a group, credited with its advantage."""
        c, advantages = self.config, self.advantages(group.scored)
        streams = ["actor", *(x for x in ("kl", "entropy") if x in active(self.streams))]
        return actor_rows(group, advantages, reduction=c.reduction, streams=streams)

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """All rows of all groups."""
        return [sample for group in it.groups for part in self.actor(group) for sample in part]
