"""Skill-Prompt (methods.md 5.2): the policy as it is, with the skill bank in its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rsipo_lightning.algorithms.base import AlgorithmConfig
from rsipo_lightning.algorithms.vanilla import Vanilla
from rsipo_lightning.bank import BankConfig
from rsipo_lightning.types import Task


@dataclass
class SkillPromptConfig(BankConfig, AlgorithmConfig):
    """Keys of Skill-Prompt."""


class SkillPrompt(Vanilla[SkillPromptConfig]):
    """Nothing is trained; the bank's skills are shown wherever the policy acts."""

    Config = SkillPromptConfig
    phases = ("skill",)

    @classmethod
    def uses_bank(cls, config: Any) -> bool:
        """Always."""
        return True

    def context(self, task: Task, phase: str) -> str:
        """The skills of the task's type."""
        assert self.bank is not None
        return self.bank.text(task.type)
