"""Where the tasks of ALFWorld come from: files of the release, or generated games."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, overload

from rsipo_lightning.environments.alfworld.game import Game
from rsipo_lightning.environments.alfworld.games import Entry, default_path, open_games
from rsipo_lightning.environments.alfworld.generate import SIZES, GeneratedGames
from rsipo_lightning.environments.index_cache import remembered_hash
from rsipo_lightning.errors import DataError
from rsipo_lightning.types import Task

ENV = "alfworld"
OFFICIAL = ("train", "valid_train", "valid_seen", "valid_unseen")  # of the release
BROKEN = 0.1  # of the games of a split: more of them that cannot be read are no accident
_KEPT = 256  # games in memory: what is played at once comes from few of them


class Source(Protocol):
    """Tasks and their games."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of one of OFFICIAL, in a fixed order. DataError if there are none."""

    def game(self, task: Task) -> Game:
        """The game of a task. DataError if it cannot be read (any more)."""

    def describe(self) -> dict[str, Any]:
        """What a run records."""


class GeneratedTasks:
    """Games of a world that is made up, each when it is first asked for."""

    def __init__(self, world: int) -> None:
        self._games = GeneratedGames(world)
        self._splits = {split: _Lazy(self._games.split(split)) for split in OFFICIAL}
        self._game = lru_cache(_KEPT)(lambda split, index: self._games.split(split)[index])

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


class FileTasks:
    """Games of the release, or others in one of its forms; see games.py."""

    def __init__(self, path: Path) -> None:
        """Look at all games. Those that cannot be read are left out with a warning, here those that
        do not even tell their split; where they are more than a tenth: DataError.
        """
        self._games = open_games(path)
        self._entries = {entry.id: entry for entry in self._games.entries}
        self._read = lru_cache(_KEPT)(lambda game: self._games.read(self._entries[game]))
        self._tasks = lru_cache(None)(self._of_split)
        self._check("", self._games.entries)

    def tasks(self, split: str) -> Sequence[Task]:
        """See the protocol. Broken games of the split are left out with a warning the first time;
        where they are more than a tenth: DataError.
        """
        return self._tasks(split)

    def _of_split(self, split: str) -> Sequence[Task]:
        self._check(split, [entry for entry in self._games.entries if entry.split == split])
        return [
            Task(entry.id, ENV, entry.type, {"split": split, "game": entry.id})
            for entry in self._games.split(split)
        ]

    def _check(self, split: str, whole: Sequence[Entry]) -> None:
        """Warn of the broken games of a split beside its whole ones; too many: DataError."""
        left = self._games.left_out
        if broken := [one.what for one in left if one.broken and one.split == split]:
            every = len(broken) + len(whole)
            games = f"games of {split}" if split else "games"
            what = f"{len(broken)} of {every} {games} cannot be played; the first: {broken[0]}"
            if len(broken) > BROKEN * every:
                raise DataError(f"{self._games.path}: {what}")
            warnings.warn(f"{self._games.path}: {what}; they are left out", stacklevel=4)

    def game(self, task: Task) -> Game:
        """See the protocol."""
        return self._read(task.payload["game"])

    def describe(self) -> dict[str, Any]:
        """Path, hash, the number of games by split, and those left out: how many the package leaves
        out as well, and the first that are broken.
        """
        games = self._games
        splits = Counter(entry.split for entry in games.entries)
        names = "\n".join(sorted(f"{entry.split}/{entry.id}" for entry in games.entries))
        folder = games.path.is_dir()  # its hash is of what the games are called
        return {
            "source": "files",
            "path": str(games.path),
            "sha256": _hash(names) if folder else remembered_hash(games.path),
            "games": {split: splits[split] for split in sorted(splits)},
            "left_out": sum(not left.broken for left in games.left_out),
            "broken": [left.what for left in games.left_out if left.broken][:20],
        }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def source(data: str | None, world: int) -> Source:
    """The files of ``data`` or $ALFWORLD_DATA, else generated games."""
    path = Path(data) if data else default_path()
    return FileTasks(path) if path else GeneratedTasks(world)
