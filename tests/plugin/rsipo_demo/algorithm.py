"""Focal policy gradient: a group counts the less, the more of its rollouts succeed."""

from collections.abc import Mapping
from dataclasses import dataclass

from rsipo_lightning.algorithms.base import Algorithm, AlgorithmConfig, Stream, Sums
from rsipo_lightning.algorithms.credit import actor_rows, group_advantages
from rsipo_lightning.algorithms.losses import surrogate
from rsipo_lightning.checks import within
from rsipo_lightning.types import Iteration, Sample


@dataclass
class FocalConfig(AlgorithmConfig):
    clip: float = 0.2  # of the ratio
    gamma: float = 1.0  # exponent of the failure rate; 0 weighs all groups alike

    def __post_init__(self) -> None:
        within("algo.clip", self.clip, 0, 1)
        within("algo.gamma", self.gamma, 0, 10)


class Focal(Algorithm[FocalConfig]):
    Config = FocalConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        return {"actor": Stream(surrogate(self.config.clip, self.config.clip, dual=0.0))}

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        samples: list[Sample] = []
        for group in it.groups:
            played = group.scored  # without episodes that broke
            failed = sum(not t.success for t in played) / max(len(played), 1)
            plain = group_advantages([t.score for t in played], [t.steps for t in played])
            focal = [failed**self.config.gamma * advantage for advantage in plain]
            parts = actor_rows(group, focal, reduction="token_mean", streams=["actor"])
            samples += [sample for part in parts for sample in part]
        return samples
