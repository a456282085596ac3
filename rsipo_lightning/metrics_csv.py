"""metrics.csv: one row per update, one column per key."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

UPDATE = "update"


class MetricsCsv:
    """A table that grows by one row per update, and by a column when a key is seen first.

    The file is complete after each ``write``. Of a run that is resumed, the rows that are made
    again are replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = [UPDATE]
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                # A row that a kill cut off lacks columns; its update is made again.
                self.rows = [row for row in reader if None not in row.values()]
                self.columns = list(reader.fieldnames or [UPDATE])

    def write(self, update: int, row: Mapping[str, float]) -> None:
        """Add a row, in place of those of this and later updates. New keys get columns."""
        new = {UPDATE: str(update), **{key: str(value) for key, value in row.items()}}
        self.rows = [*(old for old in self.rows if int(old[UPDATE]) < update), new]
        self.columns += [key for key in new if key not in self.columns]
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)
