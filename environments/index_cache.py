"""Indexes that are built once and kept under ``$RSIPO_CACHE`` (``~/.cache/rsipo_lightning``)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rsipo_lightning.errors import DataError
from rsipo_lightning.files import hash_file

T = TypeVar("T")

_REMEMBER = 1 << 30  # bytes from which the hash of a file is computed once, see remembered_hash()


def cache_folder() -> Path:
    """Where indexes are kept: ``$RSIPO_CACHE`` or ``~/.cache/rsipo_lightning``."""
    return Path(os.environ.get("RSIPO_CACHE") or "~/.cache/rsipo_lightning").expanduser()


def cached_index(
    path: Path,
    kind: str,
    settings: str,
    write: Callable[[Path, Path, str], None],
    read: Callable[[Path], T],
) -> tuple[T, str]:
    """What ``read(folder)`` makes of the index of a file, and the SHA-256 of the file.

    ``write(path, folder, sha256)`` builds it, see :func:`cached`.
    """
    sha256 = remembered_hash(path)
    index = cached(
        path, kind, f"{sha256} {settings}", lambda folder: write(path, folder, sha256), read
    )
    return index, sha256


def cached(
    path: Path,
    kind: str,
    state: str,
    write: Callable[[Path], None],
    read: Callable[[Path], T],
) -> T:
    """What ``read(folder)`` makes of the index of ``path``, whose content ``state`` stands for.

    ``write(folder)`` builds it if there is none, or one that cannot be read. Of processes that
    come at once, one builds.
    """
    key = hashlib.sha256(state.encode()).hexdigest()[:24]
    folder = cache_folder() / f"{kind}-{key}"

    def existing() -> T | None:
        try:
            return read(folder) if folder.is_dir() else None
        except Exception:  # whatever reading half a file raises
            return None

    found = existing()
    if found is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder, f"another process that builds the index of {path}") as alone:
                found = existing()  # another process may have built it while we waited
                if found is None:
                    killed = folder.parent.glob(f".{folder.name}-*.part") if alone else ()
                    for broken in (folder, *killed):
                        shutil.rmtree(broken, ignore_errors=True)
                    with _whole(folder) as part:
                        write(part)
        except OSError as error:
            raise DataError(
                f"{folder.parent}: the index of {path} cannot be written ({error}); "
                "point RSIPO_CACHE at a folder with space"
            ) from error
    if found is None and (found := existing()) is None:
        raise DataError(f"{folder}: the index of {path} cannot be read back")
    return found


@contextmanager
def _locked(folder: Path, what: str) -> Iterator[bool]:
    """One process at a time for each folder: True. Where a file system has no locks all go on:
    False.
    """
    file = folder.with_name(f".{folder.name}.lock")
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        alone = _lock(handle, what)
        with suppress(FileNotFoundError):
            if not alone or os.path.samestat(os.fstat(handle), os.stat(file)):
                break
        os.close(handle)  # who was waited for has removed it: others lock a new one
    try:
        yield alone
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _lock(handle: int, what: str) -> bool:
    """Wait for a lock, and say so; False if there are none."""
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for {what}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes ``folder`` complete or not at all."""
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        yield part
        try:
            part.rename(folder)
        except OSError:  # another process was first; its index is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remembered_hash(path: Path) -> str:
    """As :func:`hash_file`; that of a large file is remembered by its path, size and time."""
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.st_size < _REMEMBER:
        return hash_file(path)
    name = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    note = cache_folder() / f"sha256-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    if note.is_file():
        return note.read_text()
    sha256 = hash_file(path)
    part = note.with_name(f".{note.name}-{os.getpid()}.part")
    with suppress(OSError):  # then it is computed again
        note.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(sha256)
        part.replace(note)
    return sha256
