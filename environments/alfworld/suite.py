"""ALFWorld: household tasks in text, on the games of the release or on generated ones.

One response is one command inside ``<action></action>``; ``max_steps`` counts all of them. A win
earns 10 (methods.md 1.4). The defaults are those of the published baselines: a prompt of its own
each turn, which shows the latest two observations with what was done then, and 50 steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rsipo_lightning.checks import above, at_least, one_of, within
from rsipo_lightning.environments.alfworld import sources
from rsipo_lightning.environments.alfworld.builtin import BuiltinEngine
from rsipo_lightning.environments.alfworld.episode import AlfworldEpisode
from rsipo_lightning.environments.alfworld.game import TYPES, GameEngine, PlayedGame
from rsipo_lightning.environments.alfworld.sources import ENV, OFFICIAL
from rsipo_lightning.environments.alfworld.wording import AlfworldWording
from rsipo_lightning.environments.templates import STYLES
from rsipo_lightning.errors import DataError
from rsipo_lightning.files import hash_file
from rsipo_lightning.protocols import (
    SPLITS,
    Environment,
    EnvironmentConfig,
    StepResult,
    TaskSuite,
)
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.types import Task, Trajectory

if TYPE_CHECKING:
    from rsipo_lightning.environments.alfworld.expert import Player

STANDS_FOR = {"val": "valid_train", "test": "valid_seen"}  # of the release
LEGACY, DRAWS, SEEN = "legacy128", 128, 140  # split, its tasks, the games they are drawn from


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


class AlfworldSuite(TaskSuite):
    """Games of the release, or generated ones in its format.

    Training plays "train"; "val" is "valid_train", other games of the scenes that are trained on;
    "test" is "valid_seen", which the papers' tables are of and training never looks at.
    "legacy128" draws 128 games of valid_seen with repeats, as published baselines did.
    """

    Config = AlfworldConfig
    name = ENV

    def __init__(self, config: AlfworldConfig, seed: int) -> None:
        """Open or make the games. ``seed`` changes nothing: all runs share tasks and games."""
        self.config = config
        _check(config)
        self._wording = AlfworldWording.read(config.prompt, config.template)
        self._source = sources.source(config.data, config.world)
        self._engine: GameEngine
        self._threads: ThreadPoolExecutor | None = None
        if config.engine == "builtin":
            self._engine = BuiltinEngine()
        else:
            from rsipo_lightning.environments.alfworld.textworld import TextWorldEngine

            self._engine = TextWorldEngine(config.workers, config.timeout_s)
            self._threads = ThreadPoolExecutor(config.workers)

    @property
    def types(self) -> tuple[str, ...]:
        """The six, in the order of the papers' tables."""
        return TYPES

    def tasks(self, split: str) -> Sequence[Task]:
        """Games of a split of the release, of one that stands for it, or of "legacy128"."""
        if split == LEGACY:
            return self._drawn()
        official = STANDS_FOR.get(split, split)
        if official not in OFFICIAL:
            have = ", ".join((*SPLITS, *OFFICIAL[1:], LEGACY))
            raise DataError(f"alfworld has no split '{split}' (have: {have})")
        return self._source.tasks(official)

    def _drawn(self) -> list[Task]:
        """The first of each game is the task of valid_seen itself; repeats are numbered.

        DataError if these are not the games that others drew from.
        """
        games, drawn = self.tasks("valid_seen"), Counter[str]()
        if len(games) != SEEN:
            raise DataError(f"{LEGACY} is of the {SEEN} games of the release, not of {len(games)}")
        tasks = []
        for draw in range(DRAWS):
            task = games[keyed_random(LEGACY, draw).randrange(len(games))]
            drawn[task.id] += 1
            n = drawn[task.id]
            tasks.append(replace(task, id=f"{task.id}#{n}") if n > 1 else task)
        return tasks

    def cluster(self, task: Task) -> str:
        """The game."""
        return str(task.payload["game"])

    @classmethod
    def evaluation_split(cls, config: AlfworldConfig, given: Collection[str]) -> str:
        """Every game of the papers' split, however few tasks a run looks at."""
        return "valid_seen"

    def make(self) -> AlfworldEpisode:
        """A fresh episode; all share the engine."""
        return AlfworldEpisode(self.config, self._wording, self._open)

    def _open(self, task: Task) -> PlayedGame:
        return self._engine.open(self._source.game(task))

    def step_many(
        self, episodes: Sequence[Environment], responses: Sequence[str]
    ) -> list[StepResult | Exception]:
        """As many at once as there are worker processes."""
        if self._threads is None:
            return super().step_many(episodes, responses)
        step = super().step_many
        pairs = zip(episodes, responses, strict=True)
        parts = self._threads.map(lambda pair: step([pair[0]], [pair[1]]), pairs)
        return [result for part in parts for result in part]

    @property
    def stop(self) -> tuple[str, ...]:
        """A response ends with its action."""
        return ("</action>",)

    def expert(self, task: Task, rng: random.Random, **how: Any) -> Player:
        """Plays along in a game of its own; ``how``: as for a housekeeper, the best it can."""
        from rsipo_lightning.environments.alfworld.expert import Housekeeper, Player

        return Player(self._open(task), Housekeeper(rng, **how))

    def hindsight(self, trajectory: Trajectory, rng: random.Random) -> str:
        """What was missing: the form, what to do when nothing happens, or the way to the goal."""
        from rsipo_lightning.environments.alfworld.expert import hindsight

        return hindsight(trajectory, rng)

    def describe(self) -> dict[str, Any]:
        """Source, counts, hashes and the games that were left out; the engine."""
        described = self._source.describe() | {"engine": self.config.engine}
        if self.config.template:
            file = AlfworldWording.file(self.config.template)
            described["template"] = {"path": str(file), "sha256": hash_file(file)}
        return described

    def close(self) -> None:
        """End the workers of the engine."""
        if self._threads is not None:
            self._threads.shutdown()
        self._engine.close()


def _check(config: AlfworldConfig) -> None:
    one_of("env.prompt", config.prompt, STYLES)
    one_of("env.context", config.context, ("append", "window"))
    one_of("env.admissible", config.admissible, ("always", "first", "never"))
    one_of("env.engine", config.engine, ("builtin", "textworld"))
    for key in ("max_steps", "history"):
        at_least(f"env.{key}", getattr(config, key), 1)
    within("env.workers", config.workers, 1, 1024)
    above("env.timeout_s", config.timeout_s, 0)
