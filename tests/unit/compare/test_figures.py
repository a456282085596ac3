"""Figures of runs that differ in what they have."""

from __future__ import annotations

from typing import Any

import pytest

from rsipo_lightning import keys
from rsipo_lightning.compare.figures import categories, trust


def arm(*series: list[float | None]) -> dict[str, Any]:
    names = (keys.TRUST, *map(keys.category, keys.CATEGORIES))
    runs = {str(seed): {"series": dict.fromkeys(names, s)} for seed, s in enumerate(series)}
    return {"name": "rsipo", "runs": runs}


def test_a_seed_whose_first_skills_were_not_valid() -> None:
    """Its values stand at their updates; the mean is of the seeds that have had one."""
    raw, smooth, _ = trust([arm([None, 1.5, None], [1.0, 0.5, 0.5])]).axes[0].get_lines()
    assert raw.get_xdata().tolist() == [1, 2, 3]
    assert raw.get_ydata().tolist() == [1.0, 1.0, 1.0]
    assert smooth.get_ydata().tolist() == pytest.approx([1.0, (1.5 + 0.75) / 2, (1.5 + 2 / 3) / 2])
    (late, *_) = categories([arm([None, None, 0.5])]).axes[0].get_lines()
    assert (late.get_xdata().tolist(), late.get_ydata().tolist()) == ([3], [50.0])
