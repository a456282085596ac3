"""What the tiny policy can do after its lessons: without a skill, with scripted and own ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from rsipo_lightning.build import Actors
from rsipo_lightning.config import RunConfig
from rsipo_lightning.environments import experts
from rsipo_lightning.environments.experts import ScriptedSkill
from rsipo_lightning.rollout import Job, Sampling
from rsipo_lightning.sft.episodes import written
from rsipo_lightning.types import Role, Skill, Task, Trajectory

Figures = dict[str, dict[str, float | None]]  # {skill in the prompt: {what: percent}}


def figures(
    config: RunConfig,
    made: Actors,
    per_type: int,
    skills: Callable[[str, str], Sequence[ScriptedSkill]] = experts.skills,
    split: str = "val",
) -> Figures:
    """Success in percent at T = 1 by task type, shares of valid actions, of valid skills and of
    procedural ones among them.

    A row per kind of skill in the prompt; None where nothing was played. ``skills(type, kind)``
    are the scripted ones.
    """
    suite = made.suite
    config = replace(config, seed=0)  # the same noise, whatever was trained
    how = Sampling.of(config, 1.0)
    tasks = [
        task
        for kind in suite.types
        for task in [t for t in suite.tasks(split) if t.type == kind][:per_type]
    ]

    def look(shown: Sequence[tuple[Task, str]]) -> tuple[list[Trajectory], dict[str, float | None]]:
        jobs = [
            Job(task, Role.EVAL, 0, 0, Skill(task, text, "") if text else None)
            for task, text in shown
        ]
        played = made.player.play(jobs, how)
        row = {"all": _percent([t.success for t in played])}
        for kind in suite.types:
            row[kind] = _percent([t.success for t in played if t.task.type == kind])
        row["valid actions"] = _percent([turn.valid for t in played for turn in t.turns])
        return played, row

    played, none = look([(task, "") for task in tasks])
    rows = {"none": none}
    for kind in experts.KINDS:
        rng = random.Random(kind)
        shown = [(t, rng.choice(skills(t.type, kind)).text) for t in tasks]
        rows[kind] = look(shown)[1]
    valid = [skill for skill in written(config, made, played, 1.0) if skill.valid]
    rows["its own"] = look([(skill.task, skill.text) for skill in valid])[1]
    rows["its own"]["valid skills"] = 100 * len(valid) / len(played) if played else None
    rows["its own"]["procedural"] = _percent([skill.category == "procedural" for skill in valid])
    return rows


def table(rows: Mapping[str, Mapping[str, float | None]]) -> Table:
    """The figures as a table."""
    done = Table(title="success (%) on val tasks at T = 1")
    done.add_column("skill shown", no_wrap=True)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    for name in names:
        done.add_column(name, justify="right")
    for title, row in rows.items():
        done.add_row(title, *("-" if row.get(n) is None else f"{row[n]:.1f}" for n in names))
    return done


def _percent(hits: Sequence[bool]) -> float | None:
    return 100 * sum(hits) / len(hits) if hits else None
