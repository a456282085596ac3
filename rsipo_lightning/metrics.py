"""What one iteration measures: values pile up locally and are reduced once over the ranks.

metrics.mean("rollout/success_frac", 1.0)        # average, weighted
metrics.fraction("skill/format_frac", 2, 3)      # hits of cases; 0 where there was no case
metrics.total("rollout/tokens_count", 512)
metrics.maximum("time/turn_max_s", 0.2)
row = metrics.reduce()                           # {key: float}, the same on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import distributed
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

NORMAL_95: Final = 1.959963984540054  # quantile of a two-sided 95 % interval


class Part(NamedTuple):
    """What one rank says of one key, in plain numbers that ranks can exchange."""

    kind: str  # mean | fraction | total | maximum
    value: float  # a weighted sum, a count of hits, a sum, or a maximum
    weight: float = 1.0  # sum of the weights, or the number of cases


class Metrics:
    """Sums and counts by key. A NaN that was measured stays: hiding it would hide a broken run."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[str, Metric]] = {}

    def mean(self, key: str, value: float, weight: float = 1.0) -> None:
        """Add to a weighted mean; a key whose weights sum to 0 is left out of the reduced row."""
        self._get(key, "mean", MeanMetric).update(value if weight else 0.0, weight)

    def fraction(self, key: str, hits: float, cases: float) -> None:
        """Add hits and cases; the key is always there, 0 where nobody saw a case."""
        self._get(key, "fraction", MeanMetric).update(hits / cases if cases else 0.0, cases)

    def total(self, key: str, value: float) -> None:
        """Add to a sum."""
        self._get(key, "total", SumMetric).update(value)

    def maximum(self, key: str, value: float) -> None:
        """Keep the largest."""
        self._get(key, "maximum", MaxMetric).update(value)

    def reduce(self) -> dict[str, float]:
        """One row over all ranks, keys sorted. Collective: every rank must call it.

        Ranks may hold different keys: they exchange dictionaries, so none waits for a key that
        another has not seen.
        """
        merged: dict[str, list[Part]] = {}
        mine = {key: _part(kind, metric) for key, (kind, metric) in self._metrics.items()}
        for parts in gather(mine):
            for key, part in parts.items():
                merged.setdefault(key, []).append(part)
        row = {key: _reduce(key, merged[key]) for key in sorted(merged)}
        return {key: value for key, value in row.items() if value is not None}

    def _get(self, key: str, kind: str, make: Callable[..., Metric]) -> Metric:
        if key not in self._metrics:
            # NaN for NaN: torchmetrics' default drops them, its "disable" drops the weights (1.9.0)
            self._metrics[key] = kind, make(nan_strategy=math.nan).set_dtype(torch.float64)
        known, metric = self._metrics[key]
        if known != kind:
            raise ValueError(f"metric {key!r} is a {known}, not a {kind}")
        return metric


def gather(value: Any) -> list[Any]:
    """The value of each rank, in order of rank (one process: ``[value]``). Collective."""
    ranks = rank_of_ranks()[1]
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    distributed.all_gather_object(values, value)
    return values


def rank_of_ranks() -> tuple[int, int]:
    """This rank and how many there are; ``(0, 1)`` where there is one process."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate; (0, 1) where n is 0.

    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if n == 0:
        return 0.0, 1.0
    z2 = NORMAL_95**2
    centre = (successes + z2 / 2) / (n + z2)
    half = NORMAL_95 / (n + z2) * math.sqrt(successes * (n - successes) / n + z2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _part(kind: str, metric: Metric) -> Part:
    # States, not compute(): that would start a collective of its own for each key.
    if isinstance(metric, MeanMetric):
        return Part(kind, float(metric.mean_value), float(metric.weight))
    if isinstance(metric, SumMetric):
        return Part(kind, float(metric.sum_value))
    assert isinstance(metric, MaxMetric)
    return Part(kind, float(metric.max_value))


def _reduce(key: str, parts: Iterable[Part]) -> float | None:
    parts = list(parts)
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"metric {key!r} differs between ranks: {', '.join(sorted(kinds))}")
    values = [part.value for part in parts]
    match parts[0].kind:
        case "total":
            return math.fsum(values)
        case "maximum":
            return math.nan if any(math.isnan(v) for v in values) else max(values)
        case kind:
            weight = math.fsum(part.weight for part in parts)
            if weight == 0:
                return 0.0 if kind == "fraction" else None
            return math.fsum(values) / weight
