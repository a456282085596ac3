"""Range checks of keys, for ``__post_init__`` of the Config classes. Each raises ConfigError.

A NaN, an infinity, and without an upper bound a value above ``LARGEST`` pass none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rsipo_lightning.errors import ConfigError

LARGEST = 1e9  # what is larger is a slip, not a setting


def at_least(key: str, value: float, low: float) -> None:
    """``rollout.tasks=0: must be at least 1``."""
    if not low <= value <= LARGEST:
        raise ConfigError(f"{key}={value}: must be at least {low:g}{_cap(value)}")


def above(key: str, value: float, low: float) -> None:
    """``optim.lr=0.0: must be above 0``."""
    if not low < value <= LARGEST:
        raise ConfigError(f"{key}={value}: must be above {low:g}{_cap(value)}")


def within(key: str, value: float, low: float, high: float) -> None:
    """``rollout.max_error_frac=2.0: must lie between 0 and 1``."""
    high = LARGEST if high == math.inf else high
    if not low <= value <= high:
        raise ConfigError(f"{key}={value}: must lie between {low:g} and {high:g}")


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """``model.dtype=half: must be one of float32, bfloat16``."""
    if value not in allowed:
        raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _cap(value: float) -> str:
    return f" and at most {LARGEST:g}" if value > LARGEST else ""
