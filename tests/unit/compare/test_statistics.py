"""Against printed tables and numbers worked out by hand."""

from __future__ import annotations

import pytest

from rsipo_lightning.compare.statistics import at, estimate, moving_average, paired, t_quantile


@pytest.mark.parametrize(
    ("df", "t"),  # of a printed table
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423), (120, 1.9799)],
)
def test_t_quantiles(df: int, t: float) -> None:
    assert t_quantile(df) == pytest.approx(t, abs=5e-5)


def test_a_mean_with_its_interval() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    half = 4.302653 * 1.0 / 3**0.5
    assert found == pytest.approx((2.0, 2.0 - half, 2.0 + half, 3), abs=1e-5)
    assert estimate([0.5]) == (0.5, None, None, 1)
    assert estimate([]) is None


def test_differences_are_paired_by_seed() -> None:
    """Seeds that differ a lot, arms that differ by the same everywhere: a narrow interval."""
    found = paired({0: 0.2, 1: 0.9, 5: 0.7}, {1: 0.8, 0: 0.1, 9: 0.0})
    assert found is not None
    assert found == pytest.approx((0.1, 0.1, 0.1, 2))
    assert paired({0: 1.0}, {}) is None


def test_a_value_at_a_budget() -> None:
    x, y = [10.0, 20.0, 40.0], [0.2, 0.4, 0.8]
    assert [at(x, y, where) for where in (10, 15, 30, 40)] == pytest.approx([0.2, 0.3, 0.6, 0.8])
    assert at(x, y, 9) is None
    assert at(x, y, 41) is None


def test_moving_average_is_shorter_at_the_start() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 3) == [1.0, 2.0, 3.0, 5.0]
