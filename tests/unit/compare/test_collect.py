"""Skills of a run, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

from rsipo_lightning.compare.collect import read_skills


def test_skills_by_category_and_by_successes_of_the_evidence(tmp_path: Path) -> None:
    """Five of eight rollouts succeeded, three of the four controls: two of the evidence."""
    row = {"category": "procedural", "group_successes": 5, "control_successes": 3}
    rows = [
        {**row, "gain": 0.5, "treated_success_frac": 1.0, "control_success_frac": 0.75},
        {**row, "gain": -0.1, "treated_success_frac": 0.75, "control_success_frac": 0.75},
        {**row, "gain": None, "treated_success_frac": None, "control_success_frac": None},
        {
            "category": "format",
            "group_successes": 1,
            "control_successes": 1,
            "gain": -0.2,
            "treated_success_frac": 0.0,
            "control_success_frac": 0.25,
        },
    ]
    file = tmp_path / "skills.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_skills(file) == {
        "gain": {"procedural": [2, 0.2], "format": [1, -0.2]},
        "teacher": {"2": [2, 1, 0], "0": [1, 0, 1]},
    }
    assert read_skills(tmp_path / "none") == {"gain": {}, "teacher": {}}
