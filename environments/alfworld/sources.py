"""Where the tasks of ALFWorld come from: files of the release, or generated games."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, overload

from rsipo_lightning.environments.alfworld.game import Game
from rsipo_lightning.environments.alfworld.generate import SIZES, GeneratedGames
from rsipo_lightning.types import Task

ENV = "alfworld"
OFFICIAL = ("train", "valid_train", "valid_seen", "valid_unseen")  # of the release


class Source(Protocol):
    """Tasks and their games."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of one of OFFICIAL, in a fixed order; none if the source has no such games."""

    def game(self, task: Task) -> Game:
        """The game of a task. DataError if it cannot be read (any more)."""

    def describe(self) -> dict[str, Any]:
        """What a run records."""


class GeneratedTasks:
    """Games of a world that is made up, each when it is first asked for."""

    def __init__(self, world: int) -> None:
        self._games = GeneratedGames(world)
        self._splits = {split: _Lazy(self._games.split(split)) for split in OFFICIAL}
        self._game = lru_cache(256)(lambda split, index: self._games.split(split)[index])

    def tasks(self, split: str) -> Sequence[Task]:
        """See the protocol."""
        return self._splits[split]

    def game(self, task: Task) -> Game:
        """See the protocol."""
        return self._game(task.payload["split"], task.payload["index"])

    def describe(self) -> dict[str, Any]:
        """The seed and the number of games."""
        return {"source": "generated", "world": self._games.world, "games": dict(SIZES)}


class _Lazy(Sequence[Task]):
    """The tasks of games that are made one by one."""

    def __init__(self, games: Sequence[Game]) -> None:
        self._games = games
        self._made: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self._games)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[i] for i in places]
        if places not in self._made:
            game = self._games[places]
            payload = {"split": game.split, "index": places, "game": game.id}
            self._made[places] = Task(game.id, ENV, game.type, payload)
        return self._made[places]


def source(data: str | None, world: int) -> Source:
    """Files where a path or $ALFWORLD_DATA says so, else generated games."""
    path = data or os.environ.get("ALFWORLD_DATA")
    return GeneratedTasks(world)
