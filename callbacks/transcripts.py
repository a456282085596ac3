"""``Transcripts``: what was said, readable by eye (TensorBoard) and by tools (two jsonl files)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from rsipo_lightning.callbacks import markup
from rsipo_lightning.callbacks.board import add_text
from rsipo_lightning.callbacks.host import Decoder, host, updates_made
from rsipo_lightning.callbacks.rollout_stats import success_rate
from rsipo_lightning.callbacks.skills import results_by_skill
from rsipo_lightning.files import append_jsonl, keep_until
from rsipo_lightning.metrics import gather
from rsipo_lightning.types import (
    Iteration,
    ReplayResult,
    Role,
    RolloutGroup,
    Skill,
    Trajectory,
    Turn,
    WrittenSkill,
)


class Transcripts(pl.Callback):
    """Writes ``trajectories.jsonl`` (some groups in full) and ``skills.jsonl`` (every skill).

    ``update`` in both is the number of the update that the rows led to, counted from 1; rows of
    evaluations carry the number of updates made, 0 before training. A resumed run drops what was
    written after its checkpoint and writes it again.
    """

    def __init__(self, folder: Path, groups: int) -> None:
        self.trajectories = folder / "trajectories.jsonl"
        self.skills = folder / "skills.jsonl"
        self.groups = groups  # of each update, and of each evaluation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            keep_until(self.trajectories, updates_made(trainer))
            keep_until(self.skills, updates_made(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        iteration, decoder = host(pl_module).iteration, host(pl_module).codec
        skills = gather(skill_rows(iteration))  # of all ranks: collective
        if not trainer.is_global_zero:
            return
        append_jsonl(self.skills, [row for rows in skills for row in rows])
        append_jsonl(self.trajectories, trajectory_rows(iteration, self.groups, decoder))
        if text := transcript(iteration, decoder):
            add_text(trainer, "transcript/student_and_replay", text, iteration.update + 1)

    def write_evaluation(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, groups: Sequence[RolloutGroup]
    ) -> None:
        """The sink of ``Evaluation``: its first groups in full."""
        if trainer.is_global_zero:
            update, decoder = updates_made(trainer), host(pl_module).codec
            rows = [
                trajectory_row(update, Role.EVAL, trajectory, decoder)
                for group in groups[: self.groups]
                for trajectory in group.trajectories
            ]
            append_jsonl(self.trajectories, rows)


def trajectory_rows(iteration: Iteration, groups: int, decoder: Decoder) -> list[dict[str, Any]]:
    """The first groups in full: rollouts without skill, and the replays of the same tasks."""
    update, rows = iteration.update + 1, []
    for group in iteration.groups[:groups]:
        rows += [trajectory_row(update, Role.STUDENT, t, decoder) for t in group.trajectories]
        for result in _replays_of(iteration, group):
            gain = {"gain": result.gain}
            rows += [trajectory_row(update, Role.REPLAY, t, decoder) | gain for t in result.treated]
    return rows


def skill_rows(iteration: Iteration) -> list[dict[str, Any]]:
    """Every skill of this rank, valid or not."""
    results = results_by_skill(iteration.replays)
    return [_skill_row(iteration, skill, results.get(id(skill))) for skill in iteration.skills]


def transcript(iteration: Iteration, decoder: Decoder) -> str:
    """One student rollout and, if there is one, a replay of the same task with its skill."""
    groups = [group for group in iteration.groups if group.trajectories]
    if not groups:
        return ""
    group = next((group for group in groups if _replays_of(iteration, group)), groups[0])
    parts = [_episode("student", group.trajectories[0], decoder)]
    result = next((r for r in _replays_of(iteration, group) if r.treated), None)
    if result is not None:
        gain = "no gain" if result.gain is None else f"gain {result.gain:+.3f}"
        parts += [
            markup.heading(f"skill ({result.skill.category}), {gain}"),
            markup.block(result.skill.text),
            _episode(f"replay with this skill, {gain}", result.treated[0], decoder),
        ]
    return markup.page(*parts)


def _replays_of(iteration: Iteration, group: RolloutGroup) -> list[ReplayResult]:
    return [result for result in iteration.replays if result.skill.task.id == group.task.id]


def trajectory_row(
    update: int, actor: str, trajectory: Trajectory, decoder: Decoder
) -> dict[str, Any]:
    """One episode in full; ``actor`` is a Role, or who else acted."""
    skill = trajectory.skill
    return {
        "update": update,
        "role": str(actor),
        "task": trajectory.task.id,
        "env": trajectory.task.env,
        "type": trajectory.task.type,
        "index": trajectory.index,
        "success": trajectory.success,
        "score": trajectory.score,
        "stop": trajectory.stop.value,
        "steps": trajectory.steps,
        "error": trajectory.error,
        "skill": skill.text if skill else None,
        "prompt": decoder.decode(trajectory.turns[0].prompt_ids) if trajectory.turns else "",
        "turns": [_turn(turn) for turn in trajectory.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    logprobs = turn.completion.logprobs
    return {
        "response": turn.completion.text,
        "action": turn.action,
        "observation": turn.observation,
        "valid": turn.valid,
        "reward": turn.reward,
        "logprob_mean": sum(logprobs) / len(logprobs) if logprobs else None,
    }


def _skill_row(iteration: Iteration, skill: Skill, result: ReplayResult | None) -> dict[str, Any]:
    written = skill if isinstance(skill, WrittenSkill) else None
    return {
        "update": iteration.update + 1,
        "task": skill.task.id,
        "env": skill.task.env,
        "type": skill.task.type,
        "category": skill.category,
        "valid": skill.valid,
        "reason": skill.invalid,
        "text": skill.text,
        "steps": {str(turn + 1): text for turn, text in skill.steps.items()},
        "raw": written.completion.text if written else None,
        "gain": result.gain if result else None,
        "noise": result.noise if result else None,
        "trust": iteration.trust.get(skill.task.id),
        "evidence_success": skill.trajectory.success if skill.trajectory else None,
        "group_successes": _successes(iteration, skill),
        "control_successes": sum(t.success for t in result.control) if result else None,
        "treated_success_frac": success_rate(result.treated) if result else None,
        "control_success_frac": success_rate(result.control) if result else None,
    }


def _successes(iteration: Iteration, skill: Skill) -> int:
    """Of all rollouts of the skill's task."""
    groups = [group for group in iteration.groups if group.task.id == skill.task.id]
    return sum(t.success for group in groups for t in group.trajectories)


def _episode(title: str, trajectory: Trajectory, decoder: Decoder) -> str:
    outcome = "success" if trajectory.success else "no success"
    head = (
        f"{title}: {trajectory.task.id} ({trajectory.task.type}), {outcome}, "
        f"score {trajectory.score:.2f}, {trajectory.steps} steps, stop {trajectory.stop}"
    )
    lines = []
    for number, turn in enumerate(trajectory.turns, start=1):
        if number == 1:
            lines.append(decoder.decode(turn.prompt_ids))
        note = "" if turn.valid else " (not valid)"
        lines.append(f"--- turn {number}, policy{note}:\n{turn.completion.text}")
        if turn.observation:
            lines.append(f"--- environment:\n{turn.observation}")
    if trajectory.error:
        lines.append(f"--- broke: {trajectory.error}")
    return markup.page(markup.heading(head), markup.block("\n".join(lines)))
