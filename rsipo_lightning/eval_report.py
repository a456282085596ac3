"""The files of ``rsipo-eval --out NAME.json``: the result, and beside it a row for each episode."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rsipo_lightning.errors import ConfigError
from rsipo_lightning.files import append_jsonl
from rsipo_lightning.run_folder import write_json
from rsipo_lightning.types import RolloutGroup, Trajectory


class EvalReport:
    """``NAME.json``, and ``NAME.jsonl`` for comparing two policies task by task.

    Rows are written as they come, to ``NAME.jsonl.part``: what an evaluation that was stopped has
    played is there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """ConfigError if the files exist or could not be written. Writes nothing."""
        self.result = Path(path)
        self.episodes = self.result.with_suffix(".jsonl")
        self._part = self.result.with_suffix(".jsonl.part")
        if self.result.suffix != ".json":
            raise ConfigError(f"--out {path}: must end in .json")
        for file in (self.result, self.episodes):
            if os.path.lexists(file):
                raise ConfigError(f"--out {path}: {file} exists; choose another name")
        if not os.access(self.result.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {path}: cannot write to the folder {self.result.parent}")

    def start(self) -> None:
        """Forget the rows of an evaluation that was stopped."""
        self._part.unlink(missing_ok=True)
        self._part.touch()

    def kept(self) -> str:
        """What an evaluation that stops now leaves."""
        with self._part.open("rb") as file:
            return f"{sum(1 for _ in file)} episodes are in {self._part}"

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Write a row for each episode."""
        append_jsonl(self._part, [_row(t) for group in groups for t in group.trajectories])

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the result; both files are whole when this returns, and neither if it raises."""
        write_json(self.result, record)
        os.replace(self._part, self.episodes)


def _row(trajectory: Trajectory) -> dict[str, Any]:
    turns = trajectory.turns
    return {
        "task": trajectory.task.id,
        "type": trajectory.task.type,
        "sample": trajectory.index,
        "success": trajectory.success,
        "measures": dict(trajectory.measures),
        "action": turns[-1].action if turns else "",  # the last one
        "turns": len(turns),
        "valid_turns": sum(turn.valid for turn in turns),
        "stop": trajectory.stop.value,
        "error": trajectory.error,
    }
