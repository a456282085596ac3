"""``BestSkills``: the skills of each task type that gained most, as a skill bank, and their file.

A later run can load the file as its bank (``general_skills``, ``task_specific_skills`` and
``common_mistakes`` of methods.md section 2); the further fields of a skill say what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from rsipo_lightning.callbacks.host import host
from rsipo_lightning.callbacks.skills import results_by_skill
from rsipo_lightning.metrics import gather
from rsipo_lightning.run_folder import write_json
from rsipo_lightning.types import Iteration, WrittenSkill

FILE = "best_skills.json"  # in the run folder: what stands beside the newest checkpoint

Row = dict[str, Any]


class BestSkills(pl.Callback):
    """Keeps ``count`` skills of each task type and saves them with the state of the run.

    Ranked by the lower end of their gain, one standard error below it: of many gains measured by
    few replays the largest is mostly luck. Only gains above 0 count, so a method without replays
    has none. A text stands once, with its best measurement.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.file = folder / FILE
        self.count = count
        self.skills: dict[str, list[Row]] = {}  # by task type, best first

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        new = [row for rows in gather(_rows(host(pl_module).iteration)) for row in rows]
        for kind in {row["type"] for row in new} | self.skills.keys():
            rows = [*self.skills.get(kind, []), *(row for row in new if row["type"] == kind)]
            self.skills[kind] = _best(rows, self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"skills": self.skills}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skills = state_dict["skills"]

    def export(self, path: Path) -> None:
        """Write the bank to ``path`` and to the run folder; nothing while there is no skill."""
        if any(self.skills.values()):
            for target in (path, self.file):
                write_json(target, bank(self.skills))


def bank(skills: dict[str, list[Row]]) -> dict[str, Any]:
    """``{type: rows, best first}`` in the form of a skill bank."""
    specific = {
        kind: [
            {
                "skill_id": f"{kind}-{rank}",
                "title": row["category"],
                "principle": row["text"],
                "when_to_apply": f"tasks of type {kind}",
                **{name: value for name, value in row.items() if name not in ("type", "text")},
            }
            for rank, row in enumerate(rows, start=1)
        ]
        for kind, rows in sorted(skills.items())
        if rows
    }
    return {"general_skills": [], "task_specific_skills": specific, "common_mistakes": []}


def _rows(iteration: Iteration) -> list[Row]:
    """The written skills of this rank that gained, in plain values."""
    results = results_by_skill(iteration.replays)
    rows = []
    for skill in iteration.skills:
        result = results.get(id(skill))
        if not isinstance(skill, WrittenSkill) or result is None:
            continue
        if result.gain is None or result.noise is None or result.gain <= 0:
            continue
        rows.append(
            {
                "type": skill.task.type,
                "text": skill.text,
                "category": skill.category,
                "gain": result.gain,
                "noise": result.noise,  # variance of the gain
                "trust": iteration.trust.get(skill.task.id),
                "update": iteration.update + 1,
                "task": skill.task.id,
            }
        )
    return rows


def _best(rows: Iterable[Row], count: int) -> list[Row]:
    distinct: dict[str, Row] = {}
    for row in sorted(rows, key=_rank):
        distinct.setdefault(row["text"], row)
    return list(distinct.values())[:count]


def _rank(row: Row) -> tuple[float, int, str, str]:
    """Lower end of the gain; then, so that ranks and resumed runs agree, age, task and text."""
    return math.sqrt(row["noise"]) - row["gain"], row["update"], row["task"], row["text"]
