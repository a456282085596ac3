"""What methods share whose teacher is the policy itself with advice in its prompt.

advice for a trajectory -> a second view of its rows, which shows it after the task line -> one more
term beside GRPO's, or another advantage. The advice is what a skill bank says for the task's type
(methods.md 2, 3), or a skill of the trajectory itself, which the policy or a server writes (5.12).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from rsipo_lightning.algorithms.base import Sums, active
from rsipo_lightning.algorithms.credit import shown, taught
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.bank import BankConfig
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.endpoint import AnalyzerConfig, EndpointConfig
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.types import Iteration, Sample, SkillRequest, Trajectory


@dataclass
class SelfDistillationConfig(BankConfig, AnalyzerConfig, GRPOConfig):
    """Keys of the teacher's advice."""

    skill_source: str = "bank"  # bank | trajectory
    skill_temperature: float = 0.0  # of the policy's analysis of a trajectory; 0 is greedy

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("algo.skill_source", self.skill_source, ("bank", "trajectory"))
        within("algo.skill_temperature", self.skill_temperature, 0, math.inf)
        if self.server and self.skill_source == "bank":
            raise ConfigError(
                "algo.analyzer=endpoint: there is nothing to analyse with algo.skill_source=bank"
            )


D = TypeVar("D", bound=SelfDistillationConfig)


class SelfDistillation(GRPO[D]):
    """GRPO's rows, each with a teacher's view of it where there is advice."""

    @classmethod
    def uses_bank(cls, config: D) -> bool:
        """With ``skill_source=bank``."""
        return config.skill_source == "bank"

    @property
    def analyzer(self) -> EndpointConfig | None:
        """Of the config."""
        return self.config.server

    def teaches(self, update: int) -> bool:
        """Whether anything reads the teacher's scores in this update."""
        return "teacher" in active(self.streams)

    def propose(self, it: Iteration) -> list[SkillRequest]:
        """A skill from every finished trajectory, unless the bank has it."""
        if self.config.skill_source == "bank" or not self.teaches(it.update):
            return []
        scored = [t for group in it.groups for t in group.scored]
        return [SkillRequest(t, self.config.skill_temperature) for t in scored]

    def advice(self, trajectory: Trajectory, it: Iteration) -> str:
        """What the teacher has read; "" if nothing."""
        if self.bank:
            return self.bank.text(trajectory.task.type)
        own = (s.text for s in it.skills if s.valid and s.trajectory is trajectory)
        return next(own, "")

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """Rows without advice have no view and no teacher credit; without the stream, none has."""
        assert self.codec is not None
        show = taught if "teacher" in self.streams else shown
        teaches, samples = self.teaches(it.update), []
        for group in it.groups:
            for trajectory, part in zip(group.scored, self.actor(group), strict=True):
                if teaches and (advice := self.advice(trajectory, it)):
                    section = self.codec.section_ids(advice)
                    part = [show(s, section) for s in part]
                samples += part
        return samples
