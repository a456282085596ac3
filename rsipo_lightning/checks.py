"""Range checks of config keys, for ``__post_init__`` of the Config classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rsipo_lightning.errors import ConfigError, did_you_mean


class Rule(NamedTuple):
    """What a value must be, in words and as a test. A NaN passes none of them."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_0 = Rule("must be at least 0", lambda value: value >= 0)
AT_LEAST_1 = Rule("must be at least 1", lambda value: value >= 1)
ABOVE_0 = Rule("must be above 0", lambda value: value > 0)
FRACTION = Rule("must be between 0 and 1", lambda value: 0 <= value <= 1)


def require(section: str, config: object, **rules: Rule) -> None:
    """Check fields of ``config``. Raises ConfigError, e.g. ``rollout.tasks=0 must be at least 1``.

    >>> require("rollout", self, tasks=AT_LEAST_1, temperature=ABOVE_0)
    """
    for name, rule in rules.items():
        value = getattr(config, name)
        if not rule.holds(value):
            raise ConfigError(f"{section}.{name}={value} {rule.words}")


def require_choice(section: str, config: object, **choices: tuple[str, ...]) -> None:
    """Check that each named field is one of a few words. Raises ConfigError."""
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ConfigError(f"{section}.{name}={value} is not known{did_you_mean(value, known)}")
