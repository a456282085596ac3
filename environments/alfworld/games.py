"""The games on disk: a packed file, or the folders that ``alfworld-download`` leaves.

A packed file (JSONL, also .xz) has a header ``{pddl_domain, grammar}`` and then one game a line:
``{split, task, trial, task_type, task_desc, pddl_problem, walkthrough}``. In the release a game is
a JSON file ``json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`` with its own domain and grammar.

All games are looked at once, their problems included; what was found is cached (index_cache.py)
under the hash of the file, or under names, sizes and times of the games in the folder. Texts are
read when a game is asked for, those of a packed file from a copy in the cache, in which each game
can be found.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rsipo_lightning.environments.alfworld.game import TYPES, Game
from rsipo_lightning.environments.alfworld.generate import WORDINGS
from rsipo_lightning.environments.alfworld.problem import check_problem
from rsipo_lightning.environments.index_cache import cached, cached_index
from rsipo_lightning.errors import DataError
from rsipo_lightning.files import parse_object

T = TypeVar("T")

_LAYOUT, _GAME = "json_2.1.1", "game.tw-pddl"
_KIND, _FORMAT = "alfworld", "3"  # of the index
_INDEX, _TEXTS = "index.json", "games.zlib"  # the files of its folder
_UNSET = "UNKNOWN GOAL."  # stands in the grammar before a task is put in
_NAMED = re.compile(r"[^-]+(-[^-]+){4}")  # a folder that says the task
_TELL_S = 5.0  # how often it is said how far the index is


class Entry(NamedTuple):
    """A game that can be read."""

    id: str  # "<task folder>/<trial folder>"
    split: str
    type: str  # one of TYPES
    place: Any  # where its text is: for Games.read


class LeftOut(NamedTuple):
    """A game that is not played."""

    what: str  # "where: why"
    broken: bool  # False if the package leaves it out as well
    split: str = ""  # "" if that cannot be read either


class Games(ABC):
    """The games of one path, the texts of which are read one by one."""

    expected: str  # what should have been at the path

    def __init__(self, path: Path, found: Sequence[Entry | LeftOut]) -> None:
        self.path = path
        self.entries = [one for one in found if isinstance(one, Entry)]
        self.left_out = [one for one in found if isinstance(one, LeftOut)]

    def split(self, name: str) -> list[Entry]:
        """The games of a split, in their order in the file or by folder. None: DataError."""
        found = [entry for entry in self.entries if entry.split == name]
        if not found:
            have = Counter(entry.split for entry in self.entries)
            there = ", ".join(f"{split} {n}" for split, n in sorted(have.items()))
            raise DataError(f"{self.path}: 0 games in split '{name}' (have: {there})")
        return found

    @abstractmethod
    def read(self, entry: Entry) -> Game:
        """A game with its text. DataError if it can be read no more."""


def open_games(path: str | Path) -> Games:
    """The games of a packed file or of a folder that holds json_2.1.1 or is that folder.

    What is no such thing or has no game: DataError. A broken game is in ``left_out`` instead.
    """
    path = Path(path).expanduser()
    games = _FolderGames(path) if os.path.isdir(path) else _PackedGames(path)
    if not games.entries:
        raise DataError(f"0 games found in {path}, expected {games.expected}{_first(games)}")
    return games


def read_games(path: str | Path, split: str | None = None) -> list[Game]:
    """All games of a path, or of one of its splits."""
    games = open_games(path)
    return [games.read(entry) for entry in (games.split(split) if split else games.entries)]


def default_path() -> Path | None:
    """``$ALFWORLD_DATA``, where the package looks for its games."""
    path = os.environ.get("ALFWORLD_DATA")
    return Path(path) if path else None


def write_game(game: Game, folder: Path) -> Path:
    """Write a game as the release has it, below ``folder``/json_2.1.1. The path of its file."""
    path = folder / _LAYOUT / game.split / game.id / _GAME
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {
        "pddl_domain": game.domain,
        "grammar": game.grammar,
        "pddl_problem": game.problem,
        "solvable": True,
        "walkthrough": list(game.walkthrough),
    }
    path.write_text(json.dumps(row))
    return path


def _first(games: Games) -> str:
    """An example of what was left out."""
    return f" ({len(games.left_out)} left out: {games.left_out[0].what})" if games.left_out else ""


# ---- the folders of the release


class _FolderGames(Games):
    """Every game in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._base = path / _LAYOUT if (path / _LAYOUT).is_dir() else path
        self.expected = f"{path / _LAYOUT}/train/*/*/{_GAME}"
        self._domains: dict[str, str] = {}
        files = sorted(self._base.glob(f"*/*/*/{_GAME}"))
        state = [_FORMAT]
        for file in files:
            stat = file.stat()
            state.append(f"{file.relative_to(self._base)} {stat.st_size} {stat.st_mtime_ns}")

        def write(index: Path) -> None:
            _write_index(index, [self._look(file) for file in _told(files, path)])

        super().__init__(path, cached(path, _KIND, "\n".join(state), write, _read_index))

    def _look(self, file: Path) -> Entry | LeftOut:
        place = file.relative_to(self._base)
        split, task, trial = place.parts[:3]
        if skipped := _skipped(task):
            return LeftOut(f"{place}: {skipped}", False, split)
        try:
            row = self._row(file)
            kind = _type(file)
        except DataError as error:
            return LeftOut(str(error), True, split)
        if not row["solvable"]:
            return LeftOut(f"{place}: not solvable", False, split)
        if _UNSET in row["grammar"] and not _NAMED.fullmatch(task):
            return LeftOut(f"{place}: neither grammar nor folder states the task", True, split)
        entry = Entry(f"{task}/{trial}", split, kind, str(place))
        return _checked(entry, row["pddl_problem"], str(place))

    def _row(self, file: Path) -> dict[str, Any]:
        where = str(file.relative_to(self._base))
        row = _load(file, where)
        _check(row, ("pddl_domain", "grammar", "pddl_problem"), where)
        if "solvable" not in row:
            raise DataError(f"{where}: field 'solvable' is missing")
        return row

    def read(self, entry: Entry) -> Game:
        """See the base class."""
        try:
            row = self._row(self._base / entry.place)
        except DataError as error:
            raise DataError(f"{self._base}/{error}") from error
        domain = row["pddl_domain"]
        grammar = row["grammar"]
        if _UNSET in grammar:
            grammar = grammar.replace(_UNSET, _task(entry))
        return Game(
            id=entry.id,
            split=entry.split,
            type=entry.type,
            problem=row["pddl_problem"],
            domain=self._domains.setdefault(domain, domain),
            grammar=grammar,
            walkthrough=tuple(row.get("walkthrough") or ()),
        )


def _type(file: Path) -> str:
    """The task type of a game, by the name of its folder or by its traj_data.json."""
    kind = file.parts[-3].partition("-")[0]
    beside = file.with_name("traj_data.json")
    if kind not in TYPES and beside.exists():
        kind = str(_load(beside, str(beside)).get("task_type"))
    return kind


def _task(entry: Entry) -> str:
    """What a folder ``type-Object-mrecep-Receptacle-scene`` says of the task."""
    _, thing, _, place, _ = entry.id.partition("/")[0].lower().split("-")
    return WORDINGS[entry.type][0].format(thing, place)


def _load(file: Path, where: str) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes(), where)
    except OSError as error:
        raise DataError(f"{where}: cannot be read ({error.strerror})") from error


# ---- a packed file


class _PackedGames(Games):
    """One game a line, behind a header with what they share."""

    expected = "a JSONL(.xz) of a header with pddl_domain and grammar, and then one game a line"

    def __init__(self, path: Path) -> None:
        (self._folder, self._header, found), _ = cached_index(
            path, _KIND, _FORMAT, _pack, _read_packed
        )
        super().__init__(path, found)

    def read(self, entry: Entry) -> Game:
        """See the base class."""
        start, size = entry.place
        try:
            with (self._folder / _TEXTS).open("rb") as file:
                file.seek(start)
                row = json.loads(zlib.decompress(file.read(size)))
        except (OSError, zlib.error, ValueError) as error:
            where = f"{self._folder}: game {entry.id}"
            raise DataError(f"{where} cannot be read back ({error}); remove the folder") from error
        task = json.dumps(row["task_desc"])[1:-1]
        return Game(
            id=entry.id,
            split=entry.split,
            type=entry.type,
            problem=row["pddl_problem"],
            domain=self._header["pddl_domain"],
            grammar=self._header["grammar"].replace(_UNSET, task),
            walkthrough=tuple(row.get("walkthrough") or ()),
        )


def _pack(path: Path, folder: Path, sha256: str) -> None:
    """Look at all lines, and copy them compressed one by one."""
    lines = _lines(path)
    header = parse_object(next(lines, b"{}"), f"{path}:1")
    _check(header, ("pddl_domain", "grammar"), f"{path}:1 (the header)")
    found = []
    with (folder / _TEXTS).open("wb") as file:
        for number, line in enumerate(_told(lines, path), 2):
            if line.strip():
                text = zlib.compress(line)
                found.append(_look(line, f"line {number}", (file.tell(), len(text))))
                file.write(text)
    (folder / "header.json").write_text(json.dumps(header))
    _write_index(folder, found)


def _look(line: bytes, where: str, place: tuple[int, int]) -> Entry | LeftOut:
    keys, split = ("split", "task", "trial", "task_type", "task_desc", "pddl_problem"), ""
    try:
        row = parse_object(line, where)
        if isinstance(row.get("split"), str):
            split = row["split"]
        _check(row, keys, where)
    except DataError as error:
        return LeftOut(str(error), True, split)
    if skipped := _skipped(row["task"]):
        return LeftOut(f"{where}: {skipped}", False, split)
    if not row.get("solvable", True):
        return LeftOut(f"{where}: not solvable", False, split)
    entry = Entry(f"{row['task']}/{row['trial']}", split, row["task_type"], place)
    return _checked(entry, row["pddl_problem"], where)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _read_packed(folder: Path) -> tuple[Path, dict[str, str], list[Entry | LeftOut]]:
    return folder, json.loads((folder / "header.json").read_bytes()), _read_index(folder)


# ---- both


def _check(row: dict[str, Any], texts: Sequence[str], where: str) -> None:
    """DataError unless the row has these texts, and a walkthrough of commands if any."""
    for key in texts:
        if not isinstance(row.get(key), str):
            what = "must be text" if key in row else "is missing"
            raise DataError(f"{where}: field '{key}' {what}")
    walkthrough = row.get("walkthrough") or []
    if not isinstance(walkthrough, list) or not all(isinstance(c, str) for c in walkthrough):
        raise DataError(f"{where}: field 'walkthrough' must be a list of commands")


def _skipped(task: str) -> str:
    """Why the package leaves out all games of a task folder, or ""."""
    return "a movable receptacle or a slice" if "movable" in task or "Sliced" in task else ""


def _checked(entry: Entry, problem: str, where: str) -> Entry | LeftOut:
    """The entry, if its type and its problem can be played."""
    if entry.type not in TYPES:
        return LeftOut(f"{where}: unknown task type '{entry.type}'", True, entry.split)
    try:
        check_problem(problem)
    except DataError as error:
        return LeftOut(f"{where}: {error}", True, entry.split)
    return entry


def _told(games: Iterable[T], path: Path) -> Iterator[T]:
    """The same; says now and then how many were looked at."""
    since = time.monotonic()
    for number, game in enumerate(games):
        if time.monotonic() - since >= _TELL_S:
            since = time.monotonic()
            line = f"{path}: {number} games looked at so far (once, the index is kept)"
            print(line, file=sys.stderr, flush=True)
        yield game


def _write_index(folder: Path, found: Sequence[Entry | LeftOut]) -> None:
    """Of games with one id the first stays."""
    ids: set[str] = set()
    unique: list[Entry | LeftOut] = []
    for one in found:
        if isinstance(one, Entry) and one.id in ids:
            one = LeftOut(f"{one.id}: two games have this id", True, one.split)
        elif isinstance(one, Entry):
            ids.add(one.id)
        unique.append(one)
    (folder / _INDEX).write_text(json.dumps(unique))


def _read_index(folder: Path) -> list[Entry | LeftOut]:
    rows = json.loads((folder / _INDEX).read_bytes())
    return [Entry(*row) if len(row) == 4 else LeftOut(*row) for row in rows]
