"""GiGPO: group in group, an advantage for the episode and one for each step (methods.md 5.14)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rsipo_lightning.algorithms.credit import group_advantages
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.checks import within
from rsipo_lightning.types import Credit, RolloutGroup, Sample, Trajectory


@dataclass
class GiGPOConfig(GRPOConfig):
    """Keys of GiGPO."""

    step: float = 1.0  # w, weight of the step advantage
    gamma: float = 0.95  # discount of the return from a step on

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.step", self.step, 0, math.inf)
        within("algo.gamma", self.gamma, 0, 1)


class GiGPO(GRPO[GiGPOConfig]):
    """A = A_episode + w A_step."""

    Config = GiGPOConfig

    def actor(self, group: RolloutGroup) -> list[list[Sample]]:
        """GRPO's rows; the actor's value of a token gets the advantage of its step added."""
        steps = self.step_advantages(group.scored)
        done = super().actor(group)
        return [
            [self._with_steps(s, torch.tensor(mine)) for s in part]
            for part, mine in zip(done, steps, strict=True)
        ]

    def step_advantages(self, scored: Sequence[Trajectory]) -> list[list[float]]:
        """A_step of each turn: the return from it on, against all turns of the group that saw the
        same observation. 0 where no other one did.
        """
        anchors: dict[str, list[tuple[int, int, float]]] = {}
        for i, trajectory in enumerate(scored):
            seen = [trajectory.opening, *(turn.observation for turn in trajectory.turns)]
            for k, value in enumerate(self._returns(trajectory)):
                anchors.setdefault(seen[k], []).append((i, k, value))
        done = [[0.0] * t.steps for t in scored]
        for places in anchors.values():
            if len(places) > 1:
                values = [value for *_, value in places]
                advantages = group_advantages(values, [], norm=self.config.adv_norm)
                for (i, k, _), advantage in zip(places, advantages, strict=True):
                    done[i][k] = advantage
        return done

    def _returns(self, trajectory: Trajectory) -> list[float]:
        """R_k = sum_{j >= k} gamma^(j - k) r_j."""
        total, done = 0.0, []
        for turn in reversed(trajectory.turns):
            total = turn.reward + self.config.gamma * total
            done.append(total)
        return done[::-1]

    def _with_steps(self, sample: Sample, advantages: torch.Tensor) -> Sample:
        weight, value = sample.credits["actor"]
        value = value + self.config.step * advantages[sample.turn]
        return replace(sample, credits={**sample.credits, "actor": Credit(weight, value)})
