"""What a finished run left, in plain containers: results, learning curve, costs, diagnostics."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rsipo_lightning import keys
from rsipo_lightning.errors import DataError
from rsipo_lightning.metrics_csv import UPDATE, MetricsCsv
from rsipo_lightning.run_folder import RunFolder

SERIES = (keys.TRUST, *(keys.category(name) for name in keys.CATEGORIES))


def read_run(folder: Path, out: Path) -> dict[str, Any]:
    """One run; ``folder`` is named as seen from ``out``. DataError if a file is damaged.

    ``looks``: each look of eval.json ("before", "after", ...) with success by task type.
    ``curve``: validation success against updates, environment steps and CPU seconds so far.
    ``series``: trust and shares of skill categories, one value per update, where there are any.
    ``skills``: gains by category, and how replays compare with controls.
    """
    try:
        return _read_run(folder, out)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = error if isinstance(error, DataError) else repr(error)
        raise DataError(
            f"{folder} is damaged: {what}; move it away, the same command makes it again"
        ) from error


def _read_run(folder: Path, out: Path) -> dict[str, Any]:
    record = RunFolder.open(folder).record()
    looks = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    rows = MetricsCsv(folder / "metrics.csv").rows
    if missing := [key for key in (keys.ENV_STEPS, keys.CPU) if key not in (rows or [{}])[0]]:
        raise DataError(f"metrics.csv has no {missing[0]}: an older version wrote it")
    if len(rows) != (updates := record["result"]["updates"]):
        raise DataError(f"metrics.csv has {len(rows)} rows, the run made {updates} updates")
    steps = _cumulative(rows, keys.ENV_STEPS, keys.REPLAY_ENV_STEPS)
    cpu = _cumulative(rows, keys.CPU)
    seen = [i for i, row in enumerate(rows) if row.get(keys.VAL_SUCCESS)]
    return {
        "folder": Path(os.path.relpath(folder, out)).as_posix(),
        "command": record["command"],
        "commit": record["git"],
        "versions": record["versions"],
        "data": record["data"],
        "looks": {name: _look(look) for name, look in looks.items()},
        "curve": {
            "updates": [int(rows[i][UPDATE]) for i in seen],
            "env_steps": [steps[i] for i in seen],
            "cpu_s": [cpu[i] for i in seen],
            "success_frac": [float(rows[i][keys.VAL_SUCCESS]) for i in seen],
        },
        "updates": len(rows),
        "env_steps": steps[-1],
        "episodes": _cumulative(rows, keys.EPISODES, keys.REPLAY_EPISODES)[-1],
        "cpu_s": cpu[-1],
        "cpu_s_all": record["cpu_s"],
        "peak_rss_mib": record["result"]["peak_rss_mib"],
        "series": {
            key: [float(row[key]) if row.get(key) else None for row in rows]
            for key in SERIES
            if any(row.get(key) for row in rows)
        },
        "skills": read_skills(folder / "skills.jsonl"),
    }


def _cumulative(rows: Sequence[Mapping[str, str]], *names: str) -> list[float]:
    """Sum so far, after each update. What a row does not have is 0."""
    return list(accumulate(sum(float(row.get(name) or 0) for name in names) for row in rows))


def _look(look: dict[str, Any]) -> dict[str, Any]:
    """Sample average (each task counts once), and success by task type."""
    from rsipo_lightning.callbacks.eval_result import EvalResult

    result = EvalResult.from_json(look)
    return {
        "n": result.overall.n,
        "temperature": result.temperature,
        "success_frac": result.overall.success_frac,
        "types": {name: tally.success_frac for name, tally in result.types.items() if tally.n},
    }


def read_skills(path: Path) -> dict[str, Any]:
    """``gain``: {category: [skills, mean gain]} over all updates.

    ``teacher``: {successes of the evidence rollouts: [tasks, better, worse]}: whether replays with
    the skill succeed more often than the controls. The evidence is the part of the group that is no
    control, so that what sorts the tasks is not what is compared.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [row for row in map(json.loads, lines) if row["gain"] is not None]
    gain = {}
    for name in dict.fromkeys((*keys.CATEGORIES, *(row["category"] for row in rows))):
        if gains := [row["gain"] for row in rows if row["category"] == name]:
            gain[name] = [len(gains), sum(gains) / len(gains)]
    teacher: dict[str, list[int]] = {}
    for row in rows:
        treated, control = row["treated_success_frac"], row["control_success_frac"]
        evidence = row["group_successes"] - row["control_successes"]
        counts = teacher.setdefault(str(evidence), [0, 0, 0])
        counts[0] += 1
        counts[1] += treated > control
        counts[2] += treated < control
    return {"gain": gain, "teacher": teacher}
