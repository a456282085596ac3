"""metrics.csv: one row per update, one column per key."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

UPDATE = "update"


class MetricsCsv:
    """A table that grows by one row per update, and by a column when a key is seen first.

    The file is complete after each call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = [UPDATE]
        self.rows: list[dict[str, str]] = []
        if path.exists():  # of the run that is resumed
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if None not in row and None not in row.values()]
                self.rows = [row for row in rows if row.get(UPDATE, "").isdecimal()]
                self.columns = list(reader.fieldnames or [UPDATE])

    def write(self, update: int, row: Mapping[str, float]) -> None:
        """Add a row. A key without a column gets one; earlier rows are empty there."""
        self.rows.append({UPDATE: str(update), **{key: str(value) for key, value in row.items()}})
        self.columns += [key for key in self.rows[-1] if key not in self.columns]
        self._save()

    def truncate_after(self, update: int) -> None:
        """Drop the rows of later updates: a resumed run makes them again."""
        kept = [row for row in self.rows if int(row[UPDATE]) <= update]
        if len(kept) < len(self.rows):
            self.rows = kept
            self._save()

    def _save(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)
