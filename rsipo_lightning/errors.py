"""Named errors. Each is also the stdlib type that a caller expects, and says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RsipoError(Exception):
    """Base of all errors of this package."""


class ConfigError(RsipoError, ValueError):
    """A key, value or combination that cannot be run."""


class PluginError(RsipoError, LookupError):
    """An unknown or clashing algorithm, environment, engine or preset."""


class DataError(RsipoError, ValueError):
    """A file that is missing, unreadable or not what was promised."""


class CheckpointError(RsipoError, RuntimeError):
    """A checkpoint that cannot be written or resumed."""


class EnvironmentFault(RsipoError, RuntimeError):
    """Something that all episodes share is broken (a retriever): the run stops with a checkpoint.

    Any other exception of an episode ends that episode only (``Stop.ERROR``).
    """


class EngineError(RsipoError, RuntimeError):
    """The generation engine is dead, stale or disagrees: the run stops with a checkpoint."""


class DivergedError(RsipoError, FloatingPointError):
    """A loss or gradient that is no number; the weights are those of the last whole update."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. Ends the work at once, as a second Ctrl-C does, but is no wish of the user's."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'rsipo'? (have: grpo, rsipo)"``, to be put behind the error's statement."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return f"{hint} (have: {', '.join(names)})"
