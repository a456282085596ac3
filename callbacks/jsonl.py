"""Files of one JSON object a line that a resumed run can go on writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows at the end, on disk when this returns to the caller's next step."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def keep_until(path: Path, update: int) -> None:
    """Drop what was written after that update, and a line that a kill cut off: it is made again."""
    if not path.exists():
        return
    part = path.with_name(path.name + ".part")
    with path.open("rb") as old, part.open("wb") as new:
        for line in old:
            try:
                whole = json.loads(line)["update"] <= update
            except (ValueError, TypeError, KeyError):
                continue
            if whole:
                new.write(line)
    os.replace(part, path)
