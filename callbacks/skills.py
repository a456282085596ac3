"""``SkillCategory``: which kinds of skills the policy writes, and what each kind gains."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from rsipo_lightning import keys
from rsipo_lightning.callbacks import markup
from rsipo_lightning.callbacks.board import add_text
from rsipo_lightning.callbacks.host import host
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.types import Iteration, ReplayResult, Skill, WrittenSkill


class SkillCategory(pl.Callback):
    """Adds ``skill/*`` to the iteration's metrics and shows the latest skills as text.

    Stands after ReplayGains and before MetricsLogger.
    """

    def __init__(self, shown: int = 8) -> None:
        self.shown = shown  # skills in the text tab

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        iteration = host(pl_module).iteration
        add_skills(iteration.metrics, iteration.skills, iteration.replays)
        if iteration.skills:
            add_text(trainer, "skills/latest", _page(iteration, self.shown), iteration.update + 1)


def add_skills(metrics: Metrics, skills: Sequence[Skill], replays: Sequence[ReplayResult]) -> None:
    """``skill/*``. Categories are shares of the valid skills, and all four are always there."""
    valid = [skill for skill in skills if skill.valid]
    for skill in skills:
        metrics.mean(keys.SKILL_VALID, skill.valid)
    for skill in valid:
        metrics.mean(keys.SKILL_CHARS, len(skill.text))
    for name in keys.CATEGORIES if skills else ():
        hits = sum(skill.category == name for skill in valid)
        metrics.fraction(keys.category(name), hits, len(valid))
    for result in replays:
        if result.gain is not None:
            metrics.mean(keys.category_gain(result.skill.category), result.gain)


def results_by_skill(replays: Sequence[ReplayResult]) -> dict[int, ReplayResult]:
    """``id(skill)`` -> its replays. By identity: a task can have several skills, even equal."""
    return {id(result.skill): result for result in replays}


def _page(iteration: Iteration, shown: int) -> str:
    results = results_by_skill(iteration.replays)
    rows = []
    for skill in iteration.skills[:shown]:
        result = results.get(id(skill))
        gain = result.gain if result else None
        trust = iteration.trust.get(skill.task.id)
        rows.append(
            [
                skill.task.type,
                skill.category if skill.valid else f"invalid: {skill.invalid}",
                "" if gain is None else f"{gain:+.3f}",
                "" if trust is None else f"{trust:.2f}",
                skill.completion.text
                if isinstance(skill, WrittenSkill) and not skill.text
                else skill.text,
            ]
        )
    return markup.table(["task type", "category", "gain", "trust", "skill"], rows)
