"""The folder of a run: where it is, what it was started with, and what came out."""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rsipo_lightning.composing import plain, to_yaml
from rsipo_lightning.config import RunConfig, SftConfig
from rsipo_lightning.errors import CheckpointError, ConfigError, DataError, RsipoError

CONFIG = "config.yaml"
RECORD = "run.json"
# What a full, failing or read-only disk says.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
PACKAGES = (
    "rsipo-lightning",
    "torch",
    "lightning",
    "transformers",
    "tokenizers",
    "numpy",
    "omegaconf",
    "torchmetrics",
    "tensorboard",
    "bm25s",
    "PyStemmer",
    "deepspeed",
    "peft",
    "vllm",
    "alfworld",
    "textworld",
)


class RunFolder:
    """``<run.root>/<env>/<config.method>/<time>-s<seed>/`` with config.yaml and run.json.

    All paths inside a run are ``folder.path / name``. Only rank 0 makes and writes it.
    """

    def __init__(self, path: Path, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.made = made  # for a new run: its folder and the parents that it lacked, upwards

    @classmethod
    def create(
        cls,
        config: RunConfig | SftConfig,
        command: Sequence[str],
        data: Mapping[str, Any] | None = None,
        bank: Mapping[str, str] | None = None,
    ) -> RunFolder:
        """Make the folder of a new run. ConfigError if it exists already or cannot be made.

        ``command`` is what started the run; ``data`` and ``bank`` are what ``describe()`` of the
        task suite and of the skill bank say.
        """
        made = _make(config)
        folder = cls(made[0], made)
        # The folder is this run's own: the same config starts another one.
        config = replace(config, run=replace(config.run, dir=None))
        try:
            write_text(folder.path / CONFIG, to_yaml(config))
            write_json(folder.path / RECORD, origin(config, command, data, bank))
        except BaseException:  # Ctrl-C too
            folder.discard()
            raise
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that exists. DataError if there is no run in it."""
        folder = cls(Path(path))
        missing = [name for name in (CONFIG, RECORD) if not (folder.path / name).is_file()]
        if missing:
            raise DataError(f"{path} is not the folder of a run: it has no {missing[0]}")
        return folder

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    def record(self) -> dict[str, Any]:
        """What run.json holds. DataError if it cannot be read."""
        try:
            loaded: dict[str, Any] = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / RECORD} cannot be read: {error}") from error
        if not isinstance(loaded, dict):
            raise DataError(f"{self.path / RECORD} holds no JSON object")
        return loaded

    def resumed(self, config: RunConfig, command: Sequence[str]) -> None:
        """Say in run.json that the run goes on, and in config.yaml with which values."""
        record = self.record()
        write_text(self.config_file, to_yaml(config))
        resumes = [*record.get("resumed", []), {"command": shlex.join(command), "at": _now()}]
        write_json(self.path / RECORD, {**record, "resumed": resumes})

    def finish(self, result: Mapping[str, Any], wall_s: float, cpu_s: float) -> None:
        """Add the result and what the run cost to run.json. A resumed run adds up its costs."""
        record = self.record()
        record["finished"] = _now()
        record["wall_s"] = round(record.get("wall_s", 0.0) + wall_s, 2)
        record["cpu_s"] = round(record.get("cpu_s", 0.0) + cpu_s, 2)
        record["result"] = plain(result)
        write_json(self.path / RECORD, record)

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Errors that end the run inside get a note: where the checkpoint is, and how to go on.

        The command line tells by this note that work had started (exit code 75, not 2). A new run
        that ends before its first checkpoint leaves nothing.
        """
        try:
            with on_disk(self.path):
                yield
        except (RsipoError, KeyboardInterrupt) as error:
            if note := go_on(self.path):
                error.add_note(note)
            else:
                self.discard()
            raise

    def discard(self) -> None:
        """Remove a new run that has not begun, and the folders that were made for it."""
        begun = go_on(self.path) or (self.path / "metrics.csv").exists()
        if self.made and not begun:
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # another run is in one of them
                for folder in self.made[1:]:
                    folder.rmdir()


def go_on(run: Path) -> str:
    """How to go on with a run that has stopped; "" if it has no checkpoint."""
    if checkpoints := sorted(run.glob("checkpoints/update-*.ckpt")):
        resume = f"rsipo-fit --resume {shlex.quote(str(run))}"
        return f"checkpoint: {checkpoints[-1]}; go on with: {resume}"
    return ""


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """A disk that is full or fails is a CheckpointError; ``path`` is what is being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise CheckpointError(f"cannot write to {path}: {error.strerror}; make room") from error


def check_writable(config: RunConfig | SftConfig) -> None:
    """ConfigError if the run's folder exists or could not be made; leaves nothing behind."""
    target = Path(config.run.dir or config.run.root)
    if config.run.dir and os.path.lexists(target):
        raise ConfigError(_taken(target, config))
    parent = target
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rsipo-", dir=parent))
    except OSError as error:
        key = "run.dir" if config.run.dir else "run.root"
        raise ConfigError(
            f"cannot write to {parent}: {error.strerror}; choose another place with {key}=FOLDER"
        ) from error


def origin(
    config: RunConfig | SftConfig,
    command: Sequence[str],
    data: Mapping[str, Any] | None = None,
    bank: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a result came from: command, seed, data, skill bank, git commit, versions. Plain
    containers.
    """
    return {
        "command": shlex.join(command),
        "folder": os.getcwd(),
        "started": _now(),
        "groups": config.groups,
        "seed": config.seed,
        "data": plain(data or {}),
        **({"bank": dict(bank)} if bank else {}),
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from; None if it is installed, or without git."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a venv may lie in somebody's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _make(config: RunConfig | SftConfig) -> list[Path]:
    """The new folder, and behind it the parents that had to be made for it."""
    if config.run.dir:
        wanted = [Path(config.run.dir)]
    else:
        parent = Path(config.run.root) / config.groups["env"] / config.method
        name = f"{datetime.now():%Y%m%d-%H%M%S}-s{config.seed}"
        wanted = [parent / (name + suffix) for suffix in ("", *(f"-{i}" for i in range(2, 1000)))]
    for path in wanted:
        missing: list[Path] = []
        try:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()  # fails if another process was faster
            return missing
        except FileExistsError:
            continue
        except OSError as error:
            for folder in missing[1:]:
                with suppress(OSError):
                    folder.rmdir()
            raise ConfigError(f"cannot make {path}: {error.strerror}") from error
    raise ConfigError(_taken(wanted[0], config))


def _taken(path: Path, config: RunConfig | SftConfig) -> str:
    go_on = f", or go on with it: rsipo-fit --resume {path}"
    return f"{path} exists; choose another run.dir{go_on if isinstance(config, RunConfig) else ''}"


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """A record as indented JSON, all or nothing. CheckpointError if it cannot be written."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file. CheckpointError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
