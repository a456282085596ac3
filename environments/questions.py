"""Where the questions of search come from: the built-in world, or JSONL files."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rsipo_lightning.checks import above
from rsipo_lightning.environments.answers import normalise
from rsipo_lightning.environments.retriever import Passage
from rsipo_lightning.environments.world import SPLITS, World
from rsipo_lightning.errors import ConfigError, DataError
from rsipo_lightning.files import hash_file, read_jsonl
from rsipo_lightning.protocols import Share
from rsipo_lightning.types import Task

ENV = "search"  # the environment of all these tasks


class WorldQuestions:
    """The built-in world: made in memory, questions when a split is first asked for."""

    splits = SPLITS

    def __init__(self, seed: int, types: Sequence[str]) -> None:
        self._world = World(seed)
        self.types = tuple(types)
        self._tasks: dict[str, list[Task]] = {}

    @property
    def passages(self) -> Sequence[Passage]:
        """The pages of the world."""
        return self._world.passages

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split, types in turn."""
        if split not in self._tasks:
            self._tasks[split] = [
                Task(
                    question.id,
                    ENV,
                    question.type,
                    {
                        "question": question.text,
                        "answers": list(question.answers),
                        "hops": list(question.hops),
                        "path": list(question.path),
                    },
                )
                for question in self._world.questions(split, self.types)
            ]
        return self._tasks[split]

    def mixture(self) -> list[Share]:
        """All training tasks alike."""
        return [Share(self.tasks("train"))]

    def describe(self) -> dict[str, Any]:
        """The seed and the number of tasks."""
        tasks = {split: len(self.tasks(split)) for split in SPLITS}
        return {"source": "world", "world": self._world.seed, "tasks": tasks}


class FileQuestions:
    """Real questions; without files of their own, val and test are a fixed tenth of all.

    ``questions`` is a file, a folder (its ``*.jsonl``), a list of those, or ``{path: weight}``.
    """

    splits = (*SPLITS, "all")

    def __init__(self, questions: Any, eval_questions: Any = None) -> None:
        """Read all files. A value or weight that makes no sense: ConfigError; a file: DataError."""
        self._name = str(questions)
        groups = _groups("env.questions", questions)
        self._files = {"questions": [path for group in groups for path in group.files]}
        every = _read(groups)
        held = [task for tasks in every for task in tasks if _held_out(task.id)]
        train = [[task for task in tasks if not _held_out(task.id)] for tasks in every]
        if eval_questions is not None:
            evals = _groups("env.eval_questions", eval_questions)
            if len(evals) > 1 or evals[0].name:
                raise ConfigError("env.eval_questions takes no weights: each task is played once")
            self._files["eval_questions"] = evals[0].files
            (held,), train = _read(evals), every
        self._shares = [
            Share(tasks, group.weight, group.name)
            for tasks, group in zip(train, groups, strict=True)
        ]
        flat = [task for tasks in train for task in tasks]
        self._tasks = {
            "train": flat,
            "val": held,
            "test": held,
            "all": [task for tasks in every for task in tasks],
        }
        self.types = tuple(sorted({task.type for task in flat + held}))

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split in the order of the files."""
        if not self._tasks[split]:
            raise DataError(
                f"{self._name}: too few rows to hold 10 % of them out; give env.eval_questions"
            )
        return self._tasks[split]

    def mixture(self) -> list[Share]:
        """The training tasks of each weighted path, or of all. Warns of those that test as well."""
        trained = {_same(task) for task in self._tasks["train"]}
        held = self._tasks["test"]
        if known := sum(_same(task) in trained for task in held):
            what = f"{known} of {len(held)} questions of val and test are also trained on"
            warnings.warn(f"{what} (the same text)", stacklevel=2)
        return self._shares

    def describe(self) -> dict[str, Any]:
        """Paths, hashes and the number of tasks."""
        files = {
            key: [{"path": str(path), "sha256": hash_file(path)} for path in paths]
            for key, paths in self._files.items()
        }
        tasks = {split: len(self._tasks[split]) for split in SPLITS}
        return {"source": "files", "files": files, "tasks": tasks}


class _Group(NamedTuple):
    """Files that are drawn from as one."""

    files: list[Path]
    weight: float = 1.0
    name: str = ""  # the path that has the weight


def _groups(key: str, given: Any) -> list[_Group]:
    """What a key names: one group, or one for each weight."""
    if isinstance(given, Mapping):
        groups = [_Group(_files(str(path)), weight, str(path)) for path, weight in given.items()]
        for _, weight, name in groups:
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"{key}: the weight of {name} must be a number, not {weight!r}")
            above(f"{key}: weight of {name}", weight, 0)
    else:
        paths = [given] if isinstance(given, str) else given
        if not isinstance(paths, list) or not all(isinstance(p, str) and p for p in paths):
            raise ConfigError(f"{key}={given}: must be a path, a list of paths or {{path: weight}}")
        groups = [_Group([file for path in paths for file in _files(path)])]
    if not groups or not groups[0].files:
        raise ConfigError(f"{key}={given}: names no file")
    return groups


def _files(path: str) -> list[Path]:
    """The file itself, or those of a folder."""
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise DataError(f"{path}: holds no *.jsonl")
    return files


def _read(groups: Iterable[_Group]) -> list[list[Task]]:
    """Tasks of each group; an id may not come back in any of them."""
    places: dict[str, str] = {}
    return [[t for file in group.files for t in read_questions(file, places)] for group in groups]


def _same(task: Task) -> str:
    """Equal for questions of the same text."""
    return normalise(task.payload["question"])


def _held_out(ident: str) -> bool:
    """A fixed tenth of all ids."""
    return int(hashlib.sha256(ident.encode()).hexdigest()[:8], 16) % 10 == 0


def read_questions(path: str | Path, places: dict[str, str] | None = None) -> list[Task]:
    """Tasks of a JSONL file of {id, question, answers} or FlashRAG's {question, golden_answers}.

    The type is the field ``source``, else the file's stem. ``places`` holds the "file:line" of the
    ids that were read before; those of this file are added. Broken row, or an id that is known:
    DataError "file:line: what". A row of which no gold can ever match (only punctuation or
    articles) is left out with a warning.
    """
    path = Path(path)
    places = {} if places is None else places
    tasks: list[Task] = []
    empty: list[int] = []
    for number, _, row in read_jsonl(path):
        where = f"{path}:{number}"
        question = row.get("question")
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{where}: field 'question' must be text that is not empty")
        golds = row.get("answers", row.get("golden_answers"))
        if not isinstance(golds, list) or not golds or not all(isinstance(g, str) for g in golds):
            raise DataError(
                f"{where}: field 'answers' (or 'golden_answers') must be a list of texts"
            )
        ident = str(row.get("id") or f"{path.stem}-{number}")
        if ident in places:
            hint = "an id may be there once"
            if not row.get("id"):
                hint = "it is made of the file's name and the line: add a field 'id', or rename one"
            raise DataError(f"{where}: id '{ident}' is also at {places[ident]}; {hint}")
        places[ident] = where
        if not any(map(normalise, golds)):
            empty.append(number)
            continue
        type_ = str(row.get("source") or path.stem)
        tasks.append(Task(ident, ENV, type_, {"question": question, "answers": golds}))
    if not tasks:
        raise DataError(f"{path}: holds no questions that can be answered")
    if empty:
        some = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        what = f"{len(empty)} rows left out, their answers are empty once normalised"
        warnings.warn(f"{path}:{some}: {what}", stacklevel=2)
    return tasks
