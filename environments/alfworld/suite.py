"""ALFWorld: household tasks in text, on the games of the release or on generated ones.

One response is one command inside ``<action></action>``; ``max_steps`` counts all of them. A win
earns 10 (methods.md 1.4). The defaults are those of the published baselines: a prompt of its own
each turn, which shows the latest two observations with what was done then, and 50 steps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rsipo_lightning.checks import at_least, one_of
from rsipo_lightning.environments.alfworld import sources
from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.episode import AlfworldEpisode
from rsipo_lightning.environments.alfworld.expert import Housekeeper, skill_for
from rsipo_lightning.environments.alfworld.game import TYPES, Game, GameEngine, PlayedGame
from rsipo_lightning.environments.alfworld.sources import ENV
from rsipo_lightning.environments.alfworld.wording import AlfworldWording
from rsipo_lightning.environments.templates import STYLES
from rsipo_lightning.errors import DataError
from rsipo_lightning.files import hash_file
from rsipo_lightning.protocols import EnvironmentConfig, Expert, TaskSuite
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.types import Task, Trajectory

LEGACY, DRAWS = "legacy128", 128
ENGINES = ("builtin", "textworld")


@dataclass
class AlfworldConfig(EnvironmentConfig):
    """Keys of ``env: alfworld``. Without ``data`` and $ALFWORLD_DATA games are generated."""

    data: str | None = None  # folder that holds json_2.1.1, or a packed JSONL(.xz)
    world: int = 0  # seed of the generated games
    engine: str = "builtin"  # builtin | textworld (extra [alfworld])
    workers: int = 2  # textworld: processes
    timeout_s: float = 60.0  # textworld: for one call; the game of a later answer breaks
    context: str = "window"  # window: a new prompt each turn | append: the conversation grows
    history: int = 2  # window: latest turns that the prompt shows
    admissible: str = "always"  # always | first (message only) | never: list possible actions
    template: str | None = None  # YAML of texts in place of those of `prompt`
