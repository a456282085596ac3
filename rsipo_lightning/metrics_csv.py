"""metrics.csv: one row per update, one column per key."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

UPDATE = "update"


class MetricsCsv:
    """A table that grows by one row per update, and by a column when a key is seen first.

    ``write`` is what MetricsLogger calls. The file is complete after each call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = [UPDATE]
        self.rows: list[dict[str, str]] = []
        if path.exists():  # of the run that is resumed
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                # A row that a kill cut off lacks columns; its update is made again.
                self.rows = [row for row in reader if None not in row.values()]
                self.columns = list(reader.fieldnames or [UPDATE])

    def write(self, update: int, row: Mapping[str, float]) -> None:
        """Add a row. A key without a column gets one; earlier rows are empty there."""
        new = {UPDATE: str(update), **{key: repr(value) for key, value in row.items()}}
        self.rows.append(new)
        added = [key for key in new if key not in self.columns]
        if added or not self.path.exists():
            self.columns += added
            self._rewrite()
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(new)

    def truncate_after(self, update: int) -> None:
        """Drop the rows of later updates: a resumed run makes them again."""
        self.rows = [row for row in self.rows if int(row[UPDATE]) <= update]
        if self.path.exists():
            self._rewrite()

    def _rewrite(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)
