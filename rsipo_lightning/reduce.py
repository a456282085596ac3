"""Sums over ranks. One collective each, whatever keys a rank has, so that ranks never wait for each
other in vain.
"""

from __future__ import annotations

from collections.abc import Mapping

from rsipo_lightning.metrics import gather


def sum_over_ranks(sums: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Add tuples key by key; a key that a rank lacks counts as zeros. Collective."""
    total: dict[str, tuple[float, ...]] = {}
    for part in gather(dict(sums)):
        for key, values in part.items():
            old = total.get(key, (0.0,) * len(values))
            total[key] = tuple(a + b for a, b in zip(old, values, strict=True))
    return total
