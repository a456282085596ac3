"""Skill-GRPO (methods.md 5.4): GRPO of a student that sees the skill bank while it acts.

One run has two results: without skills at test (Skill-GRPO), which is what a run is measured by,
and with them (Skill-GRPO*).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rsipo_lightning.algorithms.base import PLAIN
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.bank import BankConfig
from rsipo_lightning.types import Task


@dataclass
class SkillGRPOConfig(BankConfig, GRPOConfig):
    """Keys of Skill-GRPO."""


class SkillGRPO(GRPO[SkillGRPOConfig]):
    """l_theta, l_old and l_ref are all of the prompt with the skills."""

    Config = SkillGRPOConfig
    phases = (PLAIN, "skill")

    @classmethod
    def uses_bank(cls, config: Any) -> bool:
        """Always."""
        return True

    def context(self, task: Task, phase: str) -> str:
        """The skills of the task's type, but for the plain evaluation."""
        if phase == PLAIN:
            return ""
        assert self.bank is not None
        return self.bank.text(task.type)
