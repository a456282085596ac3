"""Means over seeds with Student's t intervals; paired differences; values at a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over n seeds and its 95 % interval (None for one seed)."""

    mean: float
    low: float | None
    high: float | None
    n: int


@lru_cache
def t_quantile(df: int, level: float = 0.95) -> float:
    """t with P(-t < T < t) = level for Student's T with ``df`` degrees of freedom.

    By bisection; the probability is the finite series of Abramowitz & Stegun 26.7.3 and 26.7.4.

    >>> [round(t_quantile(df), 3) for df in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    """
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(high, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, df) < level else (low, middle)
    return high


def _central(t: float, df: int) -> float:
    """P(-t < T < t)."""
    angle = math.atan(t / math.sqrt(df))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if df % 2:
        term = math.cos(angle)
        for k in range(1, df - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return 2 / math.pi * (angle + math.sin(angle) * total)
    for k in range(0, df - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return math.sin(angle) * total


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval; None of nothing.

    >>> [round(x, 2) for x in estimate([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48, 3]
    """
    if not values:
        return None
    mean, n = fmean(values), len(values)
    if n == 1:
        return Estimate(mean, None, None, 1)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Difference to the reference, over the seeds that both have."""
    return estimate([values[seed] - reference[seed] for seed in values if seed in reference])


def at(x: Sequence[float], y: Sequence[float], where: float) -> float | None:
    """y at ``where``, linear between the points; None outside of them.

    >>> at([10, 20], [0.4, 0.6], 15)
    0.5
    """
    for i in range(len(x)):
        if x[i] == where:
            return y[i]
        if i and x[i - 1] < where < x[i]:
            return y[i - 1] + (y[i] - y[i - 1]) * (where - x[i - 1]) / (x[i] - x[i - 1])
    return None


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last ``width`` values, of fewer at the start; NaNs are left out.

    >>> moving_average([math.nan, 1.0, 3.0, 5.0], 2)
    [nan, 1.0, 2.0, 4.0]
    """
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    numbers = ([v for v in window if not math.isnan(v)] for window in windows)
    return [fmean(window) if window else math.nan for window in numbers]
