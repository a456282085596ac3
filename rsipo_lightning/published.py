"""Published numbers beside ours, only where the same set was run in full."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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


SAMPLE, MACRO = "sample average", "macro average"


class Kind(NamedTuple):
    """What a published row averages, and over which tasks."""

    average: str = MACRO
    draws: str = ""  # split of ours that is drawn like it; "" for each task of the sets once


@dataclass(frozen=True, slots=True)
class Columns:
    """What a file of published numbers says of one environment."""

    sets: tuple[PublishedSet, ...]
    average: str  # column of their average
    kind: str = ""  # column that says its kind; without one each is a plain Kind()
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # by pattern; no others are compared
    draws: Mapping[str, int] = field(default_factory=dict)  # {split: tasks drawn of all sets}
    one: bool = False  # the sets are the types of one split: none is in full unless all are

    def kind_of(self, stated: str) -> Kind | None:
        """What the column ``kind`` says; None if that is not known."""
        if not self.kind:
            return Kind()
        known = (kind for form, kind in self.kinds.items() if re.fullmatch(form, stated))
        return next(known, None)


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
    # The 140 games of valid_seen. Most papers played 128 draws with repeats (methods.md 10), those
    # that give the mean of six numbers too: 92.7 % of 35 games is no whole number of games.
    "alfworld": Columns(
        (
            PublishedSet("pick", "pick_and_place_simple", 35),
            PublishedSet("look", "look_at_obj_in_light", 13),
            PublishedSet("clean", "pick_clean_then_place_in_recep", 27),
            PublishedSet("heat", "pick_heat_then_place_in_recep", 16),
            PublishedSet("cool", "pick_cool_then_place_in_recep", 25),
            PublishedSet("pick2", "pick_two_obj_and_place", 24),
        ),
        average="alf_avg",
        kind="alf_avg_kind",
        kinds={
            r"micro128": Kind(SAMPLE, "legacy128"),
            r"macro6\??": Kind(MACRO, "legacy128"),
            r"\d+/140\??": Kind(SAMPLE),
        },
        draws={"legacy128": 128},
        one=True,  # other games have 24 of pick_two as well
    ),
}


ROUNDING: Final = 0.1 + 1e-9  # per cent, of numbers with one decimal


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the file: per cent by column, without the empty ones."""

    name: str
    source: str
    values: dict[str, float]
    stated: str  # kind of its average, as the file has it
    kind: Kind | None  # None: not known, so it is compared with nothing

    def average(self, columns: Columns) -> float | None:
        """Its average; None if it is a macro average that its own numbers of the sets contradict.

        A few papers average over questions. Where a paper gives its average only, it is believed.
        """
        stated = self.values.get(columns.average)
        sets = [self.values[s.column] for s in columns.sets if s.column in self.values]
        macro = self.kind is not None and self.kind.average == MACRO
        if stated is None or len(sets) < len(columns.sets) or not macro:
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
            stated = (row.get(columns.kind) or "").strip()
            kind = columns.kind_of(stated)
            methods.append(Method(row["method"], row["source"], known, stated, kind))
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
        """A row for each set, and if all were run in full one for each kind of average.

        Tasks that were drawn count as a set in full if all draws were played.
        """
        columns, methods = self.columns, self.comparable(result)
        draws = columns.draws.get(result.split, 0)
        drawn = bool(draws) and result.overall.tasks == draws
        rows = []
        for s in columns.sets:
            tally = result.types.get(s.task_type)
            tasks = tally.tasks if tally else 0
            size = (tasks if drawn else draws) if draws else s.size
            ours = 100 * tally.success_frac if tally and tasks else None
            published = {
                m.name: m.values[s.column]
                for m in methods
                if tasks == size and s.column in m.values
            }
            rows.append(Row(s.task_type, tasks, size, ours, published))
        if columns.one and not all(row.in_full for row in rows):
            rows = [replace(row, published={}) for row in rows]
        played = [(row.ours, row.tasks) for row in rows if row.in_full and row.ours is not None]
        if len(played) == len(rows):
            total = sum(tasks for _, tasks in played)
            means = {
                SAMPLE: sum(ours * tasks for ours, tasks in played) / total,
                MACRO: sum(ours for ours, _ in played) / len(played),
            }
            kinds = {kind.average for kind in columns.kinds.values()} or {MACRO}
            for name in (name for name in means if name in kinds):
                averages = {
                    m.name: m.average(columns) for m in methods if m.kind and m.kind.average == name
                }
                known = {name: value for name, value in averages.items() if value is not None}
                rows.append(Row(name, total, total, means[name], known))
        return rows

    def comparable(self, result: EvalResult) -> list[Method]:
        """Methods that were measured on the same sets, once each or drawn alike."""
        drawn = result.split if result.split in self.columns.draws else ""
        return [m for m in self.methods if m.kind and m.kind.draws == drawn]

    def tables(self, result: EvalResult, width: int) -> list[Table]:
        """One table, or several of fewer methods where ``width`` characters are not enough."""
        rows = self.rows(result)
        methods = [m for m in self.methods if any(m.name in row.published for row in rows)]
        parts: list[list[str]] = [[]]
        names, counts = (r.name for r in rows), (f"{r.tasks} of {r.size}" for r in rows)
        fixed = max(map(len, names)) + max(map(len, counts)) + 15  # the columns of every table
        room = width - fixed
        for method in methods:
            need = max(len(method.name), 4) + 3
            if need > room and parts[-1]:
                parts.append([])
                room = width - fixed
            parts[-1].append(method.name)
            room -= need
        tables = [self._table(rows, part) for part in parts]
        tables[-1].caption = self._caption(rows, methods, result)
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
            **({"kinds": {m.name: m.stated for m in self.methods}} if self.columns.kind else {}),
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

    def _caption(self, rows: list[Row], shown: list[Method], result: EvalResult) -> str:
        if not shown:
            full = any(row.in_full for row in rows)
            why = "None is of these tasks" if full else "No set was run in full"
            lines = [f"{why}: no published number is shown."]
        else:
            lines = ["Published numbers by source:", *_grouped((m.source, m.name) for m in shown)]
        if shown and self.columns.kind:
            kinds = _grouped((m.stated, m.name) for m in shown)
            lines += ["Their kinds of average, as the file says:", *kinds]
        comparable = self.comparable(result)
        if others := [m.name for m in self.methods if m not in comparable]:
            lines.append(f"Not measured on these tasks, left out: {', '.join(others)}")
        if shown and result.split in self.columns.draws:
            lines.append(f"{result.split}: tasks are drawn as theirs were, but are not the same.")
        if shown and not all(row.in_full for row in rows):
            lines.append("Sets that were not run in full have no published number here.")
        elif odd := [
            m.name
            for m in shown
            if self.columns.average in m.values and m.average(self.columns) is None
        ]:
            lines.append(f"Stated average is not that of its sets, left out: {', '.join(odd)}")
        return escape("\n".join(lines))


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """``"group: name, name"`` for each group."""
    groups: dict[str, list[str]] = {}
    for group, name in pairs:
        groups.setdefault(group, []).append(name)
    return [f"{group}: {', '.join(names)}" for group, names in groups.items()]


def _rows(file: Path, columns: Columns) -> list[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file, at least one."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle)
            needed = {"model", "method", "source", *(s.column for s in columns.sets)}
            needed |= {columns.average} | ({columns.kind} if columns.kind else set())
            missing = needed.difference(reader.fieldnames or ())
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
