"""Files of one JSON object a line, read with the place of each error and written so that a resumed
run can go on; hashes of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rsipo_lightning.errors import DataError

_HALF = re.compile("[\ud800-\udfff]")


def half_character(text: str) -> bool:
    """Whether a text holds half a character (a lone surrogate), which no tokenizer takes."""
    return _HALF.search(text) is not None


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes in hex. A file that cannot be read: DataError."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_jsonl(path: str | Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number from 1, byte offset, row) of each line that is not blank.

    Unreadable file, malformed JSON or a row that is no object: DataError "file:line: what".
    """
    try:
        with open(path, "rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                start, offset = offset, offset + len(line)
                if line.strip():
                    yield number, start, parse_object(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Not UTF-8, not JSON, half a character, no object: DataError."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if rb"\ud" in line.lower() and half_character(json.dumps(row, ensure_ascii=False)):
        raise DataError(f"{where}: holds half a character (a lone surrogate)")
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is expected, not {type(row).__name__}")
    return row


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
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
