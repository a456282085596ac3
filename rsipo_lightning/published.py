"""Published numbers beside ours, only where the same set was run in full."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.markup import escape
from rich.table import Table

from rsipo_lightning.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rsipo_lightning.callbacks.eval_result import EvalResult


class PublishedSet(NamedTuple):
    """A set that papers evaluate on."""

    column: str  # of the file
    task_type: str  # of the environment
    size: int  # tasks of the whole set


@dataclass(frozen=True, slots=True)
class Columns:
    """What a file of published numbers says of one environment."""

    sets: tuple[PublishedSet, ...]
    average: str  # column of their macro average


# An environment's numbers can be compared once it stands here. Search: 51,713 questions, the test
# sets of NQ, TriviaQA, PopQA and Bamboogle and the dev sets of the others, as in Search-R1.
COLUMNS: Final[dict[str, Columns]] = {
    "search": Columns(
        (
            PublishedSet("nq", "nq", 3610),
            PublishedSet("triviaqa", "triviaqa", 11313),
            PublishedSet("popqa", "popqa", 14267),
            PublishedSet("hotpotqa", "hotpotqa", 7405),
            PublishedSet("2wiki", "2wikimultihopqa", 12576),
            PublishedSet("musique", "musique", 2417),
            PublishedSet("bamboogle", "bamboogle", 125),
        ),
        average="search_avg",
    ),
}


FIXED: Final = 44  # width of the columns that every table of ours has
ROUNDING: Final = 0.1 + 1e-9  # per cent, of numbers with one decimal


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the file: per cent by column, without the empty ones."""

    name: str
    source: str
    values: dict[str, float]

    def average(self, columns: Columns) -> float | None:
        """Its macro average; None if it is not what its own numbers of the sets give.

        A few papers average over questions. Where a paper gives its average only, it is believed.
        """
        stated = self.values.get(columns.average)
        sets = [self.values[s.column] for s in columns.sets if s.column in self.values]
        if stated is None or len(sets) < len(columns.sets):
            return stated
        return stated if abs(stated - sum(sets) / len(sets)) <= ROUNDING else None


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or the average of all."""

    name: str
    tasks: int  # that were played and did not break
    size: int
    ours: float | None  # per cent; None if nothing was played
    published: dict[str, float]  # per cent by method; empty unless the set was run in full

    @property
    def in_full(self) -> bool:
        return self.tasks == self.size


@dataclass(frozen=True, slots=True)
class Published:
    """The methods of one base model."""

    file: str
    model: str
    methods: tuple[Method, ...]
    columns: Columns

    @classmethod
    def read(cls, file: str | os.PathLike[str], model: str | None, env: str) -> Published:
        """Rows of ``model`` in a CSV file with the columns model, method, source and the sets'.

        DataError if it cannot be read, ConfigError if the model or the environment is not in it.
        """
        if env not in COLUMNS:
            have = ", ".join(COLUMNS)
            raise ConfigError(f"--published: no published sets are known for {env} (have: {have})")
        columns = COLUMNS[env]
        rows = _rows(Path(file), columns)
        models = ", ".join(dict.fromkeys(row["model"] for _, row in rows))
        if model is None:
            raise ConfigError(f"--published needs --published-model NAME (have: {models})")
        names = [*(s.column for s in columns.sets), columns.average]
        methods = []
        lines: dict[str, int] = {}
        for line, row in rows:
            if row["model"] != model:
                continue
            if (known_at := lines.setdefault(row["method"], line)) != line:
                raise DataError(
                    f"{file}:{line}: {model}, {row['method']} is also on line {known_at}"
                )
            values = {name: _number(f"{file}:{line}", name, row[name]) for name in names}
            known = {name: value for name, value in values.items() if value is not None}
            methods.append(Method(row["method"], row["source"], known))
        if not methods:
            raise ConfigError(f"--published-model {model}: {file} has {models}")
        return cls(str(file), model, tuple(methods), columns)

    def check(self, types: Collection[str]) -> None:
        """ConfigError if none of the task types that will be played is a published set."""
        known = [s.task_type for s in self.columns.sets]
        if not set(known) & set(types):
            have = ", ".join(sorted(types))
            raise ConfigError(f"--published has {', '.join(known)}; the tasks here are {have}")

    def rows(self, result: EvalResult) -> list[Row]:
        """A row for each set; that of the macro average only if all were run in full."""
        rows = []
        for s in self.columns.sets:
            tally = result.types.get(s.task_type)
            tasks = tally.tasks if tally else 0
            ours = 100 * tally.success_frac if tally and tasks else None
            published = {
                m.name: m.values[s.column]
                for m in self.methods
                if tasks == s.size and s.column in m.values
            }
            rows.append(Row(s.task_type, tasks, s.size, ours, published))
        ours_of = [row.ours for row in rows if row.in_full and row.ours is not None]
        if len(ours_of) == len(rows):
            total = sum(row.size for row in rows)
            averages = {m.name: m.average(self.columns) for m in self.methods}
            known = {name: value for name, value in averages.items() if value is not None}
            rows.append(Row("macro average", total, total, sum(ours_of) / len(rows), known))
        return rows

    def tables(self, result: EvalResult, width: int) -> list[Table]:
        """One table, or several of fewer methods where ``width`` characters are not enough."""
        rows = self.rows(result)
        methods = [m for m in self.methods if any(m.name in row.published for row in rows)]
        parts: list[list[str]] = [[]]
        room = width - FIXED
        for method in methods:
            need = max(len(method.name), 4) + 3
            if need > room and parts[-1]:
                parts.append([])
                room = width - FIXED
            parts[-1].append(method.name)
            room -= need
        tables = [self._table(rows, part) for part in parts]
        tables[-1].caption = self._caption(rows, methods)
        return tables

    def to_json(self, result: EvalResult) -> dict[str, Any]:
        """What ``tables`` shows."""
        return {
            "file": self.file,
            "model": self.model,
            "rows": [
                {
                    "set": row.name,
                    "tasks": row.tasks,
                    "size": row.size,
                    "in_full": row.in_full,
                    "ours": row.ours,
                    "published": row.published,
                }
                for row in self.rows(result)
            ],
            "sources": {m.name: m.source for m in self.methods},
        }

    def _table(self, rows: list[Row], names: list[str]) -> Table:
        title = "Success in %: ours"
        if names:
            title += f", and right of it what is published of {self.model}"
        table = Table(title=escape(title))
        table.add_column("set")
        table.add_column("tasks", justify="right")
        table.add_column("ours", justify="right")
        for name in names:
            table.add_column(escape(name), justify="right")
        for row in rows:
            table.add_row(
                row.name,
                f"{row.tasks} of {row.size}",
                "-" if row.ours is None else f"{row.ours:.1f}",
                *(f"{row.published[n]:.1f}" if n in row.published else "-" for n in names),
            )
        return table

    def _caption(self, rows: list[Row], shown: list[Method]) -> str:
        if not shown:
            return "No set was run in full: no published number is shown."
        lines = ["Published numbers by source:"]
        sources: dict[str, list[str]] = {}
        for method in shown:
            sources.setdefault(method.source, []).append(method.name)
        lines += [f"{source}: {', '.join(names)}" for source, names in sources.items()]
        if not all(row.in_full for row in rows):
            lines.append("Sets that were not run in full have no published number here.")
        elif odd := [
            m.name
            for m in shown
            if self.columns.average in m.values and m.average(self.columns) is None
        ]:
            lines.append(f"Stated average is not that of its sets, left out: {', '.join(odd)}")
        return escape("\n".join(lines))


def _rows(file: Path, columns: Columns) -> list[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file, at least one."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle)
            needed = ["model", "method", "source", *(s.column for s in columns.sets)]
            missing = {*needed, columns.average}.difference(reader.fieldnames or ())
            if missing:
                raise DataError(f"{file}: no column {', '.join(sorted(missing))}")
            rows = [(reader.line_num, row) for row in reader if row["model"]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{file}: holds no rows")
    return rows


def _number(where: str, column: str, text: str | None) -> float | None:
    """A cell; None if it is empty."""
    if not text or not text.strip():
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {column}={text} is not a number")
    return number
