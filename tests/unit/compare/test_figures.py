"""Figures of runs that lack values, as made-up containers of compare.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning import keys
from rsipo_lightning.compare.figures import categories, draw, trust

NAN = float("nan")


def arm(key: str, *seeds: list[float | None]) -> dict[str, Any]:
    runs = {str(seed): {"series": {key: values}} for seed, values in enumerate(seeds)}
    return {"name": "rsipo", "runs": runs}


def test_a_seed_without_a_skill_at_first_is_drawn_where_it_begins() -> None:
    """Seed 0 has no trust before update 3, none has any before update 2; then gaps are filled."""
    figure = trust([arm(keys.TRUST, [None, None, 2.0, None], [None, 1.0, 1.0, 1.0])])
    raw, smooth, _ = figure.axes[0].get_lines()
    assert list(raw.get_xdata()) == [1, 2, 3, 4]
    expected = pytest.approx([NAN, 1.0, 1.5, 1.5], nan_ok=True)
    assert [float(y) for y in raw.get_ydata()] == expected
    assert [float(y) for y in smooth.get_ydata()] == expected
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices[:, 0]
    assert (corners.min(), corners.max()) == (3.0, 4.0)  # of two seeds
    names = [arm(keys.category(keys.CATEGORIES[0]), [None, 1.0], [0.5, 0.5])]
    assert categories(names) is not None


def test_nothing_is_drawn_of_nothing() -> None:
    assert trust([arm("other", [1.0])]) is None


def test_figures_of_other_arms_are_removed(tmp_path: Path) -> None:
    (tmp_path / "trust.png").write_bytes(b"of an arm that is no longer compared")
    assert draw({"arms": []}, tmp_path) == []
    assert not list(tmp_path.iterdir())
